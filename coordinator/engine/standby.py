"""Wakes the clients that take part in a hand-over shortly before it comes.

A processor that has slept for a millisecond takes up to 150 us to wake, and a hand-over is three messages in a row.  So
shortly before a turn ends its holder is alerted, to hear the revocation at once, and so is the client that will
probably be next.  An alert changes no decision.  There is at most one for each turn, and only while others wait.  A
wrong guess costs its receiver some wake-ups.
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.memory.prefetch import next_seat
from nvshare.coordinator.model.commands import Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol.messages import Standby

LEAD_NS: Final = 1_500_000
"""Time between an alert and the end of the turn.  The shell's timer has a resolution of a millisecond."""
SHORTEST_QUANTUM_NS: Final = 4 * LEAD_NS
"""In a shorter turn no processor falls asleep."""
LONGEST_NS: Final = 20 * MILLISECOND_NS
"""The longest time that a client is asked to stay awake at each turn of another."""


def next_due_ns(seat: Seat) -> int | None:
    """When something is due for a running client while others wait: the alert, then the end of its turn."""
    lease = seat.lease
    return lease.ends_ns if lease.ends_ns is None or _no_alert(seat) else lease.ends_ns - LEAD_NS


def alert_before_end(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Acts once for each turn, shortly before its end."""
    if not len(gpu.wait_queue):
        return
    for client, seat in gpu.leases.running.items():
        end_ns = seat.lease.ends_ns
        if end_ns is not None and end_ns - LEAD_NS <= now_ns < end_ns and not _no_alert(seat):
            node.out.append(Send(client, Standby(seat.ordinal, end_ns - now_ns + MILLISECOND_NS)))
            alert_next(node, gpu, seat, now_ns)


def alert_next(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """Alerts the client that will probably be next, so that it is awake when the seat has drained."""
    following = None if seat.lease.alerted else _following(gpu)
    if following is None:
        return
    seat.lease.alerted = True
    end_ns = now_ns if seat.lease.ends_ns is None else seat.lease.ends_ns
    within_ns = max(0, end_ns - now_ns) + MILLISECOND_NS + 2 * int(gpu.switching.drain_average_ns)
    node.out.append(Send(following.client.client_id, Standby(following.ordinal, min(LONGEST_NS, within_ns))))


def _following(gpu: Gpu) -> Seat | None:
    """The member that waits for a lease to end, else the next client in turn."""
    members = (gpu.seats[client] for client in gpu.schedule.members if client in gpu.seats)
    return next((seat for seat in members if seat in gpu.wait_queue), None) or next_seat(gpu)


def _no_alert(seat: Seat) -> bool:
    lease = seat.lease
    return lease.alerted or lease.ends_ns is None or lease.ends_ns - lease.began_ns < SHORTEST_QUANTUM_NS
