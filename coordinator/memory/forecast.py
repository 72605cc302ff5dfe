"""What the switch at the end of a turn will have to move, foreseen when the turn begins to matter.

The automatic quantum has to be right in the very first turn: with nothing measured yet, or with figures of programs
that are not there any more, a quantum that is too short costs a move of gigabytes each time.  Everything that it takes
is known: who is next, what that client lacks, and who but the holder could make room for it meanwhile.

Invariant: O(1) while everything fits.

May not go here: how long moving takes (model/switch_cost.py), how long a quantum is (memory/quantum.py).
"""

from __future__ import annotations

from nvshare.coordinator.memory import orders, switching
from nvshare.coordinator.model.state import Gpu, Node, Seat
from nvshare.coordinator.protocol.messages import MemoryMode


def look(node: Node, gpu: Gpu, holder: Seat, now_ns: int) -> None:
    """`holder` has the lease or is about to get it, and somebody waits."""
    cost = gpu.cost
    if gpu.allocated_bytes <= gpu.capacity_bytes and gpu.host_bytes == 0:
        cost.foresee_nothing()
        return
    following = gpu.seats[switching.in_order(node, gpu, now_ns)[0]]
    missing = orders.missing_bytes(following)
    others = sum(
        seat.resident_bytes - seat.pinned_bytes
        for seat in gpu.seats.values()
        if seat is not holder and seat is not following and seat.client.memory_mode is not MemoryMode.DEVICE
    )
    free = gpu.capacity_bytes - gpu.resident_bytes
    cost.foresee(holder.lease_id or gpu.next_lease_id, missing, max(0, missing - max(0, free) - others))
