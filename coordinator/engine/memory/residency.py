"""How much of the GPU each client may have: targets, compared with what is after each event.

A target is how many bytes a client is to have on the GPU while it has no lease; each replaces the one before.

Rules:
- Nothing is raised but into the capacity that nobody claims (claims.py).  `aim` alone sends targets, and it
  alone sees to that.
- Wishes have one rank, and a lower one gets nothing while a higher one waits: questions for room (admission.py), the
  memory of the next client, memory ahead of its turn.  The first two turn a client in the midst of its move; the last
  lets it come to rest, or changes of the order of turns would have memory move to and fro.
- Belady's rule: clients whose next turn is farthest away make room, and never more than is missing.  Under round robin
  that is the client that just ran (L. A. Belady, A study of replacement algorithms for a virtual-storage computer,
  1966).
- At a switch nothing computes, so all targets change at once, and the next client's rises as others leave: both
  directions of the link are busy.
- A client is granted the lease when what it lacks is there or when nothing more can come; at the deadline of its switch
  with what is there, for pages can still fault in.
- Ahead of a switch, moves are hidden behind computation.  The holder cannot give room and is the farthest of all, so
  moving ahead costs up to twice the bytes.  Others are lowered only if all of it ends before the holder's turn does, at
  the measured speed of this GPU.  Targets change by `PIECE_BYTES` at a time, so a change of turns is cheap.
- Nothing is raised in the first second after a restart, while clients may be missing whose memory is on the GPU.
- A client at rest before its target is not told again before the next grant, except of a higher one.

Non-goals: which client is next (engine/planning.py), messages about moves (moves.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine.memory import host_budget, moves, room, switch_credit
from nvshare.coordinator.engine.memory.claims import (
    crowded_bytes,
    free_bytes,
    leaving_bytes,
    missing_bytes,
    set_usage,
    settled_bytes,
    wanted_bytes,
)
from nvshare.coordinator.engine.memory.quantum import idle_release_ns, move_rate
from nvshare.coordinator.model.commands import Log
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import Switch
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import WITH_LEASE, Seat
from nvshare.coordinator.protocol.messages import MemoryMode

PIECE_BYTES: Final = 512 << 20
"""10 ms of the link: the longest that a change of the order of turns waits."""

MOST_OPEN: Final = 256
"""Targets that a client may be behind; each event looks at all of them."""


# --- targets ----------------------------------------------------------------------------------------------------------


def aim(node: Node, seat: Seat, size: int, now_ns: int, *, goal: int = 0) -> None:
    """Sends a target, which is to rise to `goal`, as far as there is room; none to a client that hangs or is behind."""
    gpu, memory = seat.gpu, seat.memory
    if (seat.moves.move is not None and seat.moves.move.stalled) or len(seat.moves.open) >= MOST_OPEN:
        return
    room_bytes = memory.claimed_bytes + max(0, free_bytes(gpu) - crowded_bytes(gpu))
    size = max(memory.pinned_bytes, min(size, max(memory.resident_bytes, room_bytes)))
    if not is_at_rest(seat, size):
        moves.aim(node, seat, size, max(size, goal), now_ns)


def is_at_rest(seat: Seat, size: int) -> bool:
    """Whether the client has come to rest before such a target since the last grant."""
    rest, out = seat.moves.rest, size < seat.memory.resident_bytes
    if rest is None or rest.grants != seat.gpu.leases.statistics.grants or rest.out is not out:
        return False
    return out or size <= rest.target_bytes


def movable_bytes(node: Node, seat: Seat, *, turn: bool = True) -> int:
    """Memory that the client can give now, beside what leaves already; `turn`: also instead of what comes in."""
    memory, move = seat.memory, seat.moves.move
    if (
        seat.client.memory_mode is MemoryMode.DEVICE
        or seat.client.parking.closed
        or seat.phase in WITH_LEASE
        or seat.lease.stray
        or seat.client.stopped
        or (move is not None and (move.stalled or not (turn or move.out)))
        or is_at_rest(seat, -1)
        or seat.gpu.memory.integrated
    ):
        return 0
    settled = settled_bytes(seat)
    host_bytes = host_budget.room_bytes(node, seat.client) - memory.resident_bytes
    return min(settled - memory.pinned_bytes, settled + host_bytes)


def sources(node: Node, gpu: Gpu, size: int, following: Seat, *, turn: bool = True) -> list[tuple[Seat, int]]:
    """Who gives how much, for `size` bytes in all if there are so many, farthest turn first.

    First clients that do not ask for the GPU, longest idle first; then waiting ones, last in the expected order first;
    last of all the next client, whose turn has not begun.
    """
    if size <= 0:
        return []
    switching = gpu.switching.switch.seat if gpu.switching.switch is not None else None
    places = {client: place for place, client in enumerate(gpu.schedule.order)}

    def nearness(seat: Seat) -> tuple[int, int]:
        client = seat.client.client_id
        if seat is switching:
            return 4, 0
        if seat not in gpu.wait_queue:
            return 0, seat.place.turn
        if seat.place.demoted:
            return 1, -seat.place.turn
        return (3, -places[client]) if client in places else (2, -seat.place.turn)

    found = []
    for seat in sorted({**gpu.memory.evictable, **gpu.memory.moving}.values(), key=nearness):
        give = 0 if seat is following else min(size, movable_bytes(node, seat, turn=turn))
        if give > 0:
            found.append((seat, give))
            size -= give
        if size <= 0:
            break
    return found


def lower(node: Node, givers: list[tuple[Seat, int]], now_ns: int) -> None:
    """Lowers the targets of these by so much."""
    for seat, give in givers:
        aim(node, seat, settled_bytes(seat) - give, now_ns)


def more_room(gpu: Gpu, now_ns: int) -> None:
    """Other memory than clients' has left the card: what found no room is tried again."""
    for seat in gpu.seats.values():
        seat.moves.rest = None
        seat.room.retry_at_ns = min(seat.room.retry_at_ns, now_ns)
    gpu.schedule.stale = True


def client_left(node: Node, seat: Seat, now_ns: int) -> None:
    """The seat's client is gone, its memory with it."""
    gpu = seat.gpu
    moves.forget(seat)
    seat.memory.reserved_bytes = 0
    set_usage(seat, allocated=0, resident=0, pinned=0, host=0)
    room.remove_seat(seat)
    if gpu.switching.switch is not None and gpu.switching.switch.seat is seat:
        cancel(node, gpu, now_ns)


# --- memory ahead of a turn -------------------------------------------------------------------------------------------


def next_seat(gpu: Gpu) -> Seat | None:
    """The waiting client that will probably be granted next: the first one of the plan's order."""
    schedule = gpu.schedule
    for client in schedule.order:
        seat = gpu.seats.get(client)
        if seat is not None and client not in schedule.members and seat in gpu.wait_queue:
            return seat
    return next((gpu.seats[job.client] for job in gpu.wait_queue.views() if job.client not in schedule.members), None)


def bring_next(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Raises the target of the next client while a turn goes on, if nothing of higher rank waits.  O(1) if all fits."""
    short = gpu.memory_short or gpu.memory.host_bytes > 0
    if not short or gpu.reconnecting(now_ns) or gpu.switching.switch is not None or gpu.memory.growing:
        return
    ends = [seat.lease.ends_ns for seat in gpu.leases.by_client.values() if seat.lease.ends_ns is not None]
    seat = next_seat(gpu) if ends else None
    if seat is None or missing_bytes(seat) == 0 or is_at_rest(seat, wanted_bytes(seat)):
        return
    claimed, free, leaving = seat.memory.claimed_bytes, free_bytes(gpu) - crowded_bytes(gpu), leaving_bytes(gpu)
    missing, move = wanted_bytes(seat) - claimed, seat.moves.move
    if missing <= 0 or free < 0 or (move is not None and move.out):
        return
    left_ns = max(0, min(ends) - now_ns) if gpu.leases.running else 0
    if leaving == 0 and missing <= left_ns * move_rate(gpu):
        givers = sources(node, gpu, min(missing - free, PIECE_BYTES), seat, turn=False)
        lower(node, givers, now_ns)
        leaving = sum(give for _, give in givers)
    piece = min(missing, PIECE_BYTES)
    if move is None and (free >= piece or leaving == 0):
        aim(node, seat, claimed + min(piece, free), now_ns)


# --- the next client's memory -----------------------------------------------------------------------------------------


def begin(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> bool:
    """Starts what must move before `seat` runs.  False: nothing can."""
    deadline_ns = now_ns + node.settings.move_deadline_ns
    fresh = seat.moves.statistics.moved_out_bytes == 0
    ran_ns, out = gpu.turn_clock_ns(now_ns), gpu.memory.statistics.evicted_bytes
    gpu.switching.switch = Switch(seat, now_ns, deadline_ns, ran_ns, out, fresh=fresh)
    advance(node, gpu, now_ns)
    if not gpu.switching.switch.done:
        return True
    gpu.switching.switch = None
    count_free(node, gpu, seat)
    return False


def count_free(node: Node, gpu: Gpu, seat: Seat) -> None:
    """The seat is granted without a move: a sample for the cost of switches."""
    if gpu.leases.last_holder != seat.client.client_id:
        _count_switch(node, gpu, 0)


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Raises the next client's target as far as there is room now, and ends the switch when it is done or too late."""
    switch = gpu.switching.switch
    if switch is None or switch.done:
        return
    if now_ns >= switch.deadline_ns:
        gpu.memory.statistics.late_switches += 1
        text = f"{gpu.uuid}: memory did not move in time; the next client runs with what is there"
        node.out.append(Log(logging.WARNING, text))
        node.notify("late", uuid=gpu.uuid, client=switch.seat.client.client_id)
        switch.done = switch.late = True
        return
    seat, wanted = switch.seat, wanted_bytes(switch.seat)
    move, missing = seat.moves.move, missing_bytes(switch.seat)
    if gpu.reconnecting(now_ns):
        return
    if (move is None or move.waits) and (missing == 0 or is_at_rest(seat, wanted)):
        switch.done = True
    elif not _is_asked(gpu):
        if missing or (move is not None and move.out):  # the latter began when its turn was far away
            aim(node, seat, wanted, now_ns, goal=wanted)
            lacking = wanted - seat.memory.claimed_bytes - free_bytes(gpu) + crowded_bytes(gpu) - leaving_bytes(gpu)
            lower(node, sources(node, gpu, lacking, seat), now_ns)
        switch.done = not moves.any_moving(gpu)  # it may wait for room that nobody makes


def _is_asked(gpu: Gpu) -> bool:
    """A question waits for room that others make by moving; parking takes longer, and no turn waits for that."""
    growths = (seat.memory.growth for seat in gpu.memory.growing.values())
    return any(growth is not None and not growth.waits for growth in growths)


def cancel(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Ends the switch without a grant; what has moved has moved."""
    switch = gpu.switching.switch
    if switch is not None and (move := switch.seat.moves.move) is not None and move.waits:
        moves.end(node, switch.seat, now_ns)
    if switch is not None and not switch.fresh:
        ran_ns = gpu.turn_clock_ns(now_ns) - switch.ran_before_ns  # what moves beside work costs no time
        switch_credit.pay(gpu, now_ns - switch.started_ns - ran_ns, now_ns)
    gpu.switching.exposed_closed_ns = gpu.exposed_clock_ns(now_ns)
    gpu.switching.switch = None


def close(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Ends the switch with a grant, and accounts for the time it took."""
    switch = gpu.switching.switch
    assert switch is not None
    cancel(node, gpu, now_ns)
    elapsed_ns = now_ns - switch.started_ns
    gpu.memory.statistics.moved_ns += elapsed_ns
    evicted = gpu.memory.statistics.evicted_bytes > switch.out_before
    if not switch.late and (evicted or not switch.fresh):  # allocating new memory is no cost of switching
        _count_switch(node, gpu, elapsed_ns)


def _count_switch(node: Node, gpu: Gpu, waited_ns: int) -> None:
    before, waits_ns = idle_release_ns(gpu, node), gpu.switching.waits_ns
    waits_ns.append(waited_ns)
    if not any(waits_ns):
        waits_ns.clear()
    if idle_release_ns(gpu, node) != before:
        gpu.settings_changed()
