"""Admission of growing memory, and room for a client whose memory must be on the GPU at once.

Rules:
- A client's own limit is never exceeded.  Clients of one group have their limit together.
- What cannot move must fit: reservations of clients in `device` mode and pinned memory of the others are together at
  most the capacity, and leave each client in `swap` mode what it needs (room.py).
- Memory that can move is admitted beyond capacity, as far as the host has room for it (`host_budget.most_bytes`).
- Giving memory back is always allowed, and so is bringing back to the GPU what was moved away from it.

A client in `device` mode asks for room before it allocates, one in `swap` mode before it allocates under the lease
(`State.asks`).  Where that does not fit, clients whose turn is farthest away are evicted, no more than is missing,
and the answer waits for them.  Room that a client in `device` mode asks for counts as immovable from then on, so
members of the running set that do not fit beside it give their leases back.
- Managed memory takes no other client's room: what does not leave as it was told, the driver pages out.
- A question goes first: no target rises meanwhile, and the next client's falls if nobody farther has enough.
- Contexts may have room that the figures leave a client.  Then it asks again, and waits while others are evicted and
  parked (engine/parking/parking.py).
- Every question is answered: when there is room, when no client is left that could make some, at the deadline, or
  when the lease ends.  Then the client needs no physical memory, and the next switch brings it in, if it will fit
  beside immovable memory.  After a restart the answer waits until clients have connected again.
- An *integrated* GPU has the host's memory, so nobody makes room there by moving.  Growth is admitted if the host has
  that much left beside what it keeps, by figures of at most `FRESH_NS` ago; else it waits for `HOST_WAIT_NS`.

Non-goals: how others make room (residency.py).
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.engine.memory import checks, claims, host_budget, moves, residency, room
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import Growth
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import REVOKING, WITH_LEASE, Seat
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol.messages import MemoryMode, State

FRESH_NS: Final = SECOND_NS
"""While clients grow, figures come four times a second."""
HOST_WAIT_NS: Final = 5 * SECOND_NS
"""Shorter than a hook waits for an answer: after that it would allocate without one."""


def _host_has_room(node: Node, seat: Seat, total_bytes: int) -> bool:
    """Whether the client could put all movable memory on the host, if it had `total_bytes` on this GPU."""
    client = seat.client
    if not client.host.asked:
        return True
    others = sum(
        max(0, s.memory.allocated_bytes - s.memory.pinned_bytes) for s in client.seats.values() if s is not seat
    )
    return others + max(0, total_bytes - seat.memory.pinned_bytes) <= host_budget.most_bytes(node, client)


def refusal(node: Node, seat: Seat, total_bytes: int) -> str | None:
    """Why the client may not have `total_bytes` in all; None: it may."""
    device, memory = seat.client.memory_mode is MemoryMode.DEVICE, seat.memory
    had = 0 if device else max(memory.allocated_bytes, memory.attached_bytes)
    if total_bytes <= max(memory.reserved_bytes, had):
        return None  # nothing grows: memory that it has comes back to the GPU
    if memory.limit_bytes and total_bytes + room.group_bytes(seat, asked=True) > memory.limit_bytes:
        return "limit"
    if not device:
        return None if _host_has_room(node, seat, total_bytes) else "host"
    return immovable_refusal(seat, total_bytes)


def immovable_refusal(seat: Seat, total_bytes: int) -> str | None:
    """Why the client may not make this much memory immovable; None: it may."""
    gpu = seat.gpu
    if gpu.memory.immovable.bytes - seat.room.immovable_bytes + total_bytes > gpu.memory.capacity_bytes:
        return "capacity"
    return "pins" if room.starved_by(seat, total_bytes) is not None else None


def ask(node: Node, seat: Seat, state: State, now_ns: int) -> None:
    """The client wants a reservation of this size in all, to be answered now or, if others must make room, later."""
    gpu, total_bytes = seat.gpu, state.total_bytes
    gives_back = total_bytes <= seat.memory.reserved_bytes and not state.lacking_bytes
    moves_itself = seat.client.memory_mode is MemoryMode.MANAGED
    if not (moves_itself or gives_back) and refusal(node, seat, total_bytes) is None:
        until_ns = now_ns + (HOST_WAIT_NS if gpu.memory.integrated else node.settings.move_deadline_ns)
        seat.memory.growth = Growth(total_bytes, now_ns, until_ns, state.lacking_bytes)
        gpu.memory.growing[seat.client.client_id] = seat
        room.update(seat)
        if gpu.memory.integrated:
            checks.ask(node, gpu)
        return
    seat.memory.growth = None
    why = refusal(node, seat, total_bytes)
    if why is not None:
        _refuse(node, seat, total_bytes, why)
    else:
        _grant(node, seat, total_bytes)
    room.update(seat)


def give_back(seat: Seat, total_bytes: int) -> None:
    """The client needs no more than this of its reservation."""
    seat.memory.reserved_bytes = total_bytes
    claims.claim(seat)
    room.update(seat)


def _grant(node: Node, seat: Seat, total_bytes: int) -> None:
    seat.memory.reserved_bytes = total_bytes
    claims.claim(seat)
    moves.answer(node, seat, answers=seat.moves.asked[0], total_bytes=total_bytes, by_limit=False)


def _refuse(node: Node, seat: Seat, total_bytes: int, why: str) -> None:
    """Refuses; the reservation stays what it is.  A client in `swap` mode that has a lease may lack what it needs."""
    if seat.client.memory_mode is MemoryMode.SWAP and seat.phase in WITH_LEASE:
        seat.room.refused = True
    notify_refusal(node, seat, total_bytes, why)
    may = seat.memory.reserved_bytes
    moves.answer(node, seat, answers=seat.moves.asked[0], total_bytes=may, by_limit=why == "limit")


def notify_refusal(node: Node, seat: Seat, size: int, why: str) -> None:
    """Counts a refusal, and tells the operator."""
    seat.gpu.memory.statistics.refused_reservations += 1
    node.notify("refused", uuid=seat.gpu.uuid, client=seat.client.client_id, bytes=size, why=why)


def answer_growth(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Answers the questions that can be answered; evicts others where room is missing."""
    if not gpu.memory.growing or gpu.reconnecting(now_ns):
        return
    for client, seat in list(gpu.memory.growing.items()):
        if gpu.seats.get(client) is not seat:  # the client is gone
            seat.memory.growth = None
        elif seat.memory.growth is not None:
            _answer_one(node, gpu, seat, seat.memory.growth, now_ns)
        if seat.memory.growth is None:
            del gpu.memory.growing[client]
            room.update(seat)


def _leases_are_ending(gpu: Gpu) -> bool:
    """Other clients give their leases back.  Then their memory can move."""
    return any(seat.phase is REVOKING for seat in gpu.leases.by_client.values())


def _paged_bytes(gpu: Gpu, *, leased: bool) -> int:
    """Managed memory that no target lowers: its pages leave as others allocate.  `leased`: under a lease too."""
    managed = (s for s in gpu.memory.evictable.values() if s.client.memory_mode is MemoryMode.MANAGED)
    paged = [s for s in managed if (leased if s.phase in WITH_LEASE else moves.stays(s))]
    return sum(max(0, seat.memory.claimed_bytes - seat.memory.pinned_bytes) for seat in paged)


def _card_lacks(node: Node, gpu: Gpu, seat: Seat, growth: Growth, now_ns: int) -> bool:
    """The driver had no memory for what the figures leave the client, and others still make room."""
    if growth.lacking_bytes:
        givers = residency.sources(node, gpu, growth.lacking_bytes, seat)
        residency.lower(node, givers, now_ns)
        gpu.memory.short = sum(give for _, give in givers) < growth.lacking_bytes
        growth.lacking_bytes, growth.waits, growth.evicts = 0, True, bool(givers)
    elif now_ns >= growth.deadline_ns:
        return growth.waits
    growth.waits = growth.waits and (gpu.memory.short or moves.any_moving(gpu))
    return growth.waits


def _answer_one(node: Node, gpu: Gpu, seat: Seat, growth: Growth, now_ns: int) -> None:
    memory, swaps, why = seat.memory, seat.client.memory_mode is MemoryMode.SWAP, ""
    if swaps and seat.phase not in WITH_LEASE:
        why = "pins" if growth.total_bytes > max(room.room_bytes(seat), memory.allocated_bytes) else ""
    elif _card_lacks(node, gpu, seat, growth, now_ns):
        why = "card"
        if now_ns < growth.deadline_ns:
            return
        memory.reserved_bytes = 0
    elif not _has_room(node, gpu, seat, growth, now_ns):
        why = "host memory" if gpu.memory.integrated else "capacity"
        if gpu.memory.integrated and now_ns < growth.deadline_ns:
            checks.ask(node, gpu)
            return
        if now_ns < growth.deadline_ns and (moves.any_moving(gpu) or _leases_are_ending(gpu)):
            return
        memory.reserved_bytes = min(memory.reserved_bytes, memory.resident_bytes) if swaps else memory.reserved_bytes
    memory.growth = None
    if why:
        claims.claim(seat)
        _refuse(node, seat, growth.total_bytes, why)
    else:
        _grant(node, seat, growth.total_bytes)


def _has_room(node: Node, gpu: Gpu, seat: Seat, growth: Growth, now_ns: int) -> bool:
    """Whether all of it is free; else others are lowered, if they have enough."""
    if gpu.memory.integrated:
        at_ns, free = gpu.memory.checked_at_ns, claims.free_bytes(gpu) - claims.crowded_bytes(gpu)
        fresh = at_ns is not None and now_ns < at_ns + FRESH_NS
        return fresh and growth.total_bytes - seat.memory.claimed_bytes <= free
    paged = _paged_bytes(gpu, leased=seat.client.memory_mode is not MemoryMode.SWAP)
    lacking = growth.total_bytes - seat.memory.claimed_bytes - claims.free_bytes(gpu) - paged
    if lacking <= 0:
        return True
    lacking -= claims.leaving_bytes(gpu)
    givers = residency.sources(node, gpu, lacking, seat)
    if sum(give for _, give in givers) >= lacking:
        residency.lower(node, givers, now_ns)
    return False
