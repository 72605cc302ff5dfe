"""Read-only pictures of the core, for metrics, `nvshare-ctl` and tests.

Nobody changes a picture, so it may leave the thread that made it.  A field without a rule of its own is the field of
that name in a record of the model.  Fields keep their names when `nvshare-ctl --json` lays the records flat; no two
records of one picture share a name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from nvshare.coordinator.engine import progress
from nvshare.coordinator.engine.memory import claims, host_budget, room
from nvshare.coordinator.engine.parking import parking
from nvshare.coordinator.engine.standing import Standing, standing
from nvshare.coordinator.model.client import Client, Identity
from nvshare.coordinator.model.gang import Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.placement import NOT_PLACED, Placement
from nvshare.coordinator.model.seat import NEXT, Seat
from nvshare.coordinator.model.settings import Sharing
from nvshare.coordinator.model.statistics import LeaseStatistics, MoveStatistics, SeatMoveStatistics, SeatStatistics
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import Progress, Rank

Picture = TypeVar("Picture")


def _derive(picture: type[Picture], *records: Any, **computed: Any) -> Picture:
    """A picture of these fields, the others copied from the first record that has them."""
    copied = _copied(picture, tuple(map(type, records)), tuple(computed))  # type: ignore[arg-type]
    for index, name in copied:
        computed[name] = getattr(records[index], name)
    return picture(**computed)


@functools.cache
def _copied(picture: type, records: tuple[type, ...], computed: tuple[str, ...]) -> list[tuple[int, str]]:
    """Which record, by its place, has each field."""
    names = [field.name for field in fields(picture) if field.name not in computed]
    return [(next(i for i, record in enumerate(records) if hasattr(record, name)), name) for name in names]


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
    released_bytes: int
    """Freed by the program's callbacks of `on_pressure`, since its start."""
    reserved_bytes: int
    room_bytes: int
    """The most that the client can have on the GPU beside immovable memory of others."""
    lacking_bytes: int
    """The client's need beyond that room."""
    immovable_bytes: int
    """Memory that cannot move, or was allowed to become immovable."""
    unschedulable: bool
    """It is unschedulable for lack of room."""
    prepare_bytes: int
    """The probable size of an eviction."""
    prepared_bytes: int
    """Host memory that an eviction finds ready."""


@dataclass(frozen=True, slots=True)
class SeatTurnSnapshot:
    """Turns of one client on one GPU."""

    waiting_since_ns: int | None
    """None: it does not wait for others."""
    demoted: bool
    recent_share: float
    """Part of the last minute, or since it attached, in which it had a lease."""


@dataclass(frozen=True, slots=True)
class SeatSnapshot:
    """One client on one GPU.  `statistics` and `moves` are counters."""

    uuid: str
    gpu: int
    phase: str
    lease_id: int
    holding_since_ns: int | None
    standing: Standing
    turn: SeatTurnSnapshot
    moving: str | None
    """`out`, `in` or None."""
    memory: SeatMemorySnapshot
    statistics: SeatStatistics
    """The present lease included."""
    moves: SeatMoveStatistics
    recent_moved_bytes: int
    """Moved out and in during the last minute."""
    progress: Progress
    progress_normalised: float
    """Rate over time, waiting included, against the rate alone; 0: not known.  For people: policies see `progress`."""
    step_rate: float
    """Steps a second as the program counts them; 0: it does not."""


@dataclass(frozen=True, slots=True)
class ClientSnapshot:
    """One connection."""

    client: int
    identity: Identity
    rank: Rank
    memory_mode: MemoryMode
    memory_auto: bool
    registered_at_ns: int
    paused: bool
    limit_bytes: int
    host_share_bytes: int
    seats: tuple[SeatSnapshot, ...]
    parking: str
    """As `ParkState`."""
    parking_why: str
    """The reason of the last refusal or failure."""
    parking_obstacle: str = ""
    """Why it cannot be parked, as far as it is known now; "": it may be possible."""
    moves_to: str = ""
    """The GPU to which it is being moved; "": none."""
    moved_from: str = ""
    """The GPU from which it was moved last; "": it was never moved."""
    moved_why: str = ""
    spatial: bool = False
    gang: str = ""
    placement: Placement = NOT_PLACED


def paged_out(gpu: Gpu) -> dict[int, int]:
    """By client: managed memory that it counts as resident and that cannot be, because the GPU has less.

    The driver pages it out without a report.  The programs with the oldest leases lose theirs first.
    """
    beyond = gpu.memory.resident_bytes - gpu.memory.capacity_bytes
    found: dict[int, int] = {}
    if beyond > 0:
        managed = [seat for seat in gpu.memory.evictable.values() if seat.client.memory_mode is MemoryMode.MANAGED]
        for seat in sorted(managed, key=lambda seat: seat.lease.lease_id):
            found[seat.client.client_id] = min(beyond, seat.memory.resident_bytes - seat.memory.pinned_bytes)
            beyond -= found[seat.client.client_id]
    return found


def _waits_since_ns(seat: Seat) -> int | None:
    return seat.place.waiting_since_ns if seat.schedulable or seat.room.unschedulable else None


def _seat(seat: Seat, paged: Mapping[int, int], now_ns: int) -> SeatSnapshot:
    memory, move = seat.memory, seat.moves.move
    resident_bytes = memory.resident_bytes - paged.get(seat.client.client_id, 0)
    return _derive(
        SeatSnapshot,
        seat.lease,
        seat.progress,
        uuid=seat.gpu.uuid,
        gpu=seat.ordinal,
        phase=seat.phase.value,
        holding_since_ns=seat.lease.granted_at_ns,
        standing=standing(seat),
        turn=_derive(
            SeatTurnSnapshot,
            seat.place,
            waiting_since_ns=_waits_since_ns(seat),
            recent_share=seat.place.recent.share(now_ns, seat.held_ns(now_ns), seat.place.attached_at_ns),
        ),
        moving=None if move is None else "out" if move.out else "in",
        memory=_derive(
            SeatMemorySnapshot,
            memory,
            seat.room,
            seat.sent,
            resident_bytes=resident_bytes,
            evicted_bytes=memory.allocated_bytes - resident_bytes,
            room_bytes=room.room_bytes(seat),
        ),
        statistics=replace(seat.statistics, used_ns=seat.held_ns(now_ns)),
        moves=replace(seat.moves.statistics),
        recent_moved_bytes=int(seat.moves.recent.growth(now_ns, seat.moves.statistics.moved_bytes)),
        progress=seat.progress.view(),
        progress_normalised=progress.over_time(seat, now_ns),
    )


def take_client(client: Client, now_ns: int, paged: Callable[[Gpu], Mapping[int, int]] = paged_out) -> ClientSnapshot:
    """One connection at this time."""
    return _derive(
        ClientSnapshot,
        client,
        client.facts,
        client=client.client_id,
        host_share_bytes=client.host.share_bytes,
        parking=client.parking.state.value,
        parking_why=client.parking.why,
        parking_obstacle=parking.client_obstacle(client),
        moves_to=client.parking.move.target,
        moved_from=client.parking.move.source,
        moved_why=client.parking.move.source_why,
        seats=tuple(_seat(seat, paged(seat.gpu), now_ns) for seat in client.seats.values()),
    )


@dataclass(frozen=True, slots=True)
class RulesSnapshot:
    """Settings and plan in force on one GPU."""

    policy: str
    policy_failures: int
    policy_failed: str
    """What the earlier policy did wrong, if `policy` has replaced it."""
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
    integrated: bool
    kept_bytes: int
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    host_bytes: int
    overflow_bytes: int
    """Memory that does not fit, as clients were told."""
    moving: int
    """Clients whose memory moves."""
    recent_moved_bytes: int
    """Moved out and in during the last minute, of clients that have left too."""
    recent_wait_ns: int
    """Time of the last minute in which grants waited for memory."""


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
        rules=_derive(
            RulesSnapshot,
            rules,
            gpu.settings,
            gpu.schedule,
            policy=gpu.policy_guard.name,
            policy_failures=gpu.policy_guard.failures,
            policy_failed=gpu.policy_guard.failed,
            quantum_automatic=gpu.settings.quantum_ns is None,
            switch_cost_ns=int(switching.average_cost_ns),
            members=tuple(gpu.schedule.members),
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
            waiting=sum(_waits_since_ns(seat) is not None for seat in seats),
            queue=queue(gpu),
            lease_id=gpu.leases.next_lease_id - 1,
            recent_handovers_ns=tuple(switching.recent_handovers_ns),
            recent_drains_ns=tuple(switching.recent_drains_ns),
        ),
        memory=_derive(
            GpuMemorySnapshot,
            memory,
            resident_bytes=memory.resident_bytes - sum(paged.values()),
            pinned_bytes=sum(seat.memory.pinned_bytes for seat in seats),
            overflow_bytes=memory.overflow.bytes,
            moving=len(memory.moving),
            recent_moved_bytes=int(memory.recent_moved.growth(now_ns, memory.statistics.moved_bytes)),
            recent_wait_ns=int(memory.recent_waited.growth(now_ns, gpu.exposed_clock_ns(now_ns))),
        ),
        statistics=replace(gpu.leases.statistics, held_ns=gpu.leases.statistics.held_ns + running_ns),
        moves=replace(memory.statistics),
    )


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
    """Host memory that it could be given beyond that now."""
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


def _gang(node: Node, gang: Gang) -> GangSnapshot:
    state = "due" if gang.name in node.queue else "idle"
    if gang.gpus:
        state = "gathering" if gang.together_ns is None else "running"
    return _derive(
        GangSnapshot,
        gang,
        clients=tuple(dict.fromkeys(seat.client.client_id for seat in gang.seats)),
        gpus=tuple(dict.fromkeys(seat.gpu.uuid for seat in gang.seats)),
        state=state,
    )


def take(node: Node, now_ns: int) -> Snapshot:
    """The whole core at this time."""
    host, paged = node.host, functools.cache(paged_out)
    return Snapshot(
        now_ns=now_ns,
        host_budget_bytes=node.host_budget_bytes,
        host_shared_bytes=host.shared_bytes,
        gpus=tuple(take_gpu(gpu, paged(gpu), now_ns) for gpu in node.gpus.values()),
        clients=tuple(take_client(client, now_ns, paged) for client in node.clients.values()),
        gangs=tuple(_gang(node, gang) for gang in node.gangs.values()),
        gang_turns=node.gang_turns,
        gang_gathered_ns=node.gang_gathered_ns,
        host_owners=tuple(
            _derive(HostOwnerSnapshot, of, owner=key.partition("#")[0], spare_bytes=host_budget.spare_bytes(node, key))
            for key, of in host.owners.items()
        ),
        host_refused=host.refused,
    )


@dataclass(frozen=True, slots=True)
class WaitSnapshot:
    """Why one client waits for one GPU."""

    index: int
    """The GPU's number on the node."""
    identity: Identity
    standing: Standing
    blocker: Identity | None
    """The client that the reason names."""
    place: int
    """Clients that come before it; 0: it is the next one, or has no place."""
    lacking_bytes: int


@dataclass(frozen=True, slots=True)
class RefusalSnapshot:
    """Why one client gets no more memory on one GPU."""

    index: int
    identity: Identity
    capacity_bytes: int
    immovable: tuple[tuple[Identity, int], ...]
    """Immovable memory of the other clients, most first."""
    host_left_bytes: int | None = None
    """Of an integrated GPU: what the host's memory and the capacity leave for programs now."""


def take_wait(node: Node, seat: Seat) -> WaitSnapshot | None:
    """Why this client waits; None when it does not.  O(waiting clients of the GPU)."""
    gpu, client = seat.gpu, seat.client
    if seat.place.waiting_since_ns is None:
        return None
    order, stands = queue(gpu), standing(seat)
    blocker = node.clients[stands.blocker].identity if stands.blocker else None
    place = order.index(client.client_id) if client.client_id in order else 0
    index = list(node.gpus).index(gpu.uuid)
    return WaitSnapshot(index, client.identity, stands, blocker, place, seat.room.lacking_bytes)


def take_refusal(node: Node, client: Client, uuid: str) -> RefusalSnapshot:
    """Immovable memory of the other clients on this GPU.  O(clients of the GPU)."""
    gpu = node.gpus[uuid]
    others = [seat for seat in gpu.seats.values() if seat.client is not client and seat.room.immovable_bytes]
    others.sort(key=lambda seat: -seat.room.immovable_bytes)
    left_bytes = claims.free_bytes(gpu) - claims.crowded_bytes(gpu)
    return RefusalSnapshot(
        index=list(node.gpus).index(uuid),
        identity=client.identity,
        capacity_bytes=gpu.memory.capacity_bytes,
        immovable=tuple((seat.client.identity, seat.room.immovable_bytes) for seat in others),
        host_left_bytes=max(0, left_bytes) if gpu.memory.integrated else None,
    )
