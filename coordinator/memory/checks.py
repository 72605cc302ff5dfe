"""Checks of reported memory: a client counts with at most what the driver's figures say.

A client could report memory that it does not have, and others would find no room.  So when a client reports clearly
more than was ever confirmed, the shell reads the driver's figures (NVML).

Rules:
- A process that the driver lists has at most what it is listed with.  One that is not listed (another PID namespace,
  WDDM, MPS, no context) has at most the used memory that no listed process has.
- Memory reported between question and answer counts too.
- A client's claim is false if two checks in a row say so.  From then on its reports raise nothing before a check.
- Managed memory is not checked, because the driver's figures lack it.  It makes no other client lack room
  (memory/admission.py).

Non-goals: reservations, for which there is room when they are granted (memory/admission.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from nvshare.coordinator.memory import orders, room
from nvshare.coordinator.model.commands import CheckMemory, Log
from nvshare.coordinator.model.events import MemoryChecked
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.units import format_size

STEPS: Final = 32
"""A report is checked if it exceeds what was confirmed by more than capacity / 32."""


def reported(node: Node, seat: Seat, resident_bytes: int) -> None:
    """A client has reported its resident memory."""
    seat.memory.check.reported_bytes = resident_bytes
    if _is_due(seat) and not seat.gpu.memory.checking:
        _ask(node, seat.gpu)


def _claim(seat: Seat) -> int:
    memory = seat.memory
    return memory.resident_bytes if memory.check.most_bytes is None else memory.check.reported_bytes


def _is_due(seat: Seat) -> bool:
    if seat.client.memory_mode is MemoryMode.MANAGED:
        return False
    capacity = seat.gpu.memory.capacity_bytes
    return min(_claim(seat), capacity) > seat.memory.check.confirmed_bytes + capacity // STEPS


def _ask(node: Node, gpu: Gpu) -> None:
    gpu.memory.checking = True
    for seat in gpu.seats.values():
        seat.memory.check.asked_bytes = _claim(seat)
    node.out.append(CheckMemory(gpu.uuid))


def checked(node: Node, event: MemoryChecked) -> Iterable[Gpu]:
    """The driver's figures have come."""
    gpu, again = node.gpus[event.uuid], False
    gpu.memory.checking = False
    for seat in gpu.seats.values():
        if seat.client.memory_mode is not MemoryMode.MANAGED:
            has = event.by_process.get(str(seat.client.identity.process_id), event.unlisted_bytes)
            _compare(node, seat, has)
            check = seat.memory.check
            again = again or check.doubted or (_is_due(seat) and _claim(seat) > check.asked_bytes)
    if again:
        _ask(node, gpu)
    return (gpu,)


def _compare(node: Node, seat: Seat, has_bytes: int) -> None:
    memory, check, claim = seat.memory, seat.memory.check, min(_claim(seat), seat.memory.check.asked_bytes)
    check.confirmed_bytes = max(check.confirmed_bytes, min(claim, has_bytes))
    if check.most_bytes is None:
        moving = seat.moves.order is not None and seat.moves.order.moving
        before, check.doubted = check.doubted, claim > has_bytes and not moving
        if not (before and check.doubted):
            return
        check.doubted = False
        text = f"reports {format_size(claim)} on the GPU and counts with {format_size(has_bytes)}"
        text = f"{seat.gpu.uuid}: {seat.client.identity} {text}, the driver's figure (which lacks managed memory)"
        node.out.append(Log(logging.WARNING, text))
    check.most_bytes = max(check.confirmed_bytes, has_bytes) + max(0, check.reported_bytes - check.asked_bytes)
    orders.set_usage(
        seat,
        allocated=memory.allocated_bytes,
        resident=check.reported_bytes,
        pinned=memory.pinned_bytes,
        host=memory.host_bytes,
    )
    memory.reserved_bytes = min(memory.reserved_bytes, check.most_bytes)
    orders.claim(seat)
    room.update(seat)
