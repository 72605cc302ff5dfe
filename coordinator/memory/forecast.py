"""What the switch at the end of a turn will have to move, foreseen when the turn begins to matter.

The automatic quantum has to be right in the very first turn: with nothing measured yet, or with figures of programs
that are not there any more, a quantum that is too short costs a move of gigabytes each time.  Everything that it takes
is known: who is next, what that client lacks, and who but the holder could make room for it meanwhile.

Invariant: O(1) while everything fits.

May not go here: how long moving takes (model/switch_cost.py), how long a quantum is (memory/quantum.py).
"""

from __future__ import annotations

from nvshare.coordinator.memory import orders, switching
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.protocol.messages import MemoryMode


def update(node: Node, gpu: Gpu, holder: Seat, now_ns: int) -> None:
    """`holder` has the lease or is about to get it, and somebody waits."""
    cost = gpu.switching.cost
    if gpu.memory.allocated_bytes <= gpu.memory.capacity_bytes and gpu.memory.host_bytes == 0:
        cost.clear_forecasts()
        return
    following = gpu.seats[switching.expected_order(node, gpu, now_ns)[0]]
    missing = orders.missing_bytes(following)
    others = sum(
        seat.memory.resident_bytes - seat.memory.pinned_bytes
        for seat in gpu.seats.values()
        if seat is not holder and seat is not following and seat.client.memory_mode is not MemoryMode.DEVICE
    )
    free = gpu.memory.capacity_bytes - gpu.memory.resident_bytes
    cost.forecast(holder.lease.lease_id or gpu.leases.next_lease_id, missing, max(0, missing - max(0, free) - others))
