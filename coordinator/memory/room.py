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

from nvshare.coordinator.model.room import Fit
from nvshare.coordinator.protocol.messages import MemoryMode

if TYPE_CHECKING:
    from nvshare.coordinator.model.state import Seat

STEPS: Final = 256
"""Of the capacity."""


def _of(seat: Seat) -> int:
    if seat.client.memory_mode is MemoryMode.DEVICE:
        return max(seat.reserved_bytes, seat.resident_bytes)
    return max(seat.pinned_bytes, seat.fit.promised_bytes)


def follow(seat: Seat, *, needs: bool = False) -> None:
    """What the seat has, or was promised, is different now; `needs`: and what it needs may be."""
    fit, whole = seat.fit, seat.gpu.immovable
    if seat.pinned_bytes >= fit.promised_bytes:
        fit.promised_bytes = 0
    now = _of(seat)
    if now != fit.immovable_bytes:
        whole.bytes += now - fit.immovable_bytes
        fit.immovable_bytes = now
        whole.stale = True
    elif needs and (whole.bytes or fit.lacking_bytes):
        whole.stale = True


def join(seat: Seat) -> None:
    """A client has come to the GPU."""
    if seat.client.memory_mode is MemoryMode.SWAP:
        seat.gpu.immovable.swapping[seat.client.client] = seat


def leave(seat: Seat) -> None:
    """It has gone, its memory with it."""
    whole = seat.gpu.immovable
    whole.swapping.pop(seat.client.client, None)
    whole.asking.pop(seat.client.client, None)
    whole.shut_out -= seat.fit.shut_out
    seat.fit.shut_out = False
    whole.bytes -= seat.fit.immovable_bytes
    seat.fit = Fit()
    whole.stale = True


def room_bytes(seat: Seat, *, more_bytes: int = 0) -> int:
    """The most of it that can ever be on the GPU; if `more_bytes` of others could not move, besides what cannot now."""
    gpu = seat.gpu
    others = gpu.immovable.bytes - seat.fit.immovable_bytes + more_bytes
    step = max(1, gpu.capacity_bytes // STEPS)
    return max(0, gpu.capacity_bytes - -(-others // step) * step)


def needs_bytes(seat: Seat) -> int:
    """The least that must be on the GPU while it runs."""
    if seat.client.memory_mode is not MemoryMode.SWAP:
        return 0
    return min(seat.allocated_bytes, seat.gpu.capacity_bytes)


def lacking_bytes(seat: Seat) -> int:
    """What it needs beyond what there can ever be; 0: it fits.  Exact, unlike `room_bytes`."""
    others = seat.gpu.immovable.bytes - seat.fit.immovable_bytes
    return max(0, needs_bytes(seat) + others - seat.gpu.capacity_bytes)


def locked_out(seat: Seat, immovable_bytes: int) -> Seat | None:
    """Who could not have what it needs if so much of this seat's memory could not move; None: nobody."""
    more = immovable_bytes - seat.fit.immovable_bytes
    if more <= 0:
        return None
    for other in seat.gpu.immovable.swapping.values():
        if other is not seat and _claims_bytes(other) > room_bytes(other, more_bytes=more):
            return other
    return None


def _claims_bytes(seat: Seat) -> int:
    """What it needs, and under a lease what it may allocate without asking again."""
    needs = needs_bytes(seat)
    return max(needs, seat.reserved_bytes) if seat.lease_id else needs
