"""Room for a client that grows while it holds the lease: others, who do not run, make it.

A client in `swap` mode gives an allocation its physical memory at once while it computes, and asks before it does
(`ReserveMemory`, in bytes that it will have resident).  Where that does not fit, those whose turn is farthest away are
evicted, no more than is missing, and the answer waits for it.

Rules:
- A growth that fits is granted at once; one that cannot be made to fit is refused, which is out of memory there.
- Every question is answered: when there is room, when nobody is left who could make some, or when the lease ends (then
  the client needs no physical memory now, and the next switch brings it in).

May not go here: who is admitted at all (admission.py), what an order's end means (moves.py).
"""

from __future__ import annotations

from coordinator import moves
from coordinator.admission import answer, refuse
from coordinator.state import WITH_LEASE, Gpu, Growth, Node, Seat


def ask(node: Node, seat: Seat, sequence: int, total_bytes: int, now_ns: int) -> None:
    """The holder of a lease wants `total_bytes` resident in all."""
    seat.growth = Growth(sequence, total_bytes)
    seat.gpu.growing[seat.client.client] = seat
    settle(node, seat.gpu, now_ns)


def settle(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Answer whoever can be answered; ask others for room where that is missing."""
    for client, seat in list(gpu.growing.items()) if gpu.growing else ():
        if gpu.seats.get(client) is not seat:  # it is gone
            seat.growth = None
        elif seat.growth is not None:
            _settle(node, gpu, seat, seat.growth, now_ns)
        if seat.growth is None:
            del gpu.growing[client]


def _settle(node: Node, gpu: Gpu, seat: Seat, growth: Growth, now_ns: int) -> None:
    excess = gpu.resident_bytes - seat.resident_bytes + growth.total_bytes - gpu.capacity_bytes
    if excess <= 0 or seat.phase not in WITH_LEASE:
        seat.growth = None
        seat.reserved_bytes = growth.total_bytes
        answer(node, seat, growth.sequence)
    elif not any(order.evict for other in gpu.seats.values() for order in other.orders.values()):
        if growth.tried or not moves.make_room(node, gpu, seat, excess, now_ns):
            seat.growth = None
            seat.reserved_bytes = min(seat.reserved_bytes, seat.resident_bytes)
            refuse(node, seat, growth.sequence, growth.total_bytes, "capacity")
        else:
            growth.tried = True
