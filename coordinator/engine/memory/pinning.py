"""Memory that cannot move, and clients that do not fit beside it.

Memory that other processes map, that another GPU reaches or that only the driver knows stays on the GPU, whichever
client has the lease.  A program that needs more than the rest could never run.  So hooks ask before memory becomes
immovable (`State.asks_pins`).

Rules:
- A question is refused at once if another client would have less than it needs (room.py).
- Clients in mode `swap` are told how much room they have, so that they allocate no more.
- A client that does not fit all the same (two messages crossed, or it allocated after a restart before others were
  back) is unschedulable until it fits.  The log, an event and `nvshare-ctl status` name it,
  and the clients that are in its way.
- A client that was refused room, and gives its lease back unused, is unschedulable for `RETRY_NS`, because no message
  tells when another client's memory can move again.

Non-goals: what one client may reserve (admission.py), leases (engine/leases.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine.memory import admission, moves, room
from nvshare.coordinator.engine.memory.client_settings import send_settings
from nvshare.coordinator.model.commands import Log
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import IDLE, WAITING, Seat
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol.messages import Release, ReleaseReason
from nvshare.coordinator.units import format_size

RETRY_NS: Final = 5 * SECOND_NS
"""A client that was refused room is tried again after this time."""
LOG_AGAIN_NS: Final = 60 * SECOND_NS
NAMED: Final = 3
"""One log line names this many clients with immovable memory."""


def ask(node: Node, seat: Seat, pins_bytes: int, now_ns: int) -> None:
    """Answers whether the client may make this much memory immovable.

    After a restart the answer waits until clients have connected again, because they need room too.
    """
    if seat.gpu.reconnecting(now_ns):
        seat.gpu.memory.immovable.questions[seat.client.client_id] = pins_bytes
    else:
        _answer(node, seat, pins_bytes)


def _answer(node: Node, seat: Seat, pins_bytes: int) -> None:
    total = min(pins_bytes, seat.gpu.memory.capacity_bytes + 1)
    why = admission.immovable_refusal(seat, total) if total > seat.room.immovable_bytes else None
    if why is None:
        seat.room.promised_bytes = total
        room.update(seat)
    else:
        admission.notify_refusal(node, seat, total, why)
    moves.answer(node, seat, answers_pins=seat.moves.asked[1], pins_bytes=seat.room.immovable_bytes)


def update(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Computes the room of seats again where it may have changed."""
    whole = gpu.memory.immovable
    if whole.questions and not gpu.reconnecting(now_ns):
        for client, pins_bytes in whole.questions.items():
            _answer(node, gpu.seats[client], pins_bytes)
        whole.questions.clear()
    changed, whole.stale = whole.stale, False
    if changed and (whole.bytes or whole.limits_sent):
        whole.limits_sent = whole.bytes > 0
        gpu.settings_changed()
        for seat in room.swapping(gpu):
            _update_lacking(node, gpu, seat, now_ns)
            if seat.room.lacking_bytes and seat.phase in (IDLE, WAITING):
                _make_unschedulable(node, seat)
            send_settings(node, seat)
    for seat in room.swapping(gpu) if whole.unschedulable else ():
        again = changed or now_ns >= seat.room.retry_at_ns
        if seat.room.unschedulable and again and not seat.room.lacking_bytes:
            _make_schedulable(gpu, seat)


def _update_lacking(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """Tells when the seat ceases to fit, or fits again."""
    before, seat.room.lacking_bytes = seat.room.lacking_bytes, room.lacking_bytes(seat)
    lacking = seat.room.lacking_bytes
    if bool(before) is bool(lacking):
        return
    node.notify(
        "lacks_room" if lacking else "has_room",
        uuid=gpu.uuid,
        client=seat.client.client_id,
        name=seat.client.identity.name,
        needs_bytes=room.needs_bytes(seat),
        room_bytes=room.room_bytes(seat),
    )
    if lacking and (seat.room.logged_at_ns is None or now_ns >= seat.room.logged_at_ns + LOG_AGAIN_NS):
        seat.room.logged_at_ns = now_ns
        text = f"{gpu.uuid}: {_reason(seat)}; it waits for room"
        node.out.append(Log(logging.WARNING, text))


def _reason(seat: Seat) -> str:
    """A sentence for people: the client's need, and the immovable memory of the others."""
    client = seat.client
    needs, there = format_size(room.needs_bytes(seat)), format_size(room.room_bytes(seat))
    others = [other for other in seat.gpu.seats.values() if other is not seat and other.room.immovable_bytes]
    others.sort(key=lambda other: -other.room.immovable_bytes)
    named = ", ".join(f"{other.client.identity} {format_size(other.room.immovable_bytes)}" for other in others[:NAMED])
    more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    return f"{client.identity} needs {needs}, room for it is {there}; immovable: {named}{more}"


# --- clients that cannot run ----------------------------------------------------------------------------------------


def lease_ended(node: Node, seat: Seat, message: Release, *, revoked: bool, now_ns: int) -> None:
    """A lease ends, and with it what was promised under it."""
    seat.room.promised_bytes = 0
    room.update(seat)
    refused, seat.room.refused = seat.room.refused, False
    unused = message.wanted and message.submissions == 0 and not (revoked or message.reason == ReleaseReason.IDLE)
    if seat.room.lacking_bytes:
        _make_unschedulable(node, seat)
    elif refused and unused:
        seat.room.refused = True
        seat.room.retry_at_ns = now_ns + RETRY_NS
        _make_unschedulable(node, seat)


def _make_unschedulable(node: Node, seat: Seat) -> None:
    if seat.room.unschedulable:
        return
    seat.room.unschedulable = True
    seat.gpu.schedule.stale = True
    seat.gpu.memory.immovable.unschedulable += 1
    if seat in seat.gpu.wait_queue:
        seat.gpu.wait_queue.leave(seat)
    lacking = seat.room.lacking_bytes
    node.notify("unschedulable", uuid=seat.gpu.uuid, client=seat.client.client_id, lacking_bytes=lacking)


def _make_schedulable(gpu: Gpu, seat: Seat) -> None:
    seat.room.unschedulable = seat.room.refused = False
    gpu.memory.immovable.unschedulable -= 1
    gpu.schedule.stale = True
    if seat.phase is WAITING and seat.schedulable:
        gpu.wait_queue.join(seat)


def deadline_ns(gpu: Gpu) -> int | None:
    """When a question is answered, or a refused client is tried again; None: nobody waits for that."""
    whole = gpu.memory.immovable
    due = [gpu.recovery.reconnected_at_ns] if whole.questions else []
    if whole.unschedulable:
        rooms = [seat.room for seat in gpu.seats.values() if seat.room.unschedulable]
        due += [each.retry_at_ns for each in rooms if not each.lacking_bytes]
    return min(due) if due else None
