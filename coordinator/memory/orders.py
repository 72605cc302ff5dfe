"""Memory usage of seats, and memory orders: sent, followed, finished, failed.

Rules:
- An order goes only to a seat without a lease: its work is drained, so its memory can move.
- A seat has one order at a time, and keeps it until the client reports its end, also when nobody waits for it.
- What an eviction has moved is free at once; what a restoration has credit for is taken at once.  So the most that all
  clients may come to have resident (`claimed_bytes`) is always known, whichever messages are under way.
- A client whose order fell short gets no further one before the next grant.
- An eviction may follow a restoration that does not go on; the client ends the restoration first.
- Memory of a client that is gone leaves the GPU by itself, when its process has ended.

Non-goals: which bytes (memory/planner.py), when (memory/switching.py, memory/prefetch.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.memory import host_budget, room
from nvshare.coordinator.memory.planner import Candidate, Eviction, Room
from nvshare.coordinator.memory.quantum import moving_average
from nvshare.coordinator.model.commands import Log, Notify, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import Ending, Order
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, REVOKING, WITH_LEASE, Seat
from nvshare.coordinator.protocol.messages import (
    MOST_BYTES,
    Evict,
    MemoryMode,
    MoveCredit,
    MoveProgress,
    RemoteProtocolError,
    Restore,
)

SAMPLE_BYTES: Final = 1 << 20
"""The shortest move whose time measures the speed of the link."""


# --- figures --------------------------------------------------------------------------------------------------------


def set_usage(seat: Seat, *, allocated: int, resident: int, pinned: int, host: int) -> None:
    """Changes a seat's memory usage and the GPU's sums; nothing else does.

    The client reports the figures, so they are bounded to what it may have.
    """
    gpu = seat.gpu
    if allocated > seat.memory.allocated_bytes:
        allocated = max(seat.memory.allocated_bytes, min(allocated, room.most_bytes(seat)))
    most = seat.memory.check.most_bytes
    if most is not None:
        resident = min(resident, most)
        if seat.client.memory_mode is MemoryMode.DEVICE:
            allocated = min(resident, max(seat.memory.allocated_bytes, room.most_bytes(seat)))
    resident = min(resident, allocated)
    host = min(host, MOST_BYTES)
    needs = allocated != seat.memory.allocated_bytes
    gpu.memory.allocated_bytes += allocated - seat.memory.allocated_bytes
    gpu.memory.resident_bytes += resident - seat.memory.resident_bytes
    gpu.memory.host_bytes += host - seat.memory.host_bytes
    seat.memory.allocated_bytes = allocated
    gpu.memory.overflow.reported[seat.client.client_id] = None
    seat.memory.resident_bytes = resident
    seat.memory.pinned_bytes = min(pinned, resident)
    seat.memory.host_bytes = host
    if resident:
        gpu.memory.evictable[seat.client.client_id] = seat
    else:
        gpu.memory.evictable.pop(seat.client.client_id, None)
    claim(seat)
    room.update(seat, needs=needs)
    gpu.wait_queue.changed(seat)


def wanted_bytes(seat: Seat) -> int:
    """Memory that should be on the GPU while the client runs."""
    return min(seat.memory.allocated_bytes, seat.gpu.memory.capacity_bytes)


def missing_bytes(seat: Seat) -> int:
    """Memory that must come in before the client runs.

    While all clients fit, memory that was never evicted comes by itself.
    """
    gpu = seat.gpu
    if seat.memory.host_bytes == 0 and gpu.memory.allocated_bytes <= gpu.memory.capacity_bytes:
        return 0
    return max(0, wanted_bytes(seat) - seat.memory.resident_bytes)


def is_complete(seat: Seat) -> bool:
    """Nothing must move before the client runs."""
    return seat.moves.order is None and missing_bytes(seat) == 0


def claim(seat: Seat) -> None:
    """Counts again what the client claims of its GPU.  Called whenever something that `claimed_bytes` reads changes."""
    now, mine, whole = claimed_bytes(seat), seat.memory, seat.gpu.memory
    if seat.client.identity.group:
        whole.changed_groups[seat.client.owner] = None
    needed = max(now, mine.allocated_bytes)
    whole.needed_bytes += needed - mine.needed_bytes
    mine.needed_bytes = needed
    if now != mine.claimed_bytes:
        whole.claimed_bytes += now - mine.claimed_bytes
        mine.claimed_bytes = now
        seat.gpu.wait_queue.changed(seat)


def claimed_bytes(seat: Seat) -> int:
    """Memory that the client has resident, or may get without asking again."""
    claimed = seat.memory.resident_bytes
    order = seat.moves.order
    if order is not None and not order.evict:
        claimed = max(claimed, order.resident_before + order.credit_bytes)
    mode = seat.client.memory_mode
    if mode is MemoryMode.DEVICE:
        return max(claimed, seat.memory.reserved_bytes)
    if seat.phase in (HOLDING, REVOKING):
        claimed = max(claimed, wanted_bytes(seat))
        if mode is MemoryMode.SWAP:
            claimed = max(claimed, seat.memory.reserved_bytes)
    return claimed


def free_room(gpu: Gpu) -> Room:
    """Free memory, and memory that open orders and ending processes free.  O(orders)."""
    leaving = ending = sum(each.bytes for each in gpu.memory.immovable.ending.values())
    for seat in gpu.memory.moving.values():
        order = seat.moves.order
        if order is not None and order.evict and not order.stalled:
            leaving += min(order.bytes - order.moved_bytes, seat.memory.resident_bytes - seat.memory.pinned_bytes)
    return Room(gpu.memory.capacity_bytes - gpu.memory.claimed_bytes - ending, max(0, leaving))


def room_to_bring_in(gpu: Gpu) -> Room:
    """`free_room`, less what the driver's figures show beside it: contexts, and memory that only importers hold."""
    free, memory = free_room(gpu), gpu.memory
    crowded = max(0, memory.other_bytes - (memory.total_bytes - memory.capacity_bytes))
    return Room(free.free_bytes - crowded, free.leaving_bytes)


def restore_is_stuck(seat: Seat, credit: int) -> bool:
    """Whether a restoration since the last grant has left this much credit unused."""
    return (
        seat.moves.restore_failed_at == seat.gpu.leases.statistics.grants and credit <= seat.moves.unused_credit_bytes
    )


def more_room(gpu: Gpu, now_ns: int) -> None:
    """Other memory than clients' has left the card: what found no room is tried again."""
    for seat in gpu.seats.values():
        seat.moves.restore_failed_at = -1
        seat.room.retry_at_ns = min(seat.room.retry_at_ns, now_ns)
    gpu.schedule.stale = True


def any_moving(gpu: Gpu) -> bool:
    """Whether anything moves or leaves with its process; an order that waits for credit does not."""
    if gpu.memory.immovable.ending:
        return True
    return any(seat.moves.order is not None and seat.moves.order.moving for seat in gpu.memory.moving.values())


def eviction_candidate(node: Node, seat: Seat) -> Candidate:
    """Memory that the client can evict now."""
    movable = 0
    if (
        seat.client.memory_mode is not MemoryMode.DEVICE
        and not seat.client.parking.closed
        and seat.phase not in WITH_LEASE
        and not (seat.lease.stray or seat.client.stopped)
        and (seat.moves.order is None or not (seat.moves.order.evict or seat.moves.order.moving))
        and not seat.moves.replaced_id
        and seat.moves.evict_failed_at != seat.gpu.leases.statistics.grants
    ):
        movable = min(seat.memory.resident_bytes - seat.memory.pinned_bytes, host_budget.room_bytes(node, seat.client))
    return Candidate(seat.client.client_id, movable)


# --- orders ---------------------------------------------------------------------------------------------------------


def evict(node: Node, gpu: Gpu, orders: tuple[Eviction, ...], now_ns: int) -> None:
    """Sends the evictions that were planned."""
    for eviction in orders:
        seat = gpu.seats[eviction.client]
        if seat.moves.order is not None:
            seat.moves.replaced_id = seat.moves.order.order_id
            end_order(gpu, seat)
        order = _new_order(node, seat, eviction.bytes, 0, now_ns, evict=True)
        gpu.memory.statistics.evict_orders += 1
        node.out.append(Send(eviction.client, Evict(seat.ordinal, order.order_id, order.bytes)))
        _notify(node, gpu, order, "evicting")


def restore(node: Node, seat: Seat, size: int, credit: int, now_ns: int) -> None:
    """Brings `size` bytes in, `credit` of them at once."""
    order = _new_order(node, seat, size, credit, now_ns, evict=False)
    seat.gpu.memory.statistics.restore_orders += 1
    node.out.append(Send(seat.client.client_id, Restore(seat.ordinal, order.order_id, size, credit)))
    _notify(node, seat.gpu, order, "restoring")


def give_credit(node: Node, seat: Seat, order: Order, credit: int, now_ns: int) -> None:
    """Raises the credit of an order; never lowers it."""
    credit = min(credit, order.bytes)
    if credit > order.credit_bytes:
        if not order.moving:
            order.heard_ns = now_ns
        order.credit_bytes = credit
        claim(seat)
        node.out.append(Send(seat.client.client_id, MoveCredit(seat.ordinal, order.order_id, credit)))


def _new_order(node: Node, seat: Seat, size: int, credit: int, now_ns: int, *, evict: bool) -> Order:
    assert seat.moves.order is None, "one order at a time"
    assert seat.phase not in WITH_LEASE, "memory moves only while nothing runs on it"
    gpu = seat.gpu
    order = Order(
        order_id=node.next_order_id,
        client=seat.client.client_id,
        evict=evict,
        bytes=size,
        credit_bytes=credit,
        resident_before=seat.memory.resident_bytes,
        started_ns=now_ns,
        heard_ns=now_ns,
        exposed_before_ns=gpu.exposed_clock_ns(now_ns),
        unhindered=evict or credit >= size,
    )
    node.next_order_id += 1
    seat.moves.order = order
    gpu.memory.moving[order.client] = seat
    claim(seat)
    return order


def _notify(node: Node, gpu: Gpu, order: Order, kind: str) -> None:
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": order.client,
        "order": order.order_id,
        "bytes": order.bytes,
        "hidden": gpu.switching.switch is None,
    }
    node.out.append(Notify(kind, values))


def progress(node: Node, seat: Seat, message: MoveProgress, now_ns: int) -> None:
    """A client reports how far an order is."""
    order = seat.moves.order
    if seat.moves.replaced_id and message.order_id == seat.moves.replaced_id:
        if message.finished:
            seat.moves.replaced_id = 0
        return
    if order is None or order.order_id != message.order_id:
        raise RemoteProtocolError(
            f"progress of order {message.order_id}, which client {seat.client.client_id} does not have"
        )
    order.heard_ns, order.stalled = now_ns, False
    _mark_recent(seat, now_ns)
    _count_moved(
        seat, order, max(order.moved_bytes, min(message.moved_bytes, max(order.bytes, seat.memory.allocated_bytes)))
    )
    _mark_recent(seat, now_ns)
    if message.finished:
        _finish(node, seat, order, message, now_ns)


def _mark_recent(seat: Seat, now_ns: int) -> None:
    gpu = seat.gpu
    seat.moves.recent.mark(now_ns, seat.moves.statistics.moved_bytes)
    gpu.memory.recent_moved.mark(now_ns, gpu.memory.statistics.moved_bytes)
    gpu.memory.recent_waited.mark(now_ns, gpu.exposed_clock_ns(now_ns))


def _count_moved(seat: Seat, order: Order, moved: int) -> None:
    # The report of the new figures comes before or after this.  Counting from what was resident when the order was
    # given is right in both cases.
    gpu = seat.gpu
    more = moved - order.moved_bytes
    order.moved_bytes = moved
    if order.evict:
        resident = min(seat.memory.resident_bytes, max(0, order.resident_before - moved))
        gpu.memory.statistics.evicted_bytes += more
        seat.moves.statistics.moved_out_bytes += more
    else:
        resident = max(seat.memory.resident_bytes, min(seat.memory.allocated_bytes, order.resident_before + moved))
        gpu.memory.statistics.restored_bytes += more
        seat.moves.statistics.moved_in_bytes += more
    left = seat.memory.resident_bytes - resident
    set_usage(
        seat,
        allocated=seat.memory.allocated_bytes,
        resident=resident,
        pinned=seat.memory.pinned_bytes,
        host=max(0, seat.memory.host_bytes + left),
    )


def _finish(node: Node, seat: Seat, order: Order, message: MoveProgress, now_ns: int) -> None:
    gpu = seat.gpu
    end_order(gpu, seat)
    left_over = (
        seat.memory.resident_bytes - seat.memory.pinned_bytes > 0
        if order.evict
        else order.moved_bytes < order.credit_bytes
    )
    short = order.moved_bytes < order.bytes and left_over
    if short and order.evict:
        seat.moves.evict_failed_at = gpu.leases.statistics.grants
    elif short:
        seat.moves.restore_failed_at = gpu.leases.statistics.grants
        seat.moves.unused_credit_bytes = order.credit_bytes - order.moved_bytes
        # Without an error it ended at the border of a segment.
        gpu.memory.short = gpu.memory.short or message.error != 0
    failed = message.error != 0 or (short and order.evict)
    if order.evict:
        seat.moves.evict_failed = failed
    gpu.memory.statistics.failed_orders += failed
    seat.moves.statistics.failed_orders += failed
    hidden_ns = _count_time(gpu, seat, order, now_ns, sample=not failed and not order.stalled)
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
                "elapsed_ns": message.elapsed_ns,
                "hidden_ns": hidden_ns,
                "exposed_ns": now_ns - order.started_ns - hidden_ns,
                "error": message.error,
            },
        )
    )


def mark_stalled(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Stops waiting for clients that hang: others are asked instead, though the memory stays where it is."""
    for process_id in [
        process_id for process_id, each in gpu.memory.immovable.ending.items() if now_ns >= each.until_ns
    ]:
        del gpu.memory.immovable.ending[process_id]
    for seat in gpu.memory.moving.values():
        order = seat.moves.order
        late = order is not None and now_ns >= order.heard_ns + node.settings.move_stall_ns
        if order is not None and order.moving and (late or seat.client.stopped):
            order.stalled = True
            seat.moves.evict_failed = order.evict
            gpu.memory.statistics.failed_orders += 1
            seat.moves.statistics.failed_orders += 1
            client = seat.client
            text = f"{gpu.uuid}: {client.identity} does not move its memory; it is not waited for"
            node.out.append(Log(logging.WARNING, text))
            values: dict[str, int | str | bool | float | None] = {
                "uuid": gpu.uuid,
                "client": order.client,
                "order": order.order_id,
                "moved_bytes": order.moved_bytes,
            }
            node.out.append(Notify("stalled", values))


def stall_deadline_ns(node: Node, gpu: Gpu) -> int | None:
    """When the next order will have stalled; None: nothing moves."""
    due = [
        seat.moves.order.heard_ns + node.settings.move_stall_ns
        for seat in gpu.memory.moving.values()
        if seat.moves.order is not None and seat.moves.order.moving
    ]
    return min([*due, *(each.until_ns for each in gpu.memory.immovable.ending.values())], default=None)


def outlive_client(node: Node, seat: Seat, size: int, now_ns: int) -> None:
    """The client is gone, and the driver frees its memory when its process has ended."""
    gpu, process_id = seat.gpu, seat.client.identity.process_id
    if size and all(other.client.identity.process_id != process_id for other in gpu.seats.values()):
        gpu.memory.immovable.ending[process_id] = Ending(size, now_ns + node.settings.move_stall_ns)


def end_order(gpu: Gpu, seat: Seat) -> None:
    """The order is over, or its client gone."""
    seat.moves.order = None
    del gpu.memory.moving[seat.client.client_id]
    claim(seat)


def _count_time(gpu: Gpu, seat: Seat, order: Order, now_ns: int, *, sample: bool) -> int:
    """Accounts for the time of an order that is over; returns how much of it was hidden.  `sample`: it is one."""
    whole_ns = now_ns - order.started_ns
    exposed_ns = min(whole_ns, gpu.exposed_clock_ns(now_ns) - order.exposed_before_ns)
    hidden_ns = whole_ns - exposed_ns
    gpu.memory.statistics.exposed_move_ns += exposed_ns
    gpu.memory.statistics.hidden_move_ns += hidden_ns
    seat.moves.statistics.exposed_move_ns += exposed_ns
    seat.moves.statistics.hidden_move_ns += hidden_ns
    if not sample:
        return hidden_ns
    if order.evict:
        gpu.switching.hidden.turn_out_ns += hidden_ns
    else:
        gpu.switching.hidden.turn_in_ns += hidden_ns
    if order.unhindered and order.moved_bytes >= SAMPLE_BYTES and whole_ns > 0:
        rate = order.moved_bytes / whole_ns
        gpu.switching.move_rate = (
            rate if gpu.switching.move_rate == 0.0 else gpu.switching.move_rate + (rate - gpu.switching.move_rate) / 8
        )
    return hidden_ns


def close_turn(gpu: Gpu) -> None:
    """The time of moves during the turn that ends is one sample for the automatic quantum."""
    hidden = gpu.switching.hidden
    sample_ns = max(hidden.turn_out_ns, hidden.turn_in_ns)
    hidden.turn_out_ns = hidden.turn_in_ns = 0
    if sample_ns or hidden.average_ns:
        average = moving_average(hidden.average_ns, sample_ns)
        hidden.average_ns = average if average >= 1000.0 else 0.0
