"""Pictures of one client and its seats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nvshare.coordinator.memory import room
from nvshare.coordinator.model.client import Client, Identity
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.model.statistics import SeatMoveStatistics, SeatStatistics
from nvshare.coordinator.protocol.messages import MemoryMode
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
    """The client's need beyond that room."""
    immovable_bytes: int
    """Memory that cannot move, or was allowed to become immovable."""
    shut_out: bool
    """It is unschedulable for lack of room."""
    prepare_bytes: int


@dataclass(frozen=True, slots=True)
class SeatTurnSnapshot:
    """Turns of one client on one GPU."""

    waiting_since_ns: int | None
    demoted: bool
    member: bool
    """It is in the plan's running set."""
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
    turn: SeatTurnSnapshot
    moving: str | None
    """`out`, `in` or None."""
    memory: SeatMemorySnapshot
    statistics: SeatStatistics
    """The present lease included."""
    moves: SeatMoveStatistics
    progress: Progress
    step_rate: float
    """Steps a second as the program counts them; 0: it does not."""


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


def _seat(seat: Seat, paged: Mapping[int, int], now_ns: int) -> SeatSnapshot:
    memory, order = seat.memory, seat.moves.order
    resident_bytes = memory.resident_bytes - paged.get(seat.client.client_id, 0)
    return SeatSnapshot(
        uuid=seat.gpu.uuid,
        gpu=seat.ordinal,
        phase=seat.phase.value,
        lease_id=seat.lease.lease_id,
        holding_since_ns=seat.lease.granted_at_ns,
        turn=SeatTurnSnapshot(
            waiting_since_ns=seat.place.waiting_since_ns,
            demoted=seat.place.demoted,
            member=seat.client.client_id in seat.gpu.schedule.members,
            recent_share=seat.place.recent.share(now_ns, seat.held_ns(now_ns), seat.place.attached_at_ns),
        ),
        moving=None if order is None else "out" if order.evict else "in",
        memory=SeatMemorySnapshot(
            limit_bytes=memory.limit_bytes,
            allocated_bytes=memory.allocated_bytes,
            resident_bytes=resident_bytes,
            pinned_bytes=memory.pinned_bytes,
            host_bytes=memory.host_bytes,
            evicted_bytes=memory.allocated_bytes - resident_bytes,
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
    )


def take_client(client: Client, now_ns: int, paged: Callable[[Gpu], Mapping[int, int]] = paged_out) -> ClientSnapshot:
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
        seats=tuple(_seat(seat, paged(seat.gpu), now_ns) for seat in client.seats.values()),
        spatial=client.spatial,
        gang=client.gang,
    )
