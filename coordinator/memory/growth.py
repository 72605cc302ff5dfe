"""Room for a client that grows while it holds the lease: others, who do not run, make it.

A client in `swap` mode gives an allocation its physical memory at once while it computes, and asks before it does
(`ReserveMemory`, in bytes that it will have resident).  Where that does not fit, those whose turn is farthest away are
evicted, no more than is missing, and the answer waits for it.

Rules:
- A growth that fits is granted at once; one that cannot be made to fit is refused, which is out of memory there.
- It goes before whatever is brought in ahead of time: nothing more of that is ordered meanwhile, and what has come is
  evicted again if there is nothing farther away.
- Every question is answered: when there is room, when nobody is left who could make some, when others have not moved
  by the deadline, or when the lease ends (then the client needs no physical memory now, and the next switch brings it
  in).

May not go here: who is admitted at all (memory/admission.py), what an order's end means (memory/orders.py).
"""

from __future__ import annotations

from nvshare.coordinator.memory import orders, switching
from nvshare.coordinator.memory.admission import answer, refuse
from nvshare.coordinator.memory.planner import evictions
from nvshare.coordinator.model.state import REVOKING, WITH_LEASE, Gpu, Growth, Node, Seat


def ask(node: Node, seat: Seat, sequence: int, total_bytes: int, now_ns: int) -> None:
    """The holder of a lease wants `total_bytes` resident in all.  Answered by `settle`."""
    seat.growth = Growth(sequence, total_bytes, now_ns + node.settings.move_deadline_ns)
    seat.gpu.growing[seat.client.client] = seat


def settle(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Answer whoever can be answered; ask others for room where that is missing."""
    for client, seat in list(gpu.growing.items()) if gpu.growing else ():
        if gpu.seats.get(client) is not seat:  # it is gone
            seat.growth = None
        elif seat.growth is not None:
            _settle(node, gpu, seat, seat.growth, now_ns)
        if seat.growth is None:
            del gpu.growing[client]


def _turns_begin(gpu: Gpu) -> bool:
    """Clients that ran side by side are giving their leases back, because memory does not fit: then it can move."""
    if gpu.sharing_wanted is gpu.sharing:
        return False
    return any(seat.phase is REVOKING for seat in gpu.leases.values())


def _settle(node: Node, gpu: Gpu, seat: Seat, growth: Growth, now_ns: int) -> None:
    room = orders.free_room(gpu)
    lacking = growth.total_bytes - orders.claimed_bytes(seat) - room.free_bytes
    if seat.phase not in WITH_LEASE or lacking <= 0:
        seat.growth = None
        seat.reserved_bytes = growth.total_bytes
        answer(node, seat, growth.sequence)
        return
    more = evictions(lacking - room.leaving_bytes, switching.farthest_first(node, gpu, seat, now_ns))
    if sum(order.bytes for order in more) >= lacking - room.leaving_bytes:
        orders.evict(node, gpu, more, now_ns)
    if now_ns >= growth.deadline_ns or not (orders.under_way(gpu) or _turns_begin(gpu)):
        seat.growth = None
        seat.fit.refused = True
        seat.reserved_bytes = min(seat.reserved_bytes, seat.resident_bytes)
        refuse(node, seat, growth.sequence, growth.total_bytes, "capacity")
