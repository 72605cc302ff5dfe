"""Read-only pictures of the core, for metrics, `nvshare-ctl` and tests.

Nobody changes a picture, so it may leave the thread that made it.  Fields keep their names when `nvshare-ctl --json`
lays the records flat; no two records of one picture share a name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvshare.coordinator.memory import host_budget, room
from nvshare.coordinator.model.client import Client, Identity
from nvshare.coordinator.model.gang import Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import NEXT, Seat
from nvshare.coordinator.model.statistics import (
    LeaseStatistics,
    MoveStatistics,
    SeatMoveStatistics,
    SeatStatistics,
)
from nvshare.coordinator.protocol.messages import MemoryMode, Sharing
from nvshare.scheduler_policies.api import Progress, Rank


@dataclass(frozen=True, slots=True)
class SeatMemorySnapshot:
    """Memory of one client on one GPU."""

    limit_bytes: int
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    host_bytes: int
    evicted_bytes: int
    """Allocated and not resident now."""
    reserved_bytes: int
    room_bytes: int
    """The most that the client can have on the GPU beside immovable memory of others."""
    lacking_bytes: int
    """What it needs beyond that."""
    immovable_bytes: int
    """What of it cannot move, or was allowed to become so."""
    shut_out: bool
    """It is unschedulable for lack of room."""
    prepare_bytes: int


@dataclass(frozen=True, slots=True)
class SeatSnapshot:
    """One client on one GPU.  `statistics` and `moves` are counters."""

    uuid: str
    gpu: int
    phase: str
    lease_id: int
    waiting_since_ns: int | None
    holding_since_ns: int | None
    demoted: bool
    moving: str | None
    """`out`, `in` or None."""
    memory: SeatMemorySnapshot
    statistics: SeatStatistics
    """The present lease included."""
    moves: SeatMoveStatistics
    progress: Progress
    step_rate: float
    """Steps a second as the program counts them; 0: it does not."""
    member: bool
    """It is in the plan's running set."""
    recent_share: float
    """Part of the last minute, or since it attached, in which it had a lease."""


@dataclass(frozen=True, slots=True)
class WaitSnapshot:
    """Why one client waits for one GPU."""

    index: int
    """The GPU's number on the node."""
    identity: Identity
    holders: tuple[Identity, ...]
    place: int
    """Clients that come before it; 0: it is the next one, or has no place."""
    paused: bool
    lacking_bytes: int
    """What its memory lacks beside immovable memory; 0: it fits."""
    recovering: bool
    moving: bool
    """It was chosen, and memory moves."""


@dataclass(frozen=True, slots=True)
class RefusalSnapshot:
    """Why one client gets no more memory on one GPU."""

    index: int
    identity: Identity
    capacity_bytes: int
    immovable: tuple[tuple[Identity, int], ...]
    """What the other clients have that cannot move, most first."""


@dataclass(frozen=True, slots=True)
class ClientSnapshot:
    """One connection."""

    client: int
    identity: Identity
    rank: Rank
    memory_mode: MemoryMode
    registered_at_ns: int
    paused: bool
    limit_bytes: int
    host_share_bytes: int
    seats: tuple[SeatSnapshot, ...]
    spatial: bool = False
    gang: str = ""


@dataclass(frozen=True, slots=True)
class RulesSnapshot:
    """What is in force on one GPU."""

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
    """What does not fit, as clients were told."""
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


@dataclass(frozen=True, slots=True)
class GangSnapshot:
    """One gang.  `turns` and `gathered_ns` are counters."""

    name: str
    clients: tuple[int, ...]
    gpus: tuple[str, ...]
    state: str
    """`running`: in its turn.  `gathering`: its GPUs are being freed.  `due`: its turn has come, its GPUs have not.
    Else `idle`."""
    turns: int
    gathered_ns: int
    """Time for which its GPUs were reserved until all were free."""


@dataclass(frozen=True, slots=True)
class HostOwnerSnapshot:
    """All clients of one user or slot that ask for host memory.  `refused` is a counter while it has clients."""

    owner: str
    """`user 1000`, or `slot NAME`."""
    clients: int
    shared_bytes: int
    spare_bytes: int
    """How much more it could be given now."""
    refused: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at `now_ns`."""

    now_ns: int
    host_budget_bytes: int
    host_shared_bytes: int
    gpus: tuple[GpuSnapshot, ...]
    clients: tuple[ClientSnapshot, ...]
    gangs: tuple[GangSnapshot, ...] = ()
    gang_turns: int = 0
    gang_gathered_ns: int = 0
    """Counters, over all gangs since the start."""
    host_owners: tuple[HostOwnerSnapshot, ...] = ()
    host_refused: int = 0
    """A counter."""


def _gang(gang: Gang) -> GangSnapshot:
    state = "idle" if gang.due_since_ns is None else "due"
    if gang.slot is not None:
        state = "gathering" if gang.slot.ends_ns is None else "running"
    return GangSnapshot(
        name=gang.name,
        clients=tuple(dict.fromkeys(seat.client.client_id for seat in gang.seats)),
        gpus=tuple(dict.fromkeys(seat.gpu.uuid for seat in gang.seats)),
        state=state,
        turns=gang.turns,
        gathered_ns=gang.gathered_ns,
    )


def _seat(seat: Seat, now_ns: int) -> SeatSnapshot:
    memory, order = seat.memory, seat.moves.order
    return SeatSnapshot(
        uuid=seat.gpu.uuid,
        gpu=seat.ordinal,
        phase=seat.phase.value,
        lease_id=seat.lease.lease_id,
        waiting_since_ns=seat.place.waiting_since_ns,
        holding_since_ns=seat.lease.granted_at_ns,
        demoted=seat.place.demoted,
        moving=None if order is None else "out" if order.evict else "in",
        memory=SeatMemorySnapshot(
            limit_bytes=memory.limit_bytes,
            allocated_bytes=memory.allocated_bytes,
            resident_bytes=memory.resident_bytes,
            pinned_bytes=memory.pinned_bytes,
            host_bytes=memory.host_bytes,
            evicted_bytes=memory.allocated_bytes - memory.resident_bytes,
            reserved_bytes=memory.reserved_bytes,
            room_bytes=room.room_bytes(seat),
            lacking_bytes=seat.room.lacking_bytes,
            immovable_bytes=seat.room.immovable_bytes,
            shut_out=seat.room.unschedulable,
            prepare_bytes=seat.sent.prepare_bytes,
        ),
        statistics=replace(seat.statistics, used_ns=seat.held_ns(now_ns)),
        moves=replace(seat.moves.statistics),
        progress=seat.progress.view(),
        step_rate=seat.progress.step_rate,
        member=seat.client.client_id in seat.gpu.schedule.members,
        recent_share=seat.recent.share(now_ns, seat.held_ns(now_ns), seat.place.attached_at_ns),
    )


def _gpu(gpu: Gpu, now_ns: int) -> GpuSnapshot:
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
            sharing=rules.sharing,
            quantum_ns=rules.quantum_ns,
            quantum_automatic=rules.quantum_setting_ns is None,
            switch_share=rules.switch_share,
            switch_cost_ns=int(switching.average_cost_ns),
            why=gpu.schedule.why,
            members=tuple(gpu.schedule.members),
            held_back=gpu.schedule.held_back,
            crowded=gpu.schedule.crowded,
            slot_of_gang="" if gpu.slot is None else gpu.slot.gang.name,
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
            queue=_queue(gpu),
            lease_id=gpu.leases.next_lease_id - 1,
            recent_handovers_ns=tuple(switching.recent_handovers_ns),
            recent_drains_ns=tuple(switching.recent_drains_ns),
        ),
        memory=GpuMemorySnapshot(
            total_bytes=memory.total_bytes,
            capacity_bytes=memory.capacity_bytes,
            allocated_bytes=memory.allocated_bytes,
            resident_bytes=memory.resident_bytes,
            pinned_bytes=sum(seat.memory.pinned_bytes for seat in seats),
            host_bytes=memory.host_bytes,
            overflow_bytes=memory.overflow_bytes,
            moving=len(memory.moving),
        ),
        statistics=replace(gpu.statistics, held_ns=gpu.statistics.held_ns + running_ns),
        moves=replace(memory.statistics),
    )


def _queue(gpu: Gpu) -> tuple[int, ...]:
    """The policy's order, then turn order."""
    waiting = dict.fromkeys(seat.client.client_id for seat in gpu.wait_queue.seats())
    return tuple(dict.fromkeys((*(client for client in gpu.schedule.order if client in waiting), *waiting)))


def take_wait(node: Node, seat: Seat) -> WaitSnapshot | None:
    """Why this client waits; None when it does not.  O(waiting clients of the GPU)."""
    gpu, client = seat.gpu, seat.client
    if seat.place.waiting_since_ns is None:
        return None
    queue = _queue(gpu)
    return WaitSnapshot(
        index=list(node.gpus).index(gpu.uuid),
        identity=client.identity,
        holders=tuple(each.client.identity for each in gpu.leases.by_client.values()),
        place=queue.index(client.client_id) if client.client_id in queue else 0,
        paused=client.paused,
        lacking_bytes=seat.room.lacking_bytes if seat.room.unschedulable else 0,
        recovering=gpu.recovering,
        moving=seat.phase is NEXT,
    )


def take_refusal(node: Node, client: Client, uuid: str) -> RefusalSnapshot:
    """Who has what on this GPU that cannot move.  O(clients of the GPU)."""
    gpu = node.gpus[uuid]
    others = [seat for seat in gpu.seats.values() if seat.client is not client and seat.room.immovable_bytes]
    others.sort(key=lambda seat: -seat.room.immovable_bytes)
    return RefusalSnapshot(
        index=list(node.gpus).index(uuid),
        identity=client.identity,
        capacity_bytes=gpu.memory.capacity_bytes,
        immovable=tuple((seat.client.identity, seat.room.immovable_bytes) for seat in others),
    )


def take_client(client: Client, now_ns: int) -> ClientSnapshot:
    """One connection at this time."""
    return ClientSnapshot(
        client=client.client_id,
        identity=client.identity,
        rank=client.rank,
        memory_mode=client.memory_mode,
        registered_at_ns=client.registered_at_ns,
        paused=client.paused,
        limit_bytes=client.memory_limit_bytes,
        host_share_bytes=client.host.share_bytes,
        seats=tuple(_seat(seat, now_ns) for seat in client.seats.values()),
        spatial=client.spatial,
        gang=client.gang,
    )


def take(node: Node, now_ns: int) -> Snapshot:
    """The whole core at this time."""
    host = node.host
    return Snapshot(
        now_ns=now_ns,
        host_budget_bytes=host.budget_bytes,
        host_shared_bytes=host.shared_bytes,
        gpus=tuple(_gpu(gpu, now_ns) for gpu in node.gpus.values()),
        clients=tuple(take_client(client, now_ns) for client in node.clients.values()),
        gangs=tuple(_gang(gang) for gang in node.gangs.values()),
        gang_turns=node.gang_turns,
        gang_gathered_ns=node.gang_gathered_ns,
        host_owners=tuple(
            HostOwnerSnapshot(name, of.clients, of.shared_bytes, host_budget.spare_bytes(node, name), of.refused)
            for name, of in host.owners.items()
        ),
        host_refused=host.refused,
    )
