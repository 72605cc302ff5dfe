"""The room of a client on a GPU: the capacity less immovable memory of others.  Pure.

Rules:
- All memory of a client in mode `device` is immovable.  Of the others, what is pinned or was allowed to become so.
- A client in mode `swap` runs when all of its memory is on the GPU.  So that is what it needs, and nothing of others
  may become immovable that would leave less (`starved_by`).
- Clients in other modes need no room: pages of managed memory fault in as there is room.
- Room is told in steps, so that not each byte is a message.
- `Immovable.bytes` is the sum over the seats; only `update` and `remove_seat` change it.

Non-goals: answers, messages, turns (pinning.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.memory import SeatRoom
from nvshare.coordinator.protocol.messages import MemoryMode

if TYPE_CHECKING:
    from nvshare.coordinator.model.gpu import Gpu
    from nvshare.coordinator.model.seat import Seat

STEPS: Final = 256
"""Granularity of room: capacity / 256."""


def _immovable_bytes(seat: Seat) -> int:
    if seat.client.memory_mode is MemoryMode.DEVICE:
        growth = seat.memory.growth
        asked = growth.total_bytes if growth is not None else 0
        return max(seat.memory.reserved_bytes, seat.memory.resident_bytes, asked)
    return max(seat.memory.pinned_bytes, seat.room.promised_bytes)


def update(seat: Seat, *, needs: bool = False) -> None:
    """The seat's memory or promise has changed; `needs`: its need may have changed too."""
    own, whole = seat.room, seat.gpu.memory.immovable
    if seat.memory.pinned_bytes >= own.promised_bytes:
        own.promised_bytes = 0
    now = _immovable_bytes(seat)
    if now != own.immovable_bytes:
        whole.bytes += now - own.immovable_bytes
        own.immovable_bytes = now
        whole.stale = True
    elif needs and (whole.bytes or own.lacking_bytes):
        whole.stale = True


def swapping(gpu: Gpu) -> Iterable[Seat]:
    """The seats in mode `swap`."""
    return (seat for seat in gpu.seats.values() if seat.client.memory_mode is MemoryMode.SWAP)


def remove_seat(seat: Seat) -> None:
    """The client has gone, its memory with it."""
    whole = seat.gpu.memory.immovable
    whole.questions.pop(seat.client.client_id, None)
    whole.unschedulable -= seat.room.unschedulable
    seat.room.unschedulable = False
    whole.bytes -= seat.room.immovable_bytes
    seat.room = SeatRoom()
    whole.stale = True


def group_bytes(seat: Seat, *, asked: bool = False) -> int:
    """Memory of the other clients of its group on this GPU; `asked`: also what they wait for."""
    owner = seat.client.owner
    if not seat.client.identity.group:
        return 0
    others = (other.memory for other in seat.gpu.seats.values() if other is not seat and other.client.owner == owner)
    return sum(
        max(m.reserved_bytes, m.allocated_bytes, m.growth.total_bytes if asked and m.growth else 0) for m in others
    )


def raise_highest_limit(seat: Seat) -> None:
    """The seat has a new limit."""
    memory = seat.memory
    unlimited = not memory.limit_bytes or not memory.highest_limit_bytes
    memory.highest_limit_bytes = 0 if unlimited else max(memory.limit_bytes, memory.highest_limit_bytes)


def most_bytes(seat: Seat) -> int:
    """The most that the client may have on the GPU, whatever it reports."""
    capacity, limit = seat.gpu.memory.capacity_bytes, seat.memory.highest_limit_bytes
    if not limit:
        return capacity
    if seat.client.memory_mode is MemoryMode.DEVICE:  # it asks before it grows
        limit = max(limit - group_bytes(seat), seat.memory.reserved_bytes)
    return min(capacity, limit)


def room_bytes(seat: Seat, *, more_bytes: int = 0) -> int:
    """The most that the seat can have on the GPU, if `more_bytes` of others became immovable."""
    gpu = seat.gpu
    others = gpu.memory.immovable.bytes - seat.room.immovable_bytes + more_bytes
    step = max(1, gpu.memory.capacity_bytes // STEPS)
    return max(0, gpu.memory.capacity_bytes - -(-others // step) * step)


def needs_bytes(seat: Seat) -> int:
    """The least that must be on the GPU while the client runs."""
    if seat.client.memory_mode is not MemoryMode.SWAP:
        return 0
    return min(seat.memory.allocated_bytes, seat.gpu.memory.capacity_bytes)


def lacking_bytes(seat: Seat) -> int:
    """The client's need beyond its room; 0: it fits.  Exact, unlike `room_bytes`."""
    others = seat.gpu.memory.immovable.bytes - seat.room.immovable_bytes
    return max(0, needs_bytes(seat) - max(0, seat.gpu.memory.capacity_bytes - others))


def starved_by(seat: Seat, immovable_bytes: int) -> Seat | None:
    """A client that would not have what it needs if this much of the seat's memory were immovable."""
    more = immovable_bytes - seat.room.immovable_bytes
    if more <= 0:
        return None
    for other in swapping(seat.gpu):
        if other is not seat and _claims_bytes(other) > room_bytes(other, more_bytes=more):
            return other
    return None


def _claims_bytes(seat: Seat) -> int:
    """The client's memory, under a lease with the reservation."""
    needs = needs_bytes(seat)
    return max(needs, seat.memory.reserved_bytes) if seat.lease.lease_id else needs
