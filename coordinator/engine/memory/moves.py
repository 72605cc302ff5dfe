"""How a client is told of its target and of answers, and what it says on the way.

A *move* lasts from a target until the client is at rest with its newest one.

Rules:
- A target is obeyed until the client names a later one, or is at rest with it: until then it is claimed.
- A target the other way ends the move and begins another.  One that goes further the same way prolongs it.
- A client that is at rest before its target does not get there: what is left of the target is void.
- A move up waits at its target as long as the switch goes on for which that is to rise.
- A client that does not come further for `move_stall_ns` hangs: it is not waited for, and what it does later counts.
- The sums that a client states are for statistics alone, and count with no more than it has allocated.

Non-goals: targets (residency.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from nvshare.coordinator.engine.memory import checks, claims
from nvshare.coordinator.engine.memory.quantum import moving_average
from nvshare.coordinator.model.commands import Log, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import Move, Rest
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import WITH_LEASE, Seat
from nvshare.coordinator.protocol.messages import RemoteProtocolError, State, Target

SAMPLE_BYTES: Final = 1 << 20
"""The shortest move whose time measures the speed of the link."""


# --- to the client ----------------------------------------------------------------------------------------------------


def aim(node: Node, seat: Seat, size: int, goal: int, now_ns: int) -> None:
    """Tells the client that it is to have `size` bytes, which are to rise to `goal`, unless it knows that."""
    mine, resident = seat.moves, seat.memory.resident_bytes
    move, out = mine.move, size < resident
    if size == (resident if move is None else move.target_bytes):
        return
    assert seat.phase not in WITH_LEASE, "memory moves only while nothing runs on it"
    if move is not None and move.out is not out:
        end(node, seat, now_ns)
    told = mine.told
    answers = (told.answers, told.total_bytes, told.by_limit, told.answers_pins, told.pins_bytes)
    mine.told = Target(seat.ordinal, told.number + 1, size, size < goal, *answers)  # `replace` takes 4 us more
    mine.open[mine.told.number] = size
    mine.rest = None
    if mine.move is None:
        _begin(node, seat, size, goal, now_ns)
    elif move is not None:
        move.target_bytes, move.goal_bytes = size, goal
        move.bytes, move.unhindered = move.moved_bytes + abs(goal - resident), False
        if move.waits:
            move.waits, move.heard_ns = False, now_ns
    claims.claim(seat)
    node.out.append(Send(seat.client.client_id, mine.told))


def answer(node: Node, seat: Seat, **answers: int) -> None:
    """Answers a question of the client: fields of `Target`."""
    seat.moves.told = replace(seat.moves.told, gpu=seat.ordinal, **answers)  # type: ignore[arg-type]
    node.out.append(Send(seat.client.client_id, seat.moves.told))


def _begin(node: Node, seat: Seat, target: int, goal: int, now_ns: int) -> None:
    gpu, resident = seat.gpu, seat.memory.resident_bytes
    move = seat.moves.move = Move(
        out=target < resident,
        target_bytes=target,
        goal_bytes=goal,
        bytes=abs(goal - resident),
        started_ns=now_ns,
        heard_ns=now_ns,
        exposed_before_ns=gpu.exposed_clock_ns(now_ns),
        moving_before_ns=seat.moves.sums[2],
        unhindered=target == goal,
    )
    gpu.memory.moving[seat.client.client_id] = seat
    gpu.memory.statistics.evict_orders += move.out
    gpu.memory.statistics.restore_orders += not move.out
    kind = "evicting" if move.out else "restoring"
    _notify(node, seat, kind, bytes=move.bytes, hidden=gpu.switching.switch is None)


def _notify(node: Node, seat: Seat, kind: str, **values: int) -> None:
    node.notify(kind, uuid=seat.gpu.uuid, client=seat.client.client_id, order=seat.moves.told.number, **values)


def forget(seat: Seat) -> None:
    """The client is gone."""
    if seat.moves.move is not None:
        seat.moves.move = None
        seat.moves.open.clear()
        del seat.gpu.memory.moving[seat.client.client_id]


# --- from the client --------------------------------------------------------------------------------------------------


def heard(node: Node, seat: Seat, state: State, now_ns: int) -> None:
    """A client says what it has, and how far it is with its target."""
    mine, move, memory = seat.moves, seat.moves.move, seat.memory
    if state.target > mine.told.number:
        text = f"names target {state.target} of GPU {seat.ordinal}, and was told of {mine.told.number}"
        raise RemoteProtocolError(text)
    before, had = memory.resident_bytes, memory.allocated_bytes
    last = state.target if state.at_rest else state.target - 1
    passed = [number for number in mine.open if number <= last]
    for number in passed:
        del mine.open[number]
    claims.set_usage(
        seat,
        allocated=state.allocated_bytes,
        resident=state.resident_bytes,
        pinned=state.pinned_bytes,
        host=state.host_bytes,
    )
    moved = _count_moved(seat, state, max(had, memory.allocated_bytes), now_ns)
    if move is None:
        return
    if moved or passed or memory.resident_bytes != before:
        move.heard_ns, move.stalled = now_ns, False
    if state.at_rest and state.target == mine.told.number:
        _rest(node, seat, move, state.error, now_ns)


def _count_moved(seat: Seat, state: State, most: int, now_ns: int) -> bool:
    gpu, mine, move = seat.gpu, seat.moves, seat.moves.move
    before, now = mine.sums, (state.moved_out_bytes, state.moved_in_bytes, state.moving_ns)
    if now == before:
        return False
    mine.sums = now
    out_bytes, in_bytes = max(0, min(now[0] - before[0], most)), max(0, min(now[1] - before[1], most))
    _mark_recent(seat, now_ns)
    gpu.memory.statistics.evicted_bytes += out_bytes
    gpu.memory.statistics.restored_bytes += in_bytes
    mine.statistics.moved_out_bytes += out_bytes
    mine.statistics.moved_in_bytes += in_bytes
    _mark_recent(seat, now_ns)
    if move is not None:
        move.moved_bytes += out_bytes if move.out else in_bytes
    return True


def _mark_recent(seat: Seat, now_ns: int) -> None:
    gpu = seat.gpu
    seat.moves.recent.mark(now_ns, seat.moves.statistics.moved_bytes)
    gpu.memory.recent_moved.mark(now_ns, gpu.memory.statistics.moved_bytes)
    gpu.memory.recent_waited.mark(now_ns, gpu.exposed_clock_ns(now_ns))


def _rest(node: Node, seat: Seat, move: Move, error: int, now_ns: int) -> None:
    """The client moves nothing before it is told of another target."""
    gpu, memory, target = seat.gpu, seat.memory, move.target_bytes
    if move.out:
        short = memory.resident_bytes > max(target, memory.pinned_bytes)
    else:
        short = memory.resident_bytes < min(target, memory.allocated_bytes)
    seat.moves.rest = Rest(gpu.leases.statistics.grants, move.out, target) if short else None
    switch = gpu.switching.switch
    if target < move.goal_bytes and not error and switch is not None and switch.seat is seat:
        move.waits = True
        return
    if short and not move.out and error:  # without an error it ended at the border of a segment
        gpu.memory.short = True
        checks.ask(node, gpu)
    end(node, seat, now_ns, error=error, failed=error != 0 or (short and move.out))


def end(node: Node, seat: Seat, now_ns: int, *, error: int = 0, failed: bool = False) -> None:
    """The move is over: at rest, or another one takes its place."""
    gpu, mine, move = seat.gpu, seat.moves, seat.moves.move
    assert move is not None
    mine.move = None
    del gpu.memory.moving[seat.client.client_id]
    gpu.memory.statistics.failed_orders += failed
    mine.statistics.failed_orders += failed
    hidden_ns = _count_time(gpu, seat, move, now_ns, sample=not failed)
    _notify(
        node,
        seat,
        "moved",
        evict=move.out,
        asked_bytes=move.bytes,
        moved_bytes=move.moved_bytes,
        elapsed_ns=max(0, mine.sums[2] - move.moving_before_ns),
        hidden_ns=hidden_ns,
        exposed_ns=now_ns - move.started_ns - hidden_ns,
        error=error,
    )


def _count_time(gpu: Gpu, seat: Seat, move: Move, now_ns: int, *, sample: bool) -> int:
    """Accounts for the time of a move that is over; returns how much of it was hidden.  `sample`: it is one."""
    whole_ns = now_ns - move.started_ns
    exposed_ns = min(whole_ns, gpu.exposed_clock_ns(now_ns) - move.exposed_before_ns)
    hidden_ns = whole_ns - exposed_ns
    gpu.memory.statistics.exposed_move_ns += exposed_ns
    gpu.memory.statistics.hidden_move_ns += hidden_ns
    seat.moves.statistics.exposed_move_ns += exposed_ns
    seat.moves.statistics.hidden_move_ns += hidden_ns
    if not sample:
        return hidden_ns
    if move.out:
        gpu.switching.hidden.turn_out_ns += hidden_ns
    else:
        gpu.switching.hidden.turn_in_ns += hidden_ns
    if move.unhindered and move.moved_bytes >= SAMPLE_BYTES and whole_ns > 0:
        rate, switching = move.moved_bytes / whole_ns, gpu.switching
        switching.move_rate += (rate - switching.move_rate) / (8 if switching.move_rate else 1)
    return hidden_ns


def close_turn(gpu: Gpu) -> None:
    """The time of moves during the turn that ends is one sample for the automatic quantum."""
    hidden = gpu.switching.hidden
    sample_ns = max(hidden.turn_out_ns, hidden.turn_in_ns)
    hidden.turn_out_ns = hidden.turn_in_ns = 0
    if sample_ns or hidden.average_ns:
        average = moving_average(hidden.average_ns, sample_ns)
        hidden.average_ns = average if average >= 1000.0 else 0.0


# --- waiting for moves ------------------------------------------------------------------------------------------------


def any_moving(gpu: Gpu) -> bool:
    """Whether anything moves or leaves with its process; a move that waits at its target does not."""
    if gpu.memory.immovable.ending:
        return True
    return any(seat.moves.move is not None and seat.moves.move.moving for seat in gpu.memory.moving.values())


def stays(seat: Seat) -> bool:
    """Whether memory of the client does not leave the GPU although it was told so."""
    move, rest = seat.moves.move, seat.moves.rest
    return (rest is not None and rest.out) or (move is not None and move.out and move.stalled)


def mark_stalled(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Stops waiting for clients that hang: others are asked instead, though the memory stays where it is."""
    ending = gpu.memory.immovable.ending
    for process_id in [process_id for process_id, each in ending.items() if now_ns >= each.until_ns]:
        del ending[process_id]
    for seat in gpu.memory.moving.values():
        move, client = seat.moves.move, seat.client
        late = move is not None and now_ns >= move.heard_ns + node.settings.move_stall_ns
        if move is not None and move.moving and (late or client.stopped):
            move.stalled = True
            move.unhindered = False
            gpu.memory.statistics.failed_orders += 1
            seat.moves.statistics.failed_orders += 1
            text = f"{gpu.uuid}: {client.identity} does not move its memory; it is not waited for"
            node.out.append(Log(logging.WARNING, text))
            _notify(node, seat, "stalled", moved_bytes=move.moved_bytes)
            checks.ask(node, gpu)


def stall_deadline_ns(node: Node, gpu: Gpu) -> int | None:
    """When the next client will hang; None: nothing moves."""
    moves = (seat.moves.move for seat in gpu.memory.moving.values())
    due = [move.heard_ns + node.settings.move_stall_ns for move in moves if move is not None and move.moving]
    return min([*due, *(each.until_ns for each in gpu.memory.immovable.ending.values())], default=None)
