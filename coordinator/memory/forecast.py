"""Forecast of the memory that the switch at the end of a turn will move.

The automatic quantum must be right in the first turn, with nothing measured: a quantum that is too short costs a move
of gigabytes each time.  The prediction needs the next client, what it lacks, and what others than the holder can give.

Non-goals: how long moving takes (model/switch_cost.py), how long a quantum is (memory/quantum.py).
"""

from __future__ import annotations

from nvshare.coordinator.memory import orders
from nvshare.coordinator.memory.prefetch import next_seat
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.protocol.messages import MemoryMode


def update(node: Node, gpu: Gpu, holder: Seat) -> None:
    """`holder` has the lease or is about to get it, and others wait.  O(1) while everything fits."""
    cost = gpu.switching.cost
    if not gpu.memory_short and gpu.memory.host_bytes == 0:
        cost.clear_forecasts()
        return
    following = next_seat(gpu)
    if following is None:
        return
    missing = orders.missing_bytes(following)
    others = sum(
        seat.memory.resident_bytes - seat.memory.pinned_bytes
        for seat in gpu.memory.evictable.values()
        if seat is not holder and seat is not following and seat.client.memory_mode is not MemoryMode.DEVICE
    )
    free = gpu.memory.capacity_bytes - gpu.memory.resident_bytes
    cost.forecast(holder.lease.lease_id or gpu.leases.next_lease_id, missing, max(0, missing - max(0, free) - others))
