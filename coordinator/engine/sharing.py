"""How a GPU is shared: concurrently as long as memory allows it, otherwise in turns.

Concurrent clients need all of their memory on the GPU at the same time.  So concurrent sharing is in force only while
all of it fits.  When memory grows beyond that, clients take turns, in which memory can move, until everything fits
again with some room to spare.  Exclusive sharing is always in force when the operator wants it.

Non-goals: leases (leases.py), what moves (memory/switching.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine import leases
from nvshare.coordinator.memory import orders, switching
from nvshare.coordinator.memory.client_settings import send_settings_to_all
from nvshare.coordinator.model.commands import Log, Notify
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, WAITING
from nvshare.coordinator.protocol.messages import Sharing

SPARE_SHARE: Final = 16
"""Clients run concurrently again once capacity / 16 is free."""


def update(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Puts in force what is wanted, if memory allows it.  O(1) while nothing grows."""
    wanted = gpu.rules.sharing_wanted
    if wanted is Sharing.CONCURRENT and _oversubscribed(gpu):
        wanted = Sharing.EXCLUSIVE
    if wanted is gpu.rules.sharing:
        return
    gpu.rules.sharing = wanted
    if wanted is Sharing.CONCURRENT:
        _start_concurrent(gpu, now_ns)
    else:
        _start_exclusive(node, gpu, now_ns)
        if gpu.rules.sharing_wanted is Sharing.CONCURRENT:
            text = f"{gpu.uuid}: the clients' memory does not fit side by side; they take turns until it does"
            node.out.append(Log(logging.INFO, text))
    send_settings_to_all(node, gpu)
    node.out.append(Notify("sharing", {"uuid": gpu.uuid, "sharing": wanted.name.lower()}))


def _oversubscribed(gpu: Gpu) -> bool:
    """What clients have, and what they are asking for, exceeds the capacity.

    While a client asks, promises to others count as well: an unused promise ends with its lease, and concurrent leases
    do not end by themselves.
    """
    if gpu.leases.active_seats < 2:
        return False
    room = gpu.memory.capacity_bytes - gpu.memory.allocated_bytes
    for seat in gpu.seats.values() if gpu.memory.growing else ():
        asked = seat.memory.growth.total_bytes if seat.memory.growth is not None else 0
        room -= max(0, asked - seat.memory.allocated_bytes, orders.claimed_bytes(seat) - seat.memory.allocated_bytes)
    return room < (0 if gpu.rules.sharing is Sharing.CONCURRENT else gpu.memory.capacity_bytes // SPARE_SHARE)


def _start_concurrent(gpu: Gpu, now_ns: int) -> None:
    gpu.leases.turns_closed_ns = gpu.turn_clock_ns(now_ns)
    gpu.leases.holder = None
    cancel_switch(gpu, now_ns)
    for seat in gpu.leases.by_client.values():
        seat.lease.waiters_sent = False


def _start_exclusive(node: Node, gpu: Gpu, now_ns: int) -> None:
    """A single holder may stay.  Several are revoked, and no lease is granted until all have released."""
    holding = [seat for seat in gpu.leases.by_client.values() if seat.phase is HOLDING]
    # A holder of an earlier coordinator that has not come back yet is at work too.
    if len(gpu.leases.by_client) == 1 and holding and not gpu.recovering:
        seat = gpu.leases.holder = holding[0]
        # Its turn begins now: until now the others could run too.
        gpu.leases.turns_closed_ns -= now_ns - (seat.lease.granted_at_ns or now_ns)
        seat.gang_turn.accounted_until_ns = now_ns
        seat.lease.begin_quantum(now_ns, gpu.rules.quantum_ns)
        return
    for seat in holding:
        leases.revoke(node, gpu, seat, "sharing", now_ns)


def cancel_switch(gpu: Gpu, now_ns: int) -> None:
    """Cancels the switch and requeues its client."""
    if gpu.switching.switch is None:
        return
    seat = gpu.switching.switch.seat
    switching.cancel(gpu, now_ns)
    seat.enter(WAITING)
    if not seat.client.paused:
        gpu.wait_queue.join(seat)
