"""Checks of reported memory: a client counts with at most what the driver's figures say.

A client could report memory that it does not have, and others would find no room.  So when a client reports clearly
more than was ever confirmed, the shell reads the driver's figures (NVML).

Rules:
- A process has at most what the driver lists it with, and the used memory that no listed process has: processes in
  other PID namespaces and under WDDM or MPS are not listed, nor are managed pages.
- Memory reported between question and answer counts too.
- A client's claim is false if two checks in a row say so, because a report may be under way.  While the client waits
  for an answer (memory/admission.py), its hook counts what it has asked for already: then it takes `PATIENT_CHECKS`.
- From then on its reports raise nothing before a check.
- Nor does the memory with which a client attaches, once a client of its user has left before its own was checked:
  else a program that connects again and again is never checked.
- The exports of an ended process count as before until a check that was asked for after its end.  From then on the part
  that other processes hold counts: the card uses it, and no client has it.
- Clients in mode `managed` are not checked: the driver moves their memory, so no other client lacks room by it
  (memory/admission.py).

Non-goals: reservations, for which there is room when they are granted (memory/admission.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from nvshare.coordinator.memory import claims
from nvshare.coordinator.model.commands import CheckMemory, Log
from nvshare.coordinator.model.events import MemoryChecked
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.units import format_size

STEPS: Final = 32
"""A report is checked if it exceeds what was confirmed by more than capacity / 32."""

CHECKS: Final = 2
PATIENT_CHECKS: Final = 40
"""The shell makes four in a second."""


def reported(node: Node, seat: Seat, resident_bytes: int) -> None:
    """A client has reported its resident memory."""
    seat.memory.check.reported_bytes = resident_bytes
    if _is_due(seat):
        ask(node, seat.gpu)


def attached(node: Node, seat: Seat, resident_bytes: int) -> None:
    """A client has come, perhaps with memory: it has connected again."""
    reported(node, seat, resident_bytes)
    if seat.client.identity.user_id in seat.gpu.memory.unproven and _is_due(seat):
        _count(seat, 0)


def left(seat: Seat) -> None:
    """The client goes."""
    if seat.gpu.memory.answered and _is_due(seat):
        seat.gpu.memory.unproven.add(seat.client.identity.user_id)


def _claim(seat: Seat) -> int:
    memory = seat.memory
    return memory.resident_bytes if memory.check.most_bytes is None else memory.check.reported_bytes


def _is_due(seat: Seat) -> bool:
    if seat.client.memory_mode is MemoryMode.MANAGED:
        return False
    capacity = seat.gpu.memory.capacity_bytes
    return min(_claim(seat), capacity) > seat.memory.check.confirmed_bytes + capacity // STEPS


def ask(node: Node, gpu: Gpu) -> None:
    """Has the driver's figures read, unless they are on their way."""
    if gpu.memory.checking:
        return
    gpu.memory.checking = True
    for each in gpu.memory.immovable.ending.values():
        each.asked = each.ended
    for seat in gpu.seats.values():
        seat.memory.check.asked_bytes = _claim(seat)
    node.out.append(CheckMemory(gpu.uuid))


def process_ended(node: Node, gpu: Gpu, process_id: int) -> bool:
    """The process of a client that is gone has ended.  Returns whether it had memory on this GPU."""
    ending = gpu.memory.immovable.ending.pop(process_id, None)
    if ending is not None and ending.exported_bytes:
        gpu.memory.immovable.ending[process_id] = replace(ending, bytes=ending.exported_bytes, ended=True)
        ask(node, gpu)
    return ending is not None


def checked(node: Node, event: MemoryChecked, now_ns: int) -> Iterable[Gpu]:
    """The driver's figures have come."""
    gpu = node.gpus[event.uuid]
    ending = gpu.memory.immovable.ending
    gpu.memory.checking, gpu.memory.answered = False, True
    for process_id in [process_id for process_id, each in ending.items() if each.asked]:
        del ending[process_id]
    again = any(each.ended for each in ending.values())
    used_bytes = sum(event.by_process.values()) + event.unlisted_bytes
    if used_bytes <= gpu.memory.total_bytes:  # else NVML does not say
        gpu.memory.other_bytes = max(0, used_bytes - gpu.memory.resident_bytes - claims.ending_bytes(gpu))
        gpu.memory.checked_at_ns = now_ns
    for seat in gpu.seats.values():
        if seat.client.memory_mode is not MemoryMode.MANAGED:
            listed = event.by_process.get(str(seat.client.identity.process_id), 0)
            _compare(node, seat, listed + event.unlisted_bytes)
            check = seat.memory.check
            again = again or check.doubts > 0 or (_is_due(seat) and _claim(seat) > check.asked_bytes)
    if again:
        ask(node, gpu)
    return (gpu,)


def _compare(node: Node, seat: Seat, has_bytes: int) -> None:
    memory, check, claim = seat.memory, seat.memory.check, min(_claim(seat), seat.memory.check.asked_bytes)
    if check.most_bytes == 0 and not claim:
        return  # it claimed nothing when the figures were asked for
    check.confirmed_bytes = max(check.confirmed_bytes, min(claim, has_bytes))
    if check.most_bytes is None:
        moving = seat.moves.move is not None and seat.moves.move.moving
        check.doubts = check.doubts + 1 if claim > has_bytes and not moving else 0
        if check.doubts < (CHECKS if memory.growth is None else PATIENT_CHECKS):
            return
        check.doubts = 0
        text = f"reports {format_size(claim)} on the GPU and has at most {format_size(has_bytes)}"
        text = f"{seat.gpu.uuid}: {seat.client.identity} {text}, by the driver's figures"
        if not seat.client.parking.closed:  # else it has said what it will have again
            node.out.append(Log(logging.WARNING, text))
    proven = check.most_bytes == 0 and claim <= has_bytes  # nothing of it counted before
    most_bytes = max(check.confirmed_bytes, has_bytes) + max(0, check.reported_bytes - check.asked_bytes)
    _count(seat, most_bytes)
    if proven:
        check.most_bytes = None


def _count(seat: Seat, most_bytes: int) -> None:
    """Of its reports no more than this counts until the next check."""
    memory = seat.memory
    memory.check.most_bytes = most_bytes
    memory.reserved_bytes = min(memory.reserved_bytes, most_bytes)
    claims.set_usage(
        seat,
        allocated=memory.allocated_bytes,
        resident=memory.check.reported_bytes,
        pinned=memory.pinned_bytes,
        host=memory.host_bytes,
    )
