"""How a client is told of its target, and what it says on the way.

The messages know no targets: they are an order to move out (`Evict`), one to move in (`Restore`), and room for more of
the latter (`MoveCredit`).  A client has one order at a time, whose id is the number of the target.

Rules:
- A move up to a higher target gets credit as the target rises.  It ends where it was to end when it began.
- A move that goes on ends before another one begins.  One that waits at its target gives way to a move out.
- A move that ends before its target is at rest, and the rest of the target is void.
- A client that has not reported for `move_stall_ns` hangs: it is not waited for, and what it does later counts.

Non-goals: targets (residency.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.memory import checks, claims
from nvshare.coordinator.memory.quantum import moving_average
from nvshare.coordinator.model.commands import Log, Notify, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import Move, Rest
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import WITH_LEASE, Seat
from nvshare.coordinator.protocol.messages import Evict, MoveCredit, MoveProgress, RemoteProtocolError, Restore

SAMPLE_BYTES: Final = 1 << 20
"""The shortest move whose time measures the speed of the link."""


# --- to the client ----------------------------------------------------------------------------------------------------


def is_free(seat: Seat) -> bool:
    """Whether the client can be told to move out: nothing of it moves in."""
    return seat.moves.move is None or not (seat.moves.move.out or seat.moves.move.moving)


def aim(node: Node, seat: Seat, size: int, goal: int, now_ns: int) -> None:
    """Brings the client to `size` bytes; a move up goes on to `goal` as the target rises, without another order."""
    move, resident = seat.moves.move, seat.memory.resident_bytes
    if size < resident:
        if not is_free(seat):
            return
        if move is not None:
            end(seat)
        move = _begin(node, seat, size, size, now_ns)
        seat.gpu.memory.statistics.evict_orders += 1
        node.out.append(Send(move.client, Evict(seat.ordinal, move.number, move.bytes)))
        _notify(node, seat.gpu, move, "evicting")
    elif move is None and size > resident:
        move = _begin(node, seat, size, goal, now_ns)
        seat.gpu.memory.statistics.restore_orders += 1
        node.out.append(Send(move.client, Restore(seat.ordinal, move.number, move.bytes, size - resident)))
        _notify(node, seat.gpu, move, "restoring")
    elif move is not None and not move.out and min(size, move.goal_bytes) > move.target_bytes:
        if not move.moving:
            move.heard_ns = now_ns
        move.target_bytes = min(size, move.goal_bytes)
        claims.claim(seat)
        credit = move.target_bytes - move.before_bytes
        node.out.append(Send(move.client, MoveCredit(seat.ordinal, move.number, credit)))


def _begin(node: Node, seat: Seat, target: int, goal: int, now_ns: int) -> Move:
    assert seat.moves.move is None, "one move at a time"
    assert seat.phase not in WITH_LEASE, "memory moves only while nothing runs on it"
    gpu, before = seat.gpu, seat.memory.resident_bytes
    move = Move(
        number=node.next_target,
        client=seat.client.client_id,
        out=goal < before,
        bytes=abs(goal - before),
        before_bytes=before,
        goal_bytes=goal,
        target_bytes=target,
        started_ns=now_ns,
        heard_ns=now_ns,
        exposed_before_ns=gpu.exposed_clock_ns(now_ns),
        unhindered=target == goal,
    )
    node.next_target += 1
    seat.moves.move = move
    seat.moves.number = move.number
    gpu.memory.moving[move.client] = seat
    claims.claim(seat)
    return move


def end(seat: Seat) -> None:
    """The move is over, or its client gone."""
    seat.moves.move = None
    del seat.gpu.memory.moving[seat.client.client_id]
    claims.claim(seat)


def _notify(node: Node, gpu: Gpu, move: Move, kind: str) -> None:
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": move.client,
        "order": move.number,
        "bytes": move.bytes,
        "hidden": gpu.switching.switch is None,
    }
    node.out.append(Notify(kind, values))


# --- from the client --------------------------------------------------------------------------------------------------


def progress(node: Node, seat: Seat, message: MoveProgress, now_ns: int) -> None:
    """A client reports how far it is."""
    move = seat.moves.move
    if message.order_id > seat.moves.number:
        raise RemoteProtocolError(
            f"progress of order {message.order_id}, which client {seat.client.client_id} does not have"
        )
    if move is None or message.order_id != move.number:
        return  # a newer target has replaced it
    move.heard_ns, move.stalled = now_ns, False
    _mark_recent(seat, now_ns)
    most = max(move.bytes, seat.memory.allocated_bytes)
    _count_moved(seat, move, max(move.moved_bytes, min(message.moved_bytes, most)))
    _mark_recent(seat, now_ns)
    if message.finished:
        _finish(node, seat, move, message, now_ns)


def _mark_recent(seat: Seat, now_ns: int) -> None:
    gpu = seat.gpu
    seat.moves.recent.mark(now_ns, seat.moves.statistics.moved_bytes)
    gpu.memory.recent_moved.mark(now_ns, gpu.memory.statistics.moved_bytes)
    gpu.memory.recent_waited.mark(now_ns, gpu.exposed_clock_ns(now_ns))


def _count_moved(seat: Seat, move: Move, moved: int) -> None:
    # The report of the new figures comes before or after this.  Counting from what was resident when the move began is
    # right in both cases.
    gpu = seat.gpu
    more = moved - move.moved_bytes
    move.moved_bytes = moved
    if move.out:
        resident = min(seat.memory.resident_bytes, max(0, move.before_bytes - moved))
        gpu.memory.statistics.evicted_bytes += more
        seat.moves.statistics.moved_out_bytes += more
    else:
        resident = max(seat.memory.resident_bytes, min(seat.memory.allocated_bytes, move.before_bytes + moved))
        gpu.memory.statistics.restored_bytes += more
        seat.moves.statistics.moved_in_bytes += more
    left = seat.memory.resident_bytes - resident
    claims.set_usage(
        seat,
        allocated=seat.memory.allocated_bytes,
        resident=resident,
        pinned=seat.memory.pinned_bytes,
        host=max(0, seat.memory.host_bytes + left),
    )


def _finish(node: Node, seat: Seat, move: Move, message: MoveProgress, now_ns: int) -> None:
    gpu = seat.gpu
    end(seat)
    movable = seat.memory.resident_bytes > seat.memory.pinned_bytes
    short = move.moved_bytes < move.bytes and (movable if move.out else not move.at_target)
    seat.moves.rest = Rest(gpu.leases.statistics.grants, move.out, move.target_bytes) if short else None
    if short and not move.out and message.error:  # without an error it ended at the border of a segment
        gpu.memory.short = True
        checks.ask(node, gpu)
    failed = message.error != 0 or (short and move.out)
    gpu.memory.statistics.failed_orders += failed
    seat.moves.statistics.failed_orders += failed
    hidden_ns = _count_time(gpu, seat, move, now_ns, sample=not failed)
    node.out.append(
        Notify(
            "moved",
            {
                "uuid": gpu.uuid,
                "client": move.client,
                "order": move.number,
                "evict": move.out,
                "asked_bytes": move.bytes,
                "moved_bytes": move.moved_bytes,
                "elapsed_ns": message.elapsed_ns,
                "hidden_ns": hidden_ns,
                "exposed_ns": now_ns - move.started_ns - hidden_ns,
                "error": message.error,
            },
        )
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
            values: dict[str, int | str | bool | float | None] = {
                "uuid": gpu.uuid,
                "client": move.client,
                "order": move.number,
                "moved_bytes": move.moved_bytes,
            }
            node.out.append(Notify("stalled", values))


def stall_deadline_ns(node: Node, gpu: Gpu) -> int | None:
    """When the next client will hang; None: nothing moves."""
    moves = (seat.moves.move for seat in gpu.memory.moving.values())
    due = [move.heard_ns + node.settings.move_stall_ns for move in moves if move is not None and move.moving]
    return min([*due, *(each.until_ns for each in gpu.memory.immovable.ending.values())], default=None)
