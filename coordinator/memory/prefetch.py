"""What moves while a client computes: room for a client that grows, and memory of the next client.

Rules:
- Memory is brought in only with one holder at a time and others waiting, and not while a client waits for room.
- The next client in the policy's order is brought in, or one that is co-scheduled before it (expected_calls.py).
- Where free memory is not enough, clients farthest away are evicted, no more than the next client lacks; and only if
  all of it can move before the holder's turn ends, at the measured speed of this GPU.
- Moves go in pieces of `PIECE_BYTES`, each an order of its own.  When the order of turns changes, no further piece is
  ordered.
- Nothing moves in the first second after a restart, while clients may be missing whose memory is on the GPU.

Non-goals: which bytes (memory/planner.py), what is needed before a grant (memory/switching.py).
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.memory import admission, client_settings, expected_calls, orders, switching
from nvshare.coordinator.memory.planner import plan_ahead
from nvshare.coordinator.memory.quantum import move_rate
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING
from nvshare.coordinator.protocol.messages import Sharing

PIECE_BYTES: Final = 512 << 20
"""10 ms of the link: the longest that a change of the order of turns waits."""


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Orders what is due.  O(1) while everything fits."""
    client_settings.send_overflow(node, gpu)
    fits = gpu.memory.allocated_bytes <= gpu.memory.capacity_bytes
    if fits and gpu.memory.host_bytes == 0 and not gpu.memory.growing:
        return
    if gpu.reconnecting(now_ns):
        return
    admission.answer_growth(node, gpu, now_ns)
    if gpu.switching.switch is None and not gpu.memory.growing and gpu.rules.sharing is Sharing.EXCLUSIVE:
        _bring_next(node, gpu, now_ns)


def _bring_next(node: Node, gpu: Gpu, now_ns: int) -> None:
    holder = gpu.leases.holder
    if holder is None or not len(gpu.wait_queue):
        return
    seat = gpu.seats[switching.expected_order(node, gpu, now_ns)[0]]
    missing = orders.missing_bytes(seat)
    if (
        missing == 0
        or orders.restore_is_stuck(seat, missing)
        or (seat.moves.order is not None and seat.moves.order.evict)
    ):
        return
    missing -= orders.claimed_bytes(seat) - seat.memory.resident_bytes  # promised and under way
    left_ns = holder.lease.quantum_ends_ns - now_ns if holder.phase is HOLDING else 0
    call = expected_calls.next_call(node, gpu, now_ns)
    if call is not None:
        left_ns = min(left_ns, call.at_ns - now_ns)
    plan = plan_ahead(
        missing,
        switching.eviction_candidates(node, gpu, seat, now_ns),
        orders.free_room(gpu),
        piece_bytes=PIECE_BYTES,
        affordable_bytes=int(max(0, left_ns) * move_rate(gpu)),
    )
    orders.evict(node, gpu, plan.evictions, now_ns)
    if plan.restore_bytes > 0 and seat.moves.order is None and not orders.restore_is_stuck(seat, plan.credit_bytes):
        orders.restore(node, seat, plan.restore_bytes, plan.credit_bytes, now_ns)
