"""Memory figures of a GPU, and memory orders: sent, followed, finished, failed.

Rules:
- An order goes only to a seat without a lease: its work is drained, so its memory can move.  A seat has one order at a
  time, and keeps it until the client says that it is finished, also when nobody waits for it any more.
- What an eviction has moved so far is free at once; what a restoration has credit for is taken at once.  So the sum of
  what everybody may come to have resident (`claimed_bytes`) is known at every moment, whichever messages are under way.
- A client that could not move as it was told is not told again before the next grant.

May not go here: which bytes (memory/planner.py), when (memory/switching.py, memory/prefetch.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.memory import host_budget, room
from nvshare.coordinator.memory.planner import Eviction, Figures, Room
from nvshare.coordinator.memory.quantum import blend
from nvshare.coordinator.model.commands import Log, Notify, Send
from nvshare.coordinator.model.events import MoveProgressed
from nvshare.coordinator.model.state import HOLDING, REVOKING, WITH_LEASE, Gpu, Node, Order, Seat
from nvshare.coordinator.protocol.messages import (
    MOST_BYTES,
    Evict,
    MemoryMode,
    MoveCredit,
    RemoteProtocolError,
    Restore,
)

SAMPLE_BYTES: Final = 1 << 20
"""Smaller moves say nothing about the link's speed."""


# --- figures --------------------------------------------------------------------------------------------------------


def set_figures(seat: Seat, *, allocated: int, resident: int, pinned: int, host: int) -> None:
    """The only way in which a seat's memory figures change; keeps the GPU's sums.

    They are a client's word, so they are bounded here to what can be.
    """
    gpu = seat.gpu
    allocated = min(allocated, MOST_BYTES)
    resident = min(resident, allocated)
    host = min(host, MOST_BYTES)
    needs = allocated != seat.allocated_bytes
    gpu.allocated_bytes += allocated - seat.allocated_bytes
    gpu.resident_bytes += resident - seat.resident_bytes
    gpu.host_bytes += host - seat.host_bytes
    seat.allocated_bytes = allocated
    seat.resident_bytes = resident
    seat.pinned_bytes = min(pinned, resident)
    seat.host_bytes = host
    room.follow(seat, needs=needs)
    gpu.line.changed(seat)


def wanted_bytes(seat: Seat) -> int:
    """What should be on the GPU while it runs."""
    return min(seat.allocated_bytes, seat.gpu.capacity_bytes)


def missing_bytes(seat: Seat) -> int:
    """What must come in before it runs.  With room for everybody, memory that was never evicted comes by itself."""
    gpu = seat.gpu
    if seat.host_bytes == 0 and gpu.allocated_bytes <= gpu.capacity_bytes:
        return 0
    return max(0, wanted_bytes(seat) - seat.resident_bytes)


def claimed_bytes(seat: Seat) -> int:
    """What it has resident, or may come to have without asking again."""
    claimed = seat.resident_bytes
    order = seat.order
    if order is not None and not order.evict:
        claimed = max(claimed, order.resident_before + order.credit_bytes)
    mode = seat.client.memory_mode
    if mode is MemoryMode.DEVICE:
        return max(claimed, seat.reserved_bytes)
    if seat.phase in (HOLDING, REVOKING):
        claimed = max(claimed, wanted_bytes(seat))
        if mode is MemoryMode.SWAP:
            claimed = max(claimed, seat.reserved_bytes)
    return claimed


def free_room(gpu: Gpu) -> Room:
    """What is free, and what becomes free by itself.  O(seats)."""
    claimed = leaving = 0
    for seat in gpu.seats.values():
        claimed += claimed_bytes(seat)
        order = seat.order
        if order is not None and order.evict and not order.stalled:
            leaving += min(order.bytes - order.moved_bytes, seat.resident_bytes - seat.pinned_bytes)
    return Room(gpu.capacity_bytes - claimed, max(0, leaving))


def stuck_in(seat: Seat, credit: int) -> bool:
    """Whether it has left as much credit as this unused since the last grant: for want of memory, or because what it
    could bring in is cut into larger pieces."""
    return seat.stuck_in_at == seat.gpu.grants and credit <= seat.stuck_in_bytes


def under_way(gpu: Gpu) -> bool:
    """Whether anything moves; not an order that waits for credit."""
    return any(seat.order is not None and seat.order.moving for seat in gpu.moving.values())


def figures(node: Node, seat: Seat) -> Figures:
    """What it may be asked to give now."""
    movable = 0
    if (
        seat.client.memory_mode is not MemoryMode.DEVICE
        and seat.phase not in WITH_LEASE
        and seat.order is None
        and seat.stuck_out_at != seat.gpu.grants
    ):
        movable = min(seat.resident_bytes - seat.pinned_bytes, host_budget.room_bytes(node, seat.client))
    return Figures(seat.client.client, movable)


# --- orders ---------------------------------------------------------------------------------------------------------


def evict(node: Node, gpu: Gpu, orders: tuple[Eviction, ...], now_ns: int) -> None:
    """Sends the evictions that were planned."""
    for eviction in orders:
        seat = gpu.seats[eviction.client]
        order = _order(node, seat, eviction.bytes, 0, now_ns, evict=True)
        gpu.evict_orders += 1
        node.out.append(Send(eviction.client, Evict(seat.ordinal, order.order_id, order.bytes)))
        _say(node, gpu, order, "evicting")


def restore(node: Node, seat: Seat, size: int, credit: int, now_ns: int) -> None:
    """Bring `size` bytes in, `credit` of them at once."""
    order = _order(node, seat, size, credit, now_ns, evict=False)
    seat.gpu.restore_orders += 1
    node.out.append(Send(seat.client.client, Restore(seat.ordinal, order.order_id, size, credit)))
    _say(node, seat.gpu, order, "restoring")


def give_credit(node: Node, seat: Seat, order: Order, credit: int, now_ns: int) -> None:
    """So much of the order has room now; less than before changes nothing."""
    credit = min(credit, order.bytes)
    if credit > order.credit_bytes:
        if not order.moving:
            order.heard_ns = now_ns
        order.credit_bytes = credit
        node.out.append(Send(seat.client.client, MoveCredit(seat.ordinal, order.order_id, credit)))


def _order(node: Node, seat: Seat, size: int, credit: int, now_ns: int, *, evict: bool) -> Order:
    assert seat.order is None, "one order at a time"
    assert seat.phase not in WITH_LEASE, "memory moves only while nothing runs on it"
    gpu = seat.gpu
    order = Order(
        order_id=node.next_order_id,
        client=seat.client.client,
        evict=evict,
        bytes=size,
        credit_bytes=credit,
        resident_before=seat.resident_bytes,
        started_ns=now_ns,
        heard_ns=now_ns,
        exposed_before_ns=gpu.exposed_clock_ns(now_ns),
        straight=evict or credit >= size,
    )
    node.next_order_id += 1
    seat.order = order
    gpu.moving[order.client] = seat
    return order


def _say(node: Node, gpu: Gpu, order: Order, kind: str) -> None:
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": order.client,
        "order": order.order_id,
        "bytes": order.bytes,
        "hidden": gpu.switch is None,
    }
    node.out.append(Notify(kind, values))


def progress(node: Node, seat: Seat, event: MoveProgressed, now_ns: int) -> None:
    """A client says how far an order is."""
    order = seat.order
    if order is None or order.order_id != event.order_id:
        raise RemoteProtocolError(f"progress of order {event.order_id}, which client {event.client} does not have")
    order.heard_ns, order.stalled = now_ns, False
    _account(seat, order, max(order.moved_bytes, min(event.moved_bytes, max(order.bytes, seat.allocated_bytes))))
    if event.finished:
        _finish(node, seat, order, event, now_ns)


def _account(seat: Seat, order: Order, moved: int) -> None:
    # The report of the new figures may have come before this or may come after it: counting from what was resident when
    # the order was given makes both right.
    gpu = seat.gpu
    more = moved - order.moved_bytes
    order.moved_bytes = moved
    if order.evict:
        resident = min(seat.resident_bytes, max(0, order.resident_before - moved))
        gpu.evicted_bytes += more
        seat.moved_out_bytes += more
    else:
        resident = max(seat.resident_bytes, min(seat.allocated_bytes, order.resident_before + moved))
        gpu.restored_bytes += more
        seat.moved_in_bytes += more
    left = seat.resident_bytes - resident
    set_figures(
        seat,
        allocated=seat.allocated_bytes,
        resident=resident,
        pinned=seat.pinned_bytes,
        host=max(0, seat.host_bytes + left),
    )


def _finish(node: Node, seat: Seat, order: Order, event: MoveProgressed, now_ns: int) -> None:
    gpu = seat.gpu
    end(gpu, seat)
    left_over = seat.resident_bytes - seat.pinned_bytes > 0 if order.evict else order.moved_bytes < order.credit_bytes
    short = order.moved_bytes < order.bytes and left_over
    if short and order.evict:
        seat.stuck_out_at = gpu.grants
    elif short:
        seat.stuck_in_at = gpu.grants
        seat.stuck_in_bytes = order.credit_bytes - order.moved_bytes
    failed = event.error != 0 or (short and order.evict)
    gpu.failed_orders += failed
    seat.failed_orders += failed
    hidden_ns = _spent(gpu, seat, order, now_ns)
    node.out.append(
        Notify(
            "moved",
            {
                "uuid": gpu.uuid,
                "client": order.client,
                "order": order.order_id,
                "evict": order.evict,
                "asked_bytes": order.bytes,
                "moved_bytes": order.moved_bytes,
                "elapsed_ns": event.elapsed_ns,
                "hidden_ns": hidden_ns,
                "exposed_ns": now_ns - order.started_ns - hidden_ns,
                "error": event.error,
            },
        )
    )


def look_for_stalled(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Give up waiting for clients that hang: others are asked instead, though their memory stays where it is."""
    for seat in gpu.moving.values():
        order = seat.order
        if order is not None and order.moving and now_ns >= order.heard_ns + node.settings.move_stall_ns:
            order.stalled = True
            gpu.failed_orders += 1
            seat.failed_orders += 1
            client = seat.client
            text = f"{gpu.uuid}: {client.name} (process {client.process_id}) does not move its memory; not waited for"
            node.out.append(Log(logging.WARNING, text))
            values: dict[str, int | str | bool | float | None] = {
                "uuid": gpu.uuid,
                "client": order.client,
                "order": order.order_id,
                "moved_bytes": order.moved_bytes,
            }
            node.out.append(Notify("stalled", values))


def stall_ns(node: Node, gpu: Gpu) -> int | None:
    """When the next order will have stalled; None: nothing moves."""
    heard = [seat.order.heard_ns for seat in gpu.moving.values() if seat.order is not None and seat.order.moving]
    return min(heard) + node.settings.move_stall_ns if heard else None


def end(gpu: Gpu, seat: Seat) -> None:
    """The order is over, or its client gone."""
    seat.order = None
    del gpu.moving[seat.client.client]


def _spent(gpu: Gpu, seat: Seat, order: Order, now_ns: int) -> int:
    """Account for the time of an order that is over; returns how much of it was hidden."""
    whole_ns = now_ns - order.started_ns
    exposed_ns = min(whole_ns, gpu.exposed_clock_ns(now_ns) - order.exposed_before_ns)
    hidden_ns = whole_ns - exposed_ns
    gpu.exposed_move_ns += exposed_ns
    gpu.hidden_move_ns += hidden_ns
    seat.exposed_move_ns += exposed_ns
    seat.hidden_move_ns += hidden_ns
    if order.evict:
        gpu.turn_hidden_out_ns += hidden_ns
    else:
        gpu.turn_hidden_in_ns += hidden_ns
    if order.straight and order.moved_bytes >= SAMPLE_BYTES and whole_ns > 0:
        rate = order.moved_bytes / whole_ns
        gpu.move_rate = rate if gpu.move_rate == 0.0 else gpu.move_rate + (rate - gpu.move_rate) / 8
    return hidden_ns


def turn_over(gpu: Gpu) -> None:
    """The lease goes on: what was moved beside the turn that ends is one sample for the automatic quantum."""
    sample_ns = max(gpu.turn_hidden_out_ns, gpu.turn_hidden_in_ns)
    gpu.turn_hidden_out_ns = gpu.turn_hidden_in_ns = 0
    if sample_ns or gpu.hidden_average_ns:
        average = blend(gpu.hidden_average_ns, sample_ns)
        gpu.hidden_average_ns = average if average >= 1000.0 else 0.0
