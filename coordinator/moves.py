"""Memory orders on one GPU: sent, followed, finished, failed; the switch of the lease that waits for them.

Rules:
- An order goes only to a seat without a lease: its work is drained, so its memory can move.
- An order's seat keeps it in `Seat.orders` until the client says that it is finished, also when nobody waits for it
  any more.
- A switch never waits longer than its deadline: then the next client is granted with what is there, for pages can
  still fault in.
- A client that cannot move what it was told to is passed over, and the next one is asked; a dead one's memory is free.

May not go here: which bytes (memory_plan.py), who is next (lease.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.commands import Log, Notify, Send
from coordinator.events import MoveProgressed
from coordinator.memory_plan import Figures, evictions, plan_switch
from coordinator.quantum import blend
from coordinator.state import OVERDUE, WITH_LEASE, Gpu, Node, Order, Seat
from coordinator.tell import idle_release_ns, settings_changed
from coordinator.wire import Evict, MemoryMode, RemoteProtocolError, Restore


@dataclass(slots=True, eq=False)
class Switch:
    """The lease is on its way to `seat`; its memory comes first."""

    seat: Seat
    quantum_ns: int | None
    """As the policy chose it; None: the GPU's at the time of the grant."""
    started_ns: int
    deadline_ns: int
    evicting: dict[int, Order] = field(default_factory=dict)
    passed_over: set[int] = field(default_factory=set)
    restoring: int | None = None
    restored: bool = False
    done: bool = False


def set_figures(seat: Seat, *, allocated: int, resident: int, pinned: int, host: int) -> None:
    """The only way in which a seat's memory figures change; keeps the GPU's sums.

    They are a client's word, so they are bounded here to what can be.
    """
    gpu = seat.gpu
    allocated = min(allocated, 1 << 60)
    resident = min(resident, allocated)
    gpu.allocated_bytes += allocated - seat.allocated_bytes
    gpu.resident_bytes += resident - seat.resident_bytes
    seat.allocated_bytes = allocated
    seat.resident_bytes = resident
    seat.pinned_bytes = min(pinned, resident)
    seat.host_bytes = host
    gpu.line.changed(seat)


def _figures(seat: Seat) -> Figures:
    movable = 0
    if seat.client.memory_mode is not MemoryMode.DEVICE and seat.phase not in WITH_LEASE and not seat.orders:
        movable = seat.resident_bytes - seat.pinned_bytes
    return Figures(seat.client.client, seat.allocated_bytes, seat.resident_bytes, movable)


def _farthest_first(node: Node, gpu: Gpu, following: Seat, now_ns: int) -> Iterator[Figures]:
    """First those who do not ask for the GPU, longest idle first; then those who wait, last in the policy's order
    first."""
    asking = {seat.client.client for seat in gpu.line.seats()}
    quiet = [seat for client, seat in gpu.seats.items() if client not in asking and seat is not following]
    quiet.sort(key=lambda seat: seat.turn)
    for seat in quiet:
        yield _figures(seat)
    waiting = gpu.line.views()
    order = gpu.umpire.order(waiting, gpu.look(), now_ns, node.out)
    ordered = set(order)
    demoted = asking - ordered  # they come after all others
    yield from (_figures(gpu.seats[client]) for client in sorted(demoted))
    for client in reversed(order):
        yield _figures(gpu.seats[client])


def fits_beside_overdue(gpu: Gpu, seat: Seat) -> bool:
    """Whether a client may run beside one whose drain is overdue, whose memory therefore cannot be moved."""
    if seat.client.memory_mode is MemoryMode.MANAGED:
        return True  # pages fault in as there is room
    stuck = sum(other.resident_bytes for other in gpu.leases.values() if other.phase is OVERDUE)
    return stuck + seat.allocated_bytes <= gpu.capacity_bytes


def begin(node: Node, gpu: Gpu, seat: Seat, quantum_ns: int | None, now_ns: int) -> bool:
    """Start what must move before `seat` runs.  False: nothing must.  O(1) when everything fits."""
    fits = gpu.allocated_bytes <= gpu.capacity_bytes
    if fits and (seat.host_bytes == 0 or seat.resident_bytes == seat.allocated_bytes):
        _average(node, gpu, 0)
        return False
    plan = plan_switch(
        _figures(seat),
        list(_farthest_first(node, gpu, seat, now_ns)),
        resident_bytes=gpu.resident_bytes,
        capacity_bytes=gpu.capacity_bytes,
    )
    if not plan.evictions and not plan.restore_bytes:
        _average(node, gpu, 0)
        return False
    switch = gpu.switch = Switch(seat, quantum_ns, now_ns, now_ns + node.settings.move_deadline_ns)
    for eviction in plan.evictions:
        _evict(node, gpu.seats[eviction.client], switch, eviction.bytes)
    advance(node, gpu, now_ns)
    return True


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Go on when the evictions are through; give up at the deadline."""
    switch = gpu.switch
    if switch is None or switch.done:
        return
    if now_ns >= switch.deadline_ns:
        gpu.late_switches += 1
        text = f"{gpu.uuid}: memory did not move in time; the next client runs with what is there"
        node.out.append(Log(logging.WARNING, text))
        switch.done = True
    elif not switch.evicting and switch.restoring is None:
        seat = switch.seat
        room = gpu.capacity_bytes - gpu.resident_bytes
        wanted = min(seat.allocated_bytes - seat.resident_bytes, room)
        if switch.restored or wanted <= 0 or seat.orders:
            switch.done = True
        else:
            switch.restoring = _order(node, seat, wanted, evict=False).order_id


def make_room(node: Node, gpu: Gpu, seat: Seat, excess_bytes: int, now_ns: int) -> bool:
    """Have others, farthest first, move `excess_bytes` out for one that runs.  False: they have not so much to move."""
    orders = evictions(excess_bytes, _farthest_first(node, gpu, seat, now_ns))
    if sum(order.bytes for order in orders) < excess_bytes:
        return False
    for eviction in orders:
        _order(node, gpu.seats[eviction.client], eviction.bytes, evict=True)
    return True


def progress(node: Node, seat: Seat, event: MoveProgressed, now_ns: int) -> None:
    """A client says how far an order is."""
    order = seat.orders.get(event.order_id)
    if order is None:
        raise RemoteProtocolError(f"progress of order {event.order_id}, which client {event.client} does not have")
    if not event.finished:
        return
    del seat.orders[order.order_id]
    gpu = seat.gpu
    moved = min(event.moved_bytes, seat.allocated_bytes)
    # The report of the new figures may have come before this or may come after it: counting from what was resident when
    # the order was given makes both right.
    if order.evict:
        resident = min(seat.resident_bytes, max(0, order.resident_before - moved))
        gpu.evicted_bytes += moved
    else:
        resident = max(seat.resident_bytes, min(seat.allocated_bytes, order.resident_before + moved))
        gpu.restored_bytes += moved
    delta = seat.resident_bytes - resident
    host = max(0, seat.host_bytes + delta)
    set_figures(seat, allocated=seat.allocated_bytes, resident=resident, pinned=seat.pinned_bytes, host=host)
    failed = event.error != 0 or moved < order.bytes
    gpu.failed_orders += failed
    node.out.append(
        Notify(
            "moved",
            {
                "uuid": gpu.uuid,
                "client": seat.client.client,
                "order": order.order_id,
                "evict": order.evict,
                "asked_bytes": order.bytes,
                "moved_bytes": moved,
                "elapsed_ns": event.elapsed_ns,
                "error": event.error,
            },
        )
    )
    _settle(node, gpu, order, failed, now_ns)


def forget(node: Node, seat: Seat, now_ns: int) -> None:
    """The seat's client is gone, its memory with it."""
    gpu = seat.gpu
    set_figures(seat, allocated=0, resident=0, pinned=0, host=0)
    if gpu.switch is not None and gpu.switch.seat is seat:
        gpu.switch = None
    for order in list(seat.orders.values()):
        del seat.orders[order.order_id]
        _settle(node, gpu, order, False, now_ns)


def close(node: Node, gpu: Gpu, now_ns: int) -> None:
    """The switch is over: account for the time it took."""
    switch = gpu.switch
    assert switch is not None
    gpu.switch = None
    elapsed_ns = now_ns - switch.started_ns
    gpu.moved_ns += elapsed_ns
    _average(node, gpu, elapsed_ns)


def _settle(node: Node, gpu: Gpu, order: Order, failed: bool, now_ns: int) -> None:
    """Tell the switch, if it still waits for this order, and ask others where one could not do it."""
    switch = gpu.switch
    if switch is None:
        return
    if switch.restoring == order.order_id:
        switch.restoring = None
        switch.restored = True
    elif switch.evicting.pop(order.order_id, None) is not None and failed:
        switch.passed_over.add(order.client)
        missing = switch.seat.allocated_bytes - switch.seat.resident_bytes
        under_way = sum(other.bytes for other in switch.evicting.values())
        excess = missing - (gpu.capacity_bytes - gpu.resident_bytes) - under_way
        candidates = (f for f in _farthest_first(node, gpu, switch.seat, now_ns) if f.client not in switch.passed_over)
        for eviction in evictions(excess, candidates):
            _evict(node, gpu.seats[eviction.client], switch, eviction.bytes)


def _evict(node: Node, seat: Seat, switch: Switch, size: int) -> None:
    order = _order(node, seat, size, evict=True)
    switch.evicting[order.order_id] = order


def _order(node: Node, seat: Seat, size: int, *, evict: bool) -> Order:
    gpu = seat.gpu
    client = seat.client.client
    order = Order(node.next_order_id, client, evict, size, seat.resident_bytes)
    node.next_order_id += 1
    seat.orders[order.order_id] = order
    if evict:
        gpu.evict_orders += 1
        node.out.append(Send(client, Evict(seat.ordinal, order.order_id, size)))
    else:
        gpu.restore_orders += 1
        node.out.append(Send(client, Restore(seat.ordinal, order.order_id, size)))
    kind = "evicting" if evict else "restoring"
    node.out.append(Notify(kind, {"uuid": gpu.uuid, "client": client, "order": order.order_id, "bytes": size}))
    return order


def _average(node: Node, gpu: Gpu, elapsed_ns: int) -> None:
    if elapsed_ns == 0 and gpu.move_average_ns == 0.0:
        return
    before = idle_release_ns(gpu, node)
    average = blend(gpu.move_average_ns, elapsed_ns)
    gpu.move_average_ns = average if average >= 1000.0 else 0.0
    if idle_release_ns(gpu, node) != before:
        settings_changed(gpu)
