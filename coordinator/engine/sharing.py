"""How a GPU is shared: as the operator wants it, and, where memory does not allow that, in turns.

Side by side everybody's memory must be on the GPU at the same time.  So concurrent sharing is in force only while all
of it fits; what grows beyond that is not out of memory, but from then on the clients take turns, in which memory can
move, until everything fits again with some room to spare.

Invariants: `Gpu.sharing` is what is in force and changes here only; exclusive sharing that the operator wants is always
in force.

May not go here: leases (engine/leases.py), what moves (memory/switching.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine import leases
from nvshare.coordinator.memory import orders, switching
from nvshare.coordinator.memory.client_settings import tell_everybody
from nvshare.coordinator.model.commands import Log, Notify
from nvshare.coordinator.model.state import HOLDING, WAITING, Gpu, Node
from nvshare.coordinator.protocol.messages import Sharing

SPARE_SHARE: Final = 16
"""One part in so many of the capacity must be free before clients that took turns run side by side again."""


def settle(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Put in force what is wanted, if memory allows it.  O(1) while nothing grows."""
    wanted = gpu.sharing_wanted
    if wanted is Sharing.CONCURRENT and _crowded(gpu):
        wanted = Sharing.EXCLUSIVE
    if wanted is gpu.sharing:
        return
    gpu.sharing = wanted
    if wanted is Sharing.CONCURRENT:
        _open_to_all(gpu, now_ns)
    else:
        _one_at_a_time(node, gpu, now_ns)
        if gpu.sharing_wanted is Sharing.CONCURRENT:
            text = f"{gpu.uuid}: the clients' memory does not fit side by side; they take turns until it does"
            node.out.append(Log(logging.INFO, text))
    tell_everybody(node, gpu)
    node.out.append(Notify("sharing", {"uuid": gpu.uuid, "sharing": wanted.name.lower()}))


def _crowded(gpu: Gpu) -> bool:
    """What clients have, and what they are asking for, is more than there is.

    While somebody asks, what others may come to have without asking again counts as well: a promise that its client
    does not use ends with its lease, and side by side leases do not end by themselves.
    """
    if gpu.working < 2:
        return False
    room = gpu.capacity_bytes - gpu.allocated_bytes
    for seat in gpu.seats.values() if gpu.growing else ():
        asked = seat.growth.total_bytes if seat.growth is not None else 0
        room -= max(0, asked - seat.allocated_bytes, orders.claimed_bytes(seat) - seat.allocated_bytes)
    return room < (0 if gpu.sharing is Sharing.CONCURRENT else gpu.capacity_bytes // SPARE_SHARE)


def _open_to_all(gpu: Gpu, now_ns: int) -> None:
    gpu.turn_closed_ns = gpu.turn_clock_ns(now_ns)
    gpu.holder = None
    cancel_switch(gpu, now_ns)
    for seat in gpu.leases.values():
        seat.told_waiters = False


def _one_at_a_time(node: Node, gpu: Gpu, now_ns: int) -> None:
    """One holder may stay, several are revoked, and nobody is granted until all have released."""
    holding = [seat for seat in gpu.leases.values() if seat.phase is HOLDING]
    # The holder of an earlier coordinator, who has not come back yet, is at work too.
    if len(gpu.leases) == 1 and holding and not gpu.recovering:
        seat = gpu.holder = holding[0]
        # Its turn begins now, for the others who could run all the time until now.
        gpu.turn_closed_ns -= now_ns - (seat.granted_at_ns or now_ns)
        seat.counted_ns = now_ns
        seat.quantum_ends_ns = now_ns + gpu.quantum_ns
        return
    for seat in holding:
        leases.revoke(node, gpu, seat, "sharing", now_ns)


def cancel_switch(gpu: Gpu, now_ns: int) -> None:
    """The seat for which memory moves goes back to the others who wait."""
    if gpu.switch is None:
        return
    seat = gpu.switch.seat
    switching.cancel(gpu, now_ns)
    seat.enter(WAITING)
    if not seat.client.paused:
        gpu.line.join(seat)
