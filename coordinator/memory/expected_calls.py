"""When a gang will be co-scheduled on a GPU before the policy there chooses one of its members.

A gang's turn begins with the turn of any of its GPUs, so on the others its member runs earlier than the policy
foresees.  Its memory is brought in next, and evicted last.  Asked only where memory is short.  A wrong guess costs
bytes that move twice, never a turn.

Non-goals: whether a gang may have its GPUs (gangs/coscheduling.py), which bytes move (memory/planner.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, Seat
from nvshare.coordinator.protocol.messages import Sharing

if TYPE_CHECKING:
    from nvshare.coordinator.model.gang import Gang


@dataclass(frozen=True, slots=True)
class Call:
    """This member will probably be next on its GPU, at that time or later."""

    seat: Seat
    at_ns: int


def next_call(node: Node, gpu: Gpu, now_ns: int) -> Call | None:
    """The first co-scheduled turn that begins before the present turn is over.  None: the policy's order holds."""
    holder = gpu.leases.holder
    if (
        not node.gangs
        or holder is None
        or holder.phase is not HOLDING
        or holder.gang_turn.co_scheduled_at_ns is not None
    ):
        return None  # a co-scheduled turn is followed by one of the policy
    best: Call | None = None
    seen: set[str] = set()
    for seat in gpu.wait_queue.seats():
        gang = seat.gang_turn.gang
        if gang is None or gang is holder.gang_turn.gang or gang.name in seen or seat.place.demoted:
            continue
        seen.add(gang.name)
        at_ns = _begins_at_ns(node, gang, gpu, now_ns)
        if at_ns is not None and at_ns <= holder.lease.quantum_ends_ns and (best is None or at_ns < best.at_ns):
            best = Call(seat, at_ns)
    return best


def _begins_at_ns(node: Node, gang: Gang, here: Gpu, now_ns: int) -> int | None:
    """When the gang's turn comes on one of its other GPUs, and uninterruptible turns there are over."""
    come_ns = None if gang.pending_since_ns is None else now_ns
    free_ns = now_ns
    for gpu in {seat.gpu.uuid: seat.gpu for seat in gang.seats if seat in seat.gpu.wait_queue}.values():
        holder = gpu.leases.holder
        if gpu.rules.sharing is not Sharing.EXCLUSIVE or holder is None or holder.phase is not HOLDING:
            continue
        if holder.gang_turn.protected_from_gangs or holder.gang_turn.co_scheduled_at_ns is not None:
            free_ns = max(free_ns, holder.lease.quantum_ends_ns)
        waiting = gpu.wait_queue.views()
        if gpu is here or not waiting:
            continue
        if gpu.seats[gpu.policy_guard.expected(waiting, gpu.view(), now_ns, node.out)].gang_turn.gang is gang:
            end_ns = max(now_ns, holder.lease.quantum_ends_ns)
            come_ns = end_ns if come_ns is None else min(come_ns, end_ns)
    return None if come_ns is None else max(come_ns, free_ns)
