"""The switch of a lease that waits for memory.

Rules:
- A client is granted the lease when what it lacks is there or when nothing more can come, and never during an order of
  its own.
- Evictions and the restoration go on at the same time; each piece that has left gives credit for as much.
- A switch ends at its deadline: the next client is granted with what is there, for pages can still fault in.
- A client that cannot move as told is passed over, and the next one is asked.  A dead client's memory is free.

Non-goals: which bytes (planner.py), what an order means (orders.py), which client is next (engine/planning.py), what
moves while a client computes (prefetch.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from nvshare.coordinator.memory import checks, orders, room, switch_credit
from nvshare.coordinator.memory.planner import Candidate, Room, plan_switch
from nvshare.coordinator.memory.quantum import idle_release_ns
from nvshare.coordinator.model.commands import Log, Notify
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import Switch
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import OVERDUE, Seat
from nvshare.coordinator.protocol.messages import MemoryMode


def eviction_candidates(node: Node, gpu: Gpu, following: Seat) -> Iterator[Candidate]:
    """Clients that may give room, farthest turn first: O(clients with resident memory).

    First clients that do not ask for the GPU, longest idle first; then waiting ones, last in the expected order first.
    """
    switching = gpu.switching.switch.seat if gpu.switching.switch is not None else None
    places = {client: place for place, client in enumerate(gpu.schedule.order)}

    def nearness(seat: Seat) -> tuple[int, int]:
        client = seat.client.client_id
        if seat not in gpu.wait_queue:
            return 0, seat.place.turn
        if seat.place.demoted:
            return 1, -seat.place.turn
        return (3, -places[client]) if client in places else (2, -seat.place.turn)

    for seat in sorted(gpu.memory.evictable.values(), key=nearness):
        if seat is not following and seat is not switching:
            yield orders.eviction_candidate(node, seat)


def fits_beside_overdue(gpu: Gpu, seat: Seat) -> bool:
    """Whether a client may run beside one whose drain is overdue, whose memory cannot move."""
    if seat.client.memory_mode is MemoryMode.MANAGED:
        return True  # pages fault in as there is room
    overdue = (other for other in gpu.leases.by_client.values() if other.phase is OVERDUE)
    stuck = sum(each.memory.resident_bytes for each in overdue if each.client.memory_mode is not MemoryMode.MANAGED)
    wanted = orders.wanted_bytes(seat)
    return not wanted or stuck + wanted <= gpu.memory.capacity_bytes


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
    """Orders what can be ordered now, and ends the switch when it is done or at its deadline."""
    switch = gpu.switching.switch
    if switch is None or switch.done:
        return
    if now_ns >= switch.deadline_ns:
        gpu.memory.statistics.late_switches += 1
        text = f"{gpu.uuid}: memory did not move in time; the next client runs with what is there"
        node.out.append(Log(logging.WARNING, text))
        node.out.append(Notify("late", {"uuid": gpu.uuid, "client": switch.seat.client.client_id}))
        switch.done = switch.late = True
        return
    seat = switch.seat
    if gpu.reconnecting(now_ns) or (
        seat.moves.order is not None and seat.moves.order.evict and seat.moves.order.moving
    ):
        return  # the latter: the eviction began when its turn was far away
    missing = orders.missing_bytes(seat)
    if seat.moves.order is None and (missing == 0 or orders.restore_is_stuck(seat, missing)):
        switch.done = True
        return
    _make_room(node, gpu, seat, missing, now_ns)
    # Its own order may wait for credit for which no client makes room.
    switch.done = not orders.any_moving(gpu)


def _make_room(node: Node, gpu: Gpu, seat: Seat, missing: int, now_ns: int) -> None:
    own = orders.claimed_bytes(seat) - seat.memory.resident_bytes  # promised and under way
    free = orders.room_to_bring_in(gpu)
    free = Room(free.free_bytes + own, free.leaving_bytes)
    plan = plan_switch(missing, eviction_candidates(node, gpu, seat), free)
    orders.evict(node, gpu, plan.evictions, now_ns)
    order = seat.moves.order
    if order is not None and order.evict:
        return  # nothing can come in before this eviction has ended
    if order is not None:
        orders.give_credit(
            node, seat, order, seat.memory.resident_bytes + plan.credit_bytes - order.resident_before, now_ns
        )
    elif plan.credit_bytes > 0 and not orders.restore_is_stuck(seat, plan.credit_bytes):
        orders.restore(node, seat, plan.restore_bytes, plan.credit_bytes, now_ns)


def client_left(node: Node, seat: Seat, now_ns: int) -> None:
    """The seat's client is gone, its memory with it."""
    gpu = seat.gpu
    checks.left(seat)
    seat.memory.reserved_bytes = 0
    orders.set_usage(seat, allocated=0, resident=0, pinned=0, host=0)
    room.remove_seat(seat)
    if gpu.switching.switch is not None and gpu.switching.switch.seat is seat:
        cancel(gpu, now_ns)
    if seat.moves.order is not None:
        orders.end_order(gpu, seat)


def cancel(gpu: Gpu, now_ns: int) -> None:
    """Ends the switch without a grant; orders go on."""
    switch = gpu.switching.switch
    if switch is not None and not switch.fresh:
        ran_ns = gpu.turn_clock_ns(now_ns) - switch.ran_before_ns  # what moves beside work costs no time
        switch_credit.pay(gpu, now_ns - switch.started_ns - ran_ns, now_ns)
    gpu.switching.exposed_closed_ns = gpu.exposed_clock_ns(now_ns)
    gpu.switching.switch = None


def close(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Ends the switch with a grant, and accounts for the time it took."""
    switch = gpu.switching.switch
    assert switch is not None
    cancel(gpu, now_ns)
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
