"""Pictures of one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.seat import NEXT
from nvshare.coordinator.model.statistics import LeaseStatistics, MoveStatistics
from nvshare.coordinator.protocol.messages import Sharing


@dataclass(frozen=True, slots=True)
class RulesSnapshot:
    """Settings and plan in force on one GPU."""

    policy: str
    policy_failures: int
    sharing: Sharing
    quantum_ns: int
    quantum_automatic: bool
    switch_share: float
    """The share of time that an automatic quantum lets switching cost."""
    switch_cost_ns: int
    why: str
    """Why the programs share the GPU as they do."""
    members: tuple[int, ...]
    """The running set of the plan."""
    held_back: bool
    """The policy wants a switch of memory that would cost too much now."""
    crowded: bool
    """A member was left out because its memory does not fit beside the others'."""
    slot_of_gang: str
    """The gang that has this GPU, whatever the policy plans; "": none."""


@dataclass(frozen=True, slots=True)
class RecoverySnapshot:
    """Whether one GPU waits for a lease of an earlier coordinator."""

    recovering: bool
    expected_process: int
    """The process for which recovery waits; -1: several, or an unknown one; 0: none."""
    expected_stopped: bool
    """That process is stopped: recovery lasts until it continues or ends."""


@dataclass(frozen=True, slots=True)
class LeasesSnapshot:
    """Leases of one GPU."""

    holders: tuple[int, ...]
    """Clients with a lease, overdue ones included."""
    preparing: int | None
    """The client for which memory moves, if any."""
    waiting: int
    queue: tuple[int, ...]
    """Waiting clients that may be granted, in the order in which they probably will be."""
    lease_id: int
    """The last one given."""
    recent_handovers_ns: tuple[int, ...]
    recent_drains_ns: tuple[int, ...]
    """The last samples, oldest first."""


@dataclass(frozen=True, slots=True)
class GpuMemorySnapshot:
    """Memory of one GPU."""

    total_bytes: int
    capacity_bytes: int
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    host_bytes: int
    overflow_bytes: int
    """Memory that does not fit, as clients were told."""
    moving: int
    """Open memory orders."""


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """One GPU.  `statistics` and `moves` are counters."""

    uuid: str
    name: str
    clients: int
    rules: RulesSnapshot
    recovery: RecoverySnapshot
    leases: LeasesSnapshot
    memory: GpuMemorySnapshot
    statistics: LeaseStatistics
    """Present leases included."""
    moves: MoveStatistics


def queue(gpu: Gpu) -> tuple[int, ...]:
    """Waiting clients: the policy's order, then turn order."""
    waiting = dict.fromkeys(seat.client.client_id for seat in gpu.wait_queue.seats())
    return tuple(dict.fromkeys((*(client for client in gpu.schedule.order if client in waiting), *waiting)))


def take_gpu(gpu: Gpu, paged: Mapping[int, int], now_ns: int) -> GpuSnapshot:
    """One GPU at this time.  `paged`: managed memory that the driver has paged out, by client."""
    seats, rules, memory, switching = gpu.seats.values(), gpu.rules, gpu.memory, gpu.switching
    granted_ns = [seat.lease.granted_at_ns for seat in gpu.leases.by_client.values()]
    running_ns = sum(now_ns - at_ns for at_ns in granted_ns if at_ns is not None)
    return GpuSnapshot(
        uuid=gpu.uuid,
        name=gpu.name,
        clients=len(seats),
        rules=RulesSnapshot(
            policy=gpu.policy_guard.name,
            policy_failures=gpu.policy_guard.failures,
            sharing=gpu.settings.sharing,
            quantum_ns=rules.quantum_ns,
            quantum_automatic=gpu.settings.quantum_ns is None,
            switch_share=gpu.settings.switch_share,
            switch_cost_ns=int(switching.average_cost_ns),
            why=gpu.schedule.why,
            members=tuple(gpu.schedule.members),
            held_back=gpu.schedule.held_back,
            crowded=gpu.schedule.crowded,
            slot_of_gang="" if gpu.gang is None else gpu.gang.name,
        ),
        recovery=RecoverySnapshot(
            recovering=gpu.recovering,
            expected_process=gpu.recovery.expected_holder or 0,
            expected_stopped=gpu.recovering and gpu.recovery.holder_stopped,
        ),
        leases=LeasesSnapshot(
            holders=tuple(gpu.leases.by_client),
            preparing=next((seat.client.client_id for seat in seats if seat.phase is NEXT), None),
            waiting=sum(1 for seat in seats if seat.place.waiting_since_ns is not None),
            queue=queue(gpu),
            lease_id=gpu.leases.next_lease_id - 1,
            recent_handovers_ns=tuple(switching.recent_handovers_ns),
            recent_drains_ns=tuple(switching.recent_drains_ns),
        ),
        memory=GpuMemorySnapshot(
            total_bytes=memory.total_bytes,
            capacity_bytes=memory.capacity_bytes,
            allocated_bytes=memory.allocated_bytes,
            resident_bytes=memory.resident_bytes - sum(paged.values()),
            pinned_bytes=sum(seat.memory.pinned_bytes for seat in seats),
            host_bytes=memory.host_bytes,
            overflow_bytes=memory.overflow.bytes,
            moving=len(memory.moving),
        ),
        statistics=replace(gpu.leases.statistics, held_ns=gpu.leases.statistics.held_ns + running_ns),
        moves=replace(memory.statistics),
    )
