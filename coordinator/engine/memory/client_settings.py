"""Settings of a GPU for one client, sent only when a value has changed.

Non-goals: changing a setting (engine/operator_commands.py).
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.engine.memory import room
from nvshare.coordinator.engine.memory.quantum import idle_release_ns
from nvshare.coordinator.model.client import ParkState
from nvshare.coordinator.model.commands import Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Contention, Seat
from nvshare.coordinator.model.settings import Sharing
from nvshare.coordinator.protocol.messages import GpuSettings, MemoryMode

COMPANION_FACTOR: Final = 8
"""Gang members get a longer idle timeout, by this factor."""
PREPARE_STEP_BYTES: Final = 64 << 20
"""Granularity of the host memory that clients are told to have ready: each change is a message."""


def _idle_release_ns(node: Node, seat: Seat) -> int:
    """Longest idle time of this holder.

    Gang members get longer: a member that waits for another one keeps the common turn.
    """
    usual_ns = idle_release_ns(seat.gpu, node)
    gang = node.gangs.get(seat.client.facts.gang)
    if gang is None or len(gang.seats) < 2:
        return usual_ns
    return max(usual_ns, COMPANION_FACTOR * node.settings.idle_release_ns)


def _pacing_budget_ns(node: Node, seat: Seat) -> int:
    """0: only the coarse bound of a program that is alone, or whose last turn nobody wanted.

    A member without a turn need not end its work in time.
    """
    gpu, budget_ns = seat.gpu, node.settings.pacing_budget_ns
    if gpu.leases.active_seats < 2:
        return 0
    allotment = gpu.schedule.members.get(seat.client.client_id)
    if allotment is None:
        return 0 if gpu.settings.sharing is Sharing.CONCURRENT else budget_ns
    if allotment.pacing_ns is not None:
        return min(allotment.pacing_ns, budget_ns)
    return 0 if allotment.quantum_ns is None or seat.lease.contention is Contention.NONE else budget_ns


def settings_for(node: Node, seat: Seat) -> GpuSettings:
    """The settings as they are now."""
    gpu, allotment = seat.gpu, seat.sent.allotment
    swap = seat.client.memory_mode is MemoryMode.SWAP
    return GpuSettings(
        gpu=seat.ordinal,
        memory_limit_bytes=seat.memory.limit_bytes,
        capacity_bytes=gpu.memory.capacity_bytes,
        reserve=seat.client.memory_mode is not MemoryMode.MANAGED
        or bool(seat.client.identity.group and seat.memory.limit_bytes),
        pacing_budget_ns=_pacing_budget_ns(node, seat),
        idle_release_ns=_idle_release_ns(node, seat),
        prepare_host_bytes=seat.sent.prepare_bytes,
        room_bytes=max(1, room.room_bytes(seat)) if swap else 0,
        ask_pins=swap,
        limit_of_slot=bool(seat.client.identity.group and seat.memory.limit_bytes),
        slot_bytes=_slot_bytes(seat),
        prepare_now=seat.client.parking.state is ParkState.PREPARING,
        rate=max(1, round(1000 * allotment.rate)) if allotment is not None else 1000,
        report=allotment is not None,
        watch=allotment is not None and allotment.watch,
    )


def _slot_bytes(seat: Seat) -> int:
    """Memory of the slot's other programs, in steps of about a 256th of its limit; 0: no limit."""
    limit = seat.memory.limit_bytes
    step = 1 << max(0, limit.bit_length() - 9)
    return min(limit, -(-room.group_bytes(seat) // step) * step)


def send_slot_figures(node: Node, gpu: Gpu) -> None:
    """Tells the programs of a slot how much of its limit the others have, when that changes."""
    changed, gpu.memory.changed_groups = gpu.memory.changed_groups, {}
    for seat in gpu.seats.values() if changed else ():
        settings = seat.sent.settings
        if seat.client.owner in changed and settings is not None and settings.slot_bytes != _slot_bytes(seat):
            seat.sent.epoch = -1
            send_settings(node, seat)


def send_settings(node: Node, seat: Seat, *, even_if_unchanged: bool = False) -> None:
    """Sends the settings if they differ from what the client knows."""
    if seat.sent.epoch == seat.gpu.rules.settings_epoch and not even_if_unchanged:
        return
    seat.sent.epoch = seat.gpu.rules.settings_epoch
    settings = settings_for(node, seat)
    if settings != seat.sent.settings or even_if_unchanged:
        seat.sent.settings = settings
        node.out.append(Send(seat.client.client_id, settings))


def send_part(node: Node, seat: Seat) -> None:
    """Sends the settings if the plan or contention has changed what the client gets, or how it is paced."""
    sent, allotment = seat.sent, seat.gpu.schedule.members.get(seat.client.client_id)
    changed = sent.settings is not None and sent.settings.pacing_budget_ns != _pacing_budget_ns(node, seat)
    if allotment is not None and allotment is not sent.allotment:
        before, sent.allotment = sent.allotment, allotment
        changed |= before is None or (allotment.rate, allotment.watch) != (before.rate, before.watch)
    if changed:
        sent.epoch = -1
        send_settings(node, seat)


def send_settings_to_all(node: Node, gpu: Gpu) -> None:
    """A value changed that matters before the next grant."""
    gpu.settings_changed()
    for seat in gpu.seats.values():
        send_settings(node, seat)


def _steps(size: int) -> int:
    return -(-size // PREPARE_STEP_BYTES) * PREPARE_STEP_BYTES


def _in_steps(told: int, size: int) -> int:
    """Rounds up to whole steps: up at once, down by two steps or to nothing, so that it does not flicker."""
    steps = _steps(max(0, size))
    return told if told > steps > 0 and told - steps <= PREPARE_STEP_BYTES else steps


def _update_prepare(seat: Seat) -> bool:
    """Computes how much will probably be evicted from the client at a time.  Returns whether that has changed."""
    gpu = seat.gpu
    size = 0
    if seat.client.memory_mode is MemoryMode.SWAP:
        size = max(0, seat.memory.allocated_bytes - seat.memory.pinned_bytes)
        if seat.client.parking.state not in (ParkState.PREPARING, ParkState.LEAVING):
            size = min(size, gpu.memory.overflow.bytes) if gpu.leases.active_seats >= 2 else 0
    before, seat.sent.prepare_bytes = seat.sent.prepare_bytes, _in_steps(seat.sent.prepare_bytes, size)
    return seat.sent.prepare_bytes != before


def send_prepare(node: Node, seat: Seat) -> None:
    """Tells the client how much host memory to have ready, and how soon, after a change of its parking state."""
    _update_prepare(seat)
    seat.sent.epoch = -1
    send_settings(node, seat)


def send_overflow(node: Node, gpu: Gpu) -> None:
    """Tells clients how much host memory to have ready when that changes.  O(changed clients) mostly."""
    memory, overflow = gpu.memory, gpu.memory.overflow
    reported, overflow.reported = overflow.reported, {}
    excess = memory.allocated_bytes - memory.capacity_bytes if gpu.leases.active_seats >= 2 else 0
    if excess <= 0 and not overflow.bytes:
        return
    before, overflow.bytes = overflow.bytes, _in_steps(overflow.bytes, excess)
    concerned = reported if overflow.bytes == before else gpu.seats
    for client in concerned:
        seat = gpu.seats.get(client)
        if seat is not None and _update_prepare(seat):
            gpu.settings_changed()
            send_settings(node, seat)
