"""Moves while a client computes: room for a client that grows, and memory of the next client.

Rules:
- Memory is brought in only while a turn goes on and others wait, and not while a client waits for room.
- The next client in the plan's order is brought in.
- Where free memory is not enough, clients farthest away are evicted, no more than the next client lacks; and only if
  all of it can move before the holder's turn ends, at the measured speed of this GPU.
- Moves go in pieces of `PIECE_BYTES`, each an order of its own.  When the order of turns changes, no further piece is
  ordered.
- Nothing moves in the first second after a restart, while clients may be missing whose memory is on the GPU.

Non-goals: which bytes (memory/planner.py), what is needed before a grant (memory/switching.py).
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.memory import admission, client_settings, orders, switching
from nvshare.coordinator.memory.planner import plan_ahead
from nvshare.coordinator.memory.quantum import move_rate
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat

PIECE_BYTES: Final = 512 << 20
"""10 ms of the link: the longest that a change of the order of turns waits."""


def next_seat(gpu: Gpu) -> Seat | None:
    """The waiting client that will probably be granted next: the first one of the plan's order."""
    schedule = gpu.schedule
    for client in schedule.order:
        seat = gpu.seats.get(client)
        if seat is not None and client not in schedule.members and seat in gpu.wait_queue:
            return seat
    return next((gpu.seats[job.client] for job in gpu.wait_queue.views() if job.client not in schedule.members), None)


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Orders what is due.  O(1) while everything fits."""
    client_settings.send_overflow(node, gpu)
    if not gpu.memory_short and gpu.memory.host_bytes == 0 and not gpu.memory.growing:
        return
    if gpu.reconnecting(now_ns):
        return
    admission.answer_growth(node, gpu, now_ns)
    if gpu.switching.switch is None and not gpu.memory.growing:
        _bring_next(node, gpu, now_ns)


def _bring_next(node: Node, gpu: Gpu, now_ns: int) -> None:
    ends = [seat.lease.ends_ns for seat in gpu.leases.by_client.values() if seat.lease.ends_ns is not None]
    seat = next_seat(gpu) if ends else None
    if seat is None:
        return
    missing = orders.missing_bytes(seat)
    if (
        missing == 0
        or orders.restore_is_stuck(seat, missing)
        or (seat.moves.order is not None and seat.moves.order.evict)
    ):
        return
    missing -= orders.claimed_bytes(seat) - seat.memory.resident_bytes  # promised and under way
    running = bool(gpu.leases.running)
    plan = plan_ahead(
        missing,
        switching.eviction_candidates(node, gpu, seat),
        orders.room_to_bring_in(gpu),
        piece_bytes=PIECE_BYTES,
        affordable_bytes=int(max(0, min(ends) - now_ns if running else 0) * move_rate(gpu)),
    )
    orders.evict(node, gpu, plan.evictions, now_ns)
    if plan.restore_bytes > 0 and seat.moves.order is None and not orders.restore_is_stuck(seat, plan.credit_bytes):
        orders.restore(node, seat, plan.restore_bytes, plan.credit_bytes, now_ns)
