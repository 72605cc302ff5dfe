"""Looks at the driver's figures (NVML): which memory counts that a client reports and was not promised.

A client could report memory that it does not have, and others would find no room.  So a report counts up to what was
promised (claims.py), and beyond that up to what the newest look shows.

The shell looks when a client reports more than that, and when it has clearly more than at any look before: then its
contexts have grown too, which nobody reports.

Rules:
- A process has at most what the driver lists it with, and the used memory that no listed process has: processes in
  other PID namespaces and under WDDM or MPS are not listed, nor are managed pages.
- The first look is made when the coordinator starts, so it bounds the clients of an earlier one too.
- A client that connects again counts with what it had as its earlier connection ended.
- A client that is parked, or hangs instead of moving its memory, counts with what the figures show, whatever it was
  promised.
- The exports of an ended process count as before until a look that was asked for after its end.  From then on the part
  that other processes hold counts: the card uses it, and no client has it.
- Clients in mode `managed` are not looked at: the driver moves their memory, so no other client lacks room by it
  (admission.py).

Non-goals: reservations, for which there is room when they are granted (admission.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from nvshare.coordinator.engine.memory import claims
from nvshare.coordinator.model.client import ParkState
from nvshare.coordinator.model.commands import CheckMemory, Log
from nvshare.coordinator.model.events import MemoryChecked
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.units import format_size

STEPS: Final = 32
"""A report is clearly more by capacity / 32: a reason for a look, and for a line in the log."""


def reported(node: Node, seat: Seat) -> None:
    """A client has come, or has said what it has."""
    memory, gpu = seat.memory, seat.gpu
    if memory.unconfirmed_bytes or memory.resident_bytes > memory.looked_bytes + gpu.memory.capacity_bytes // STEPS:
        ask(node, gpu)


def ask(node: Node, gpu: Gpu) -> None:
    """Has the driver's figures read, and once more if they are on their way: these may be too old."""
    memory = gpu.memory
    if memory.looking is not None:
        memory.look_again = True
        return
    memory.looking = {c: s.memory.reported[1] for c, s in gpu.seats.items() if s.memory.unconfirmed_bytes}
    for each in memory.immovable.ending.values():
        each.asked = each.ended
    node.out.append(CheckMemory(gpu.uuid))


def process_ended(node: Node, gpu: Gpu, process_id: int) -> bool:
    """The process of a client that is gone has ended.  Returns whether it had memory on this GPU."""
    gpu.memory.listed.pop(str(process_id), None)
    ending = gpu.memory.immovable.ending.pop(process_id, None)
    if ending is not None and ending.exported_bytes:
        gpu.memory.immovable.ending[process_id] = replace(ending, bytes=ending.exported_bytes, ended=True)
        ask(node, gpu)
    return ending is not None


def checked(node: Node, event: MemoryChecked, now_ns: int) -> None:
    """The driver's figures have come."""
    gpu = node.gpus[event.uuid]
    memory, ending = gpu.memory, gpu.memory.immovable.ending
    said, memory.looking = memory.looking or {}, None
    for process_id in [process_id for process_id, each in ending.items() if each.asked]:
        del ending[process_id]
    if event.unlisted_bytes <= memory.total_bytes:  # else NVML does not say
        memory.listed, memory.unlisted_bytes = dict(event.by_process), event.unlisted_bytes
    for client, seat in gpu.seats.items():
        _count(node, seat, said.get(client, 0))
    used_bytes = sum(event.by_process.values()) + event.unlisted_bytes
    if used_bytes <= memory.total_bytes and gpu.seats and not gpu.reconnecting(now_ns):  # else some of it is clients'
        memory.other_bytes = max(0, used_bytes - memory.resident_bytes - claims.ending_bytes(gpu))
        memory.checked_at_ns = now_ns
    if memory.look_again:
        memory.look_again = False
        ask(node, gpu)
    node.concern(gpu)


def _count(node: Node, seat: Seat, said_bytes: int) -> None:
    """Counts the client by the new figures; `said_bytes`: its report as they were asked for, if it was in doubt."""
    memory, move, shown = seat.memory, seat.moves.move, claims.shown_bytes(seat)
    parked = seat.client.parking.state is ParkState.PARKED
    if parked or (move is not None and move.stalled):
        memory.reserved_bytes = min(memory.reserved_bytes, shown)
        claims.set_usage(seat, *memory.reported, most=shown)
    elif memory.unconfirmed_bytes:
        claims.set_usage(seat, *memory.reported)
    memory.looked_bytes = max(memory.looked_bytes, memory.resident_bytes)
    more = min(said_bytes - shown, memory.unconfirmed_bytes) > seat.gpu.memory.capacity_bytes // STEPS
    if more and not (parked or memory.accused or memory.growth is not None):
        memory.accused = True
        text = f"{seat.gpu.uuid}: {seat.client.identity} reports {format_size(said_bytes)} on the GPU"
        text = f"{text} and has at most {format_size(shown)}, by the driver's figures"
        node.out.append(Log(logging.WARNING, text))
