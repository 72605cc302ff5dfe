"""How much of a GPU can be a client's at all: what there is, less what others have there that cannot move.  Pure.

Rules:
- Of a client in mode `device` nothing can move; of the others what is pinned, or was allowed to become so.
- A client in mode `swap` runs when all of its memory is there.  So that is what it needs, and nothing of others may
  become immovable that would leave less (`locked_out`).
- Nobody but those in mode `swap` needs room in this sense: pages of managed memory fault in as there is room.
- Room is told in steps, so that not each byte is a message.

Invariant: `Immovable.bytes` is the sum over the seats; it changes in `follow` only.

May not go here: answers, messages, turns (memory/pinning.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.memory import SeatRoom
from nvshare.coordinator.protocol.messages import MemoryMode

if TYPE_CHECKING:
    from nvshare.coordinator.model.seat import Seat

STEPS: Final = 256
"""Of the capacity."""


def _immovable_bytes(seat: Seat) -> int:
    if seat.client.memory_mode is MemoryMode.DEVICE:
        return max(seat.memory.reserved_bytes, seat.memory.resident_bytes)
    return max(seat.memory.pinned_bytes, seat.room.promised_bytes)


def update(seat: Seat, *, needs: bool = False) -> None:
    """What the seat has, or was promised, is different now; `needs`: and what it needs may be."""
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


def add_seat(seat: Seat) -> None:
    """A client has come to the GPU."""
    if seat.client.memory_mode is MemoryMode.SWAP:
        seat.gpu.memory.immovable.swapping[seat.client.client_id] = seat


def remove_seat(seat: Seat) -> None:
    """It has gone, its memory with it."""
    whole = seat.gpu.memory.immovable
    whole.swapping.pop(seat.client.client_id, None)
    whole.questions.pop(seat.client.client_id, None)
    whole.unschedulable -= seat.room.unschedulable
    seat.room.unschedulable = False
    whole.bytes -= seat.room.immovable_bytes
    seat.room = SeatRoom()
    whole.stale = True


def room_bytes(seat: Seat, *, more_bytes: int = 0) -> int:
    """The most of it that can ever be on the GPU; if `more_bytes` of others could not move, besides what cannot now."""
    gpu = seat.gpu
    others = gpu.memory.immovable.bytes - seat.room.immovable_bytes + more_bytes
    step = max(1, gpu.memory.capacity_bytes // STEPS)
    return max(0, gpu.memory.capacity_bytes - -(-others // step) * step)


def needs_bytes(seat: Seat) -> int:
    """The least that must be on the GPU while it runs."""
    if seat.client.memory_mode is not MemoryMode.SWAP:
        return 0
    return min(seat.memory.allocated_bytes, seat.gpu.memory.capacity_bytes)


def lacking_bytes(seat: Seat) -> int:
    """What it needs beyond what there can ever be; 0: it fits.  Exact, unlike `room_bytes`."""
    others = seat.gpu.memory.immovable.bytes - seat.room.immovable_bytes
    return max(0, needs_bytes(seat) + others - seat.gpu.memory.capacity_bytes)


def starved_by(seat: Seat, immovable_bytes: int) -> Seat | None:
    """Who could not have what it needs if so much of this seat's memory could not move; None: nobody."""
    more = immovable_bytes - seat.room.immovable_bytes
    if more <= 0:
        return None
    for other in seat.gpu.memory.immovable.swapping.values():
        if other is not seat and _claims_bytes(other) > room_bytes(other, more_bytes=more):
            return other
    return None


def _claims_bytes(seat: Seat) -> int:
    """What it needs, and under a lease what it may allocate without asking again."""
    needs = needs_bytes(seat)
    return max(needs, seat.memory.reserved_bytes) if seat.lease.lease_id else needs
