"""Wakes the clients that take part in a hand-over shortly before it comes.

A processor that has slept for a millisecond takes up to 150 us to wake, and a hand-over is three messages in a row.  So
shortly before a quantum ends its holder is alerted, to hear the revocation at once, and so is the client that will
probably be next.  An alert changes no decision.  There is at most one for each lease, and only while others wait.  A
wrong guess costs its receiver some wake-ups.
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.model.commands import Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol.messages import Sharing, Standby

LEAD_NS: Final = 1_500_000
"""Time between an alert and the end of the quantum.  The shell's timer has a resolution of a millisecond."""
SHORTEST_QUANTUM_NS: Final = 4 * LEAD_NS
"""In a shorter quantum no processor falls asleep."""
LONGEST_NS: Final = 20 * MILLISECOND_NS
"""The longest time that a client is asked to stay awake at each turn of another."""


def next_due_ns(holder: Seat) -> int:
    """When something is due for a holder for whom others wait: the alert, then the end of its quantum."""
    end_ns = holder.lease.quantum_ends_ns
    return end_ns if _no_alert(holder) else end_ns - LEAD_NS


def alert_before_end(node: Node, gpu: Gpu, holder: Seat, now_ns: int) -> None:
    """Called while others wait.  Acts once for each lease, shortly before its quantum ends."""
    end_ns = holder.lease.quantum_ends_ns
    if _no_alert(holder) or not end_ns - LEAD_NS <= now_ns < end_ns:
        return
    node.out.append(Send(holder.client.client_id, Standby(holder.ordinal, end_ns - now_ns + MILLISECOND_NS)))
    alert_next(node, gpu, holder, now_ns)


def alert_next(node: Node, gpu: Gpu, holder: Seat, now_ns: int) -> None:
    """Alerts the client that will probably be next, so that it is awake when the holder has drained."""
    waiting = gpu.wait_queue.views()
    if holder.lease.alerted or not waiting or gpu.rules.sharing is Sharing.CONCURRENT:
        return
    holder.lease.alerted = True
    gang = gpu.gangs.reserved_for
    member = (
        None if gang is None else next((seat for seat in gpu.wait_queue.seats() if seat.gang_turn.gang is gang), None)
    )
    following = member or gpu.seats[gpu.policy_guard.expected(waiting, gpu.view(), now_ns, node.out)]
    until_end_ns = max(0, holder.lease.quantum_ends_ns - now_ns)
    within_ns = min(LONGEST_NS, until_end_ns + MILLISECOND_NS + 2 * int(gpu.switching.drain_average_ns))
    node.out.append(Send(following.client.client_id, Standby(following.ordinal, within_ns)))


def _no_alert(holder: Seat) -> bool:
    granted_at_ns = holder.lease.granted_at_ns or 0
    return holder.lease.alerted or holder.lease.quantum_ends_ns - granted_at_ns < SHORTEST_QUANTUM_NS
