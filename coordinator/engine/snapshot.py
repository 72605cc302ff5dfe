"""Read-only pictures of the core, for metrics, `nvshare-ctl` and tests.

Invariants: frozen through and through, so a picture may leave the thread that made it; times in ns, sizes in bytes;
what is called a counter only grows while its GPU or client lives.

May not go here: anything that changes the core.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvshare.coordinator.gangs import coscheduling
from nvshare.coordinator.gangs.coscheduling import Gang
from nvshare.coordinator.memory import host_budget, room
from nvshare.coordinator.memory.quantum import switch_cost_ns
from nvshare.coordinator.model.state import NEXT, Client, Gpu, Node, Seat
from nvshare.coordinator.protocol.messages import MemoryMode, Sharing


@dataclass(frozen=True, slots=True)
class SeatSnapshot:
    """One client on one GPU.  `leases` to `overdue` and `moved_out_bytes` to `failed_orders` are counters."""

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
    evicted_bytes: int
    """Allocated and not resident now."""
    reserved_bytes: int
    room_bytes: int
    """The most of it that can be on the GPU, beside what others have there that cannot move."""
    lacking_bytes: int
    """It needs so much more than that."""
    immovable_bytes: int
    """Of it, or allowed to become so."""
    shut_out: bool
    """It cannot run, for want of what it lacks; it is tried now and then."""
    prepare_bytes: int
    moving: str | None
    """`out`, `in` or None."""
    moved_out_bytes: int
    moved_in_bytes: int
    hidden_move_ns: int
    exposed_move_ns: int
    failed_orders: int


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
    host_share_bytes: int
    seats: tuple[SeatSnapshot, ...]
    group: str = ""
    """The slot that it belongs to, if any."""
    weight: int = 1
    gang: str = ""


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
    expected_process: int
    """The process for which a recovery waits; -1: several, or one that cannot be told; 0: none."""
    expected_stopped: bool
    """That process is stopped, so the recovery lasts until it goes on or ends."""
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
    switch_share: float
    """What of the time an automatic quantum lets switching cost."""
    overflow_bytes: int
    """What does not fit, as clients were told of it."""
    moving: int
    """Memory orders under way."""
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
    """How long grants waited for memory.  The next two sum up orders: exposed while a grant waits, else hidden."""
    exposed_move_ns: int
    hidden_move_ns: int
    evict_orders: int
    restore_orders: int
    evicted_bytes: int
    """Moved out since the start; of what is out now see the clients."""
    restored_bytes: int
    failed_orders: int
    late_switches: int
    refused_reservations: int
    policy_failures: int
    recent_handovers_ns: tuple[int, ...]
    recent_drains_ns: tuple[int, ...]


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
    """For how long its GPUs were kept until all were free."""


@dataclass(frozen=True, slots=True)
class HostOwnerSnapshot:
    """All clients of one user or slot that ask for host memory.  `refused` is a counter while it has clients."""

    owner: str
    """`user 1000`, or `slot NAME`."""
    clients: int
    shared_bytes: int
    spare_bytes: int
    """How much more it could be given now; see memory/host_budget.py."""
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
    """Counters, over all gangs that there ever were."""
    host_owners: tuple[HostOwnerSnapshot, ...] = ()
    host_refused: int = 0
    """A counter."""


def _gang(gang: Gang, now_ns: int) -> GangSnapshot:
    state = "idle"
    if coscheduling.in_turn(gang, now_ns):
        state = "running"
    elif gang.gathering_since_ns is not None:
        state = "gathering"
    elif gang.due_since_ns is not None:
        state = "due"
    return GangSnapshot(
        name=gang.name,
        clients=tuple(dict.fromkeys(seat.client.client for seat in gang.seats)),
        gpus=tuple(dict.fromkeys(seat.gpu.uuid for seat in gang.seats)),
        state=state,
        turns=gang.turns,
        gathered_ns=gang.gathered_ns,
    )


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
        evicted_bytes=seat.allocated_bytes - seat.resident_bytes,
        reserved_bytes=seat.reserved_bytes,
        room_bytes=room.room_bytes(seat),
        lacking_bytes=seat.fit.lacking_bytes,
        immovable_bytes=seat.fit.immovable_bytes,
        shut_out=seat.fit.shut_out,
        prepare_bytes=seat.prepare_bytes,
        moving=None if seat.order is None else "out" if seat.order.evict else "in",
        moved_out_bytes=seat.moved_out_bytes,
        moved_in_bytes=seat.moved_in_bytes,
        hidden_move_ns=seat.hidden_move_ns,
        exposed_move_ns=seat.exposed_move_ns,
        failed_orders=seat.failed_orders,
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
        expected_process=gpu.expected_holder or 0,
        expected_stopped=gpu.recovering and gpu.holder_stopped,
        holders=tuple(gpu.leases),
        preparing=next((s.client.client for s in seats if s.phase is NEXT), None),
        clients=len(seats),
        waiting=sum(1 for s in seats if s.waiting_since_ns is not None),
        lease_id=gpu.next_lease_id - 1,
        allocated_bytes=gpu.allocated_bytes,
        resident_bytes=gpu.resident_bytes,
        pinned_bytes=sum(s.pinned_bytes for s in seats),
        host_bytes=gpu.host_bytes,
        switch_cost_ns=int(switch_cost_ns(gpu)),
        switch_share=gpu.switch_share,
        overflow_bytes=gpu.overflow_bytes,
        moving=len(gpu.moving),
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
        exposed_move_ns=gpu.exposed_move_ns,
        hidden_move_ns=gpu.hidden_move_ns,
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


def take_client(client: Client, now_ns: int) -> ClientSnapshot:
    """One connection at this time."""
    return ClientSnapshot(
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
        host_share_bytes=client.host_share_bytes,
        seats=tuple(_seat(seat, now_ns) for seat in client.seats.values()),
        group=client.group,
        weight=client.weight,
        gang=client.gang,
    )


def take(node: Node, now_ns: int) -> Snapshot:
    """The whole core at this time."""
    clients = tuple(take_client(client, now_ns) for client in node.clients.values())
    gpus = tuple(_gpu(gpu, now_ns) for gpu in node.gpus.values())
    return Snapshot(
        now_ns,
        node.host_budget_bytes,
        node.host_shared_bytes,
        gpus,
        clients,
        tuple(_gang(gang, now_ns) for gang in node.gangs.values()),
        node.gang_turns,
        node.gang_gathered_ns,
        tuple(
            HostOwnerSnapshot(name, of.clients, of.shared_bytes, host_budget.spare_bytes(node, name), of.refused)
            for name, of in node.host_owners.items()
        ),
        node.host_refused,
    )
