"""Read-only pictures of the core, for metrics, `nvshare-ctl` and tests.

Invariants: frozen through and through, so a picture may leave the thread that made it; times in ns, sizes in bytes;
what is called a counter only grows while its GPU or client lives.

May not go here: anything that changes the core.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.quantum import switch_cost_ns
from coordinator.state import NEXT, Gpu, Node, Seat
from coordinator.wire import MemoryMode, Sharing


@dataclass(frozen=True, slots=True)
class SeatSnapshot:
    """One client on one GPU.  `leases` to `overdue` are counters."""

    uuid: str
    gpu: int
    phase: str
    lease_id: int
    waiting_since_ns: int | None
    holding_since_ns: int | None
    used_ns: int
    leases: int
    submissions: int
    waited_ns: int
    max_wait_ns: int
    revokes: int
    idle_releases: int
    overdue: int
    demoted: bool
    limit_bytes: int
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    host_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class ClientSnapshot:
    """One connection."""

    client: int
    name: str
    program: str
    process_id: int
    user_id: int
    priority: int
    memory_mode: MemoryMode
    registered_at_ns: int
    paused: bool
    limit_bytes: int
    seats: tuple[SeatSnapshot, ...]


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """One GPU.  `grants` to `refused_reservations` are counters; `recent_*` the last samples, oldest first."""

    uuid: str
    name: str
    total_bytes: int
    capacity_bytes: int
    policy: str
    sharing: Sharing
    quantum_ns: int
    quantum_automatic: bool
    recovering: bool
    holders: tuple[int, ...]
    """Clients with a lease, those overdue included."""
    preparing: int | None
    """The client for which memory moves, if any."""
    clients: int
    waiting: int
    lease_id: int
    """The last one given."""
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    host_bytes: int
    switch_cost_ns: int
    grants: int
    handovers: int
    revokes: int
    idle_releases: int
    overdue: int
    held_ns: int
    waited_ns: int
    max_wait_ns: int
    drained_ns: int
    moved_ns: int
    evict_orders: int
    restore_orders: int
    evicted_bytes: int
    restored_bytes: int
    failed_orders: int
    late_switches: int
    refused_reservations: int
    policy_failures: int
    recent_handovers_ns: tuple[int, ...]
    recent_drains_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at `now_ns`."""

    now_ns: int
    gpus: tuple[GpuSnapshot, ...]
    clients: tuple[ClientSnapshot, ...]


def _seat(seat: Seat, now_ns: int) -> SeatSnapshot:
    return SeatSnapshot(
        uuid=seat.gpu.uuid,
        gpu=seat.ordinal,
        phase=seat.phase.value,
        lease_id=seat.lease_id,
        waiting_since_ns=seat.waiting_since_ns,
        holding_since_ns=seat.granted_at_ns,
        used_ns=seat.held_ns(now_ns),
        leases=seat.leases,
        submissions=seat.submissions,
        waited_ns=seat.waited_ns,
        max_wait_ns=seat.max_wait_ns,
        revokes=seat.revokes,
        idle_releases=seat.idle_releases,
        overdue=seat.overdue,
        demoted=seat.demoted,
        limit_bytes=seat.limit_bytes,
        allocated_bytes=seat.allocated_bytes,
        resident_bytes=seat.resident_bytes,
        pinned_bytes=seat.pinned_bytes,
        host_bytes=seat.host_bytes,
        reserved_bytes=seat.reserved_bytes,
    )


def _gpu(gpu: Gpu, now_ns: int) -> GpuSnapshot:
    seats = gpu.seats.values()
    running_ns = sum(now_ns - s.granted_at_ns for s in gpu.leases.values() if s.granted_at_ns is not None)
    return GpuSnapshot(
        uuid=gpu.uuid,
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        capacity_bytes=gpu.capacity_bytes,
        policy=gpu.umpire.name,
        sharing=gpu.sharing,
        quantum_ns=gpu.quantum_ns,
        quantum_automatic=gpu.quantum_setting_ns is None,
        recovering=gpu.recovering,
        holders=tuple(gpu.leases),
        preparing=next((s.client.client for s in seats if s.phase is NEXT), None),
        clients=len(seats),
        waiting=sum(1 for s in seats if s.waiting_since_ns is not None),
        lease_id=gpu.next_lease_id - 1,
        allocated_bytes=gpu.allocated_bytes,
        resident_bytes=gpu.resident_bytes,
        pinned_bytes=sum(s.pinned_bytes for s in seats),
        host_bytes=sum(s.host_bytes for s in seats),
        switch_cost_ns=int(switch_cost_ns(gpu)),
        grants=gpu.grants,
        handovers=gpu.handovers,
        revokes=gpu.revokes,
        idle_releases=gpu.idle_releases,
        overdue=gpu.overdue,
        held_ns=gpu.held_ns + running_ns,
        waited_ns=gpu.waited_ns,
        max_wait_ns=gpu.max_wait_ns,
        drained_ns=gpu.drained_ns,
        moved_ns=gpu.moved_ns,
        evict_orders=gpu.evict_orders,
        restore_orders=gpu.restore_orders,
        evicted_bytes=gpu.evicted_bytes,
        restored_bytes=gpu.restored_bytes,
        failed_orders=gpu.failed_orders,
        late_switches=gpu.late_switches,
        refused_reservations=gpu.refused_reservations,
        policy_failures=gpu.umpire.failures,
        recent_handovers_ns=tuple(gpu.recent_handovers_ns),
        recent_drains_ns=tuple(gpu.recent_drains_ns),
    )


def take(node: Node, now_ns: int) -> Snapshot:
    """The whole core at this time."""
    clients = tuple(
        ClientSnapshot(
            client=client.client,
            name=client.name,
            program=client.program,
            process_id=client.process_id,
            user_id=client.user_id,
            priority=client.priority,
            memory_mode=client.memory_mode,
            registered_at_ns=client.registered_at_ns,
            paused=client.paused,
            limit_bytes=client.memory_limit_bytes,
            seats=tuple(_seat(seat, now_ns) for seat in client.seats.values()),
        )
        for client in node.clients.values()
    )
    return Snapshot(now_ns, tuple(_gpu(gpu, now_ns) for gpu in node.gpus.values()), clients)
