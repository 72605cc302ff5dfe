"""Which growth of memory is allowed.

Rules:
- A client's own limit is never exceeded; 0 means none.  A limit below what is in use lets nothing more be allocated.
- What cannot be moved must fit: the reservations of clients in `device` mode and the pinned memory of the others
  together are at most the GPU's capacity.
- Memory that can be moved is admitted beyond capacity.
- Giving memory back is always allowed.

May not go here: moving memory.
"""

from __future__ import annotations

from coordinator.commands import Notify, Send
from coordinator.state import Gpu, Node, Seat
from coordinator.wire import MemoryMode, MemoryReserved


def immovable_bytes(seat: Seat) -> int:
    """What this client may have on the card that nobody can move away."""
    if seat.client.memory_mode is MemoryMode.DEVICE:
        return max(seat.reserved_bytes, seat.resident_bytes)
    return seat.pinned_bytes


def refusal(gpu: Gpu, seat: Seat, total_bytes: int) -> str | None:
    """Why the client may not have `total_bytes` in all; None: it may."""
    if total_bytes <= seat.reserved_bytes:
        return None
    if seat.limit_bytes and total_bytes > seat.limit_bytes:
        return "limit"
    if seat.client.memory_mode is not MemoryMode.DEVICE:
        return None
    others = sum(immovable_bytes(other) for other in gpu.seats.values() if other is not seat)
    return "capacity" if others + total_bytes > gpu.capacity_bytes else None


def reserve(node: Node, seat: Seat, sequence: int, total_bytes: int) -> None:
    """Answer a reservation."""
    why = refusal(seat.gpu, seat, total_bytes)
    if why is not None:
        refuse(node, seat, sequence, total_bytes, why)
        return
    seat.reserved_bytes = total_bytes
    answer(node, seat, sequence)


def refuse(node: Node, seat: Seat, sequence: int, total_bytes: int, why: str) -> None:
    """Say no; the reservation stays what it is."""
    seat.gpu.refused_reservations += 1
    values: dict[str, int | str | bool | float | None] = {
        "uuid": seat.gpu.uuid,
        "client": seat.client.client,
        "bytes": total_bytes,
        "why": why,
    }
    node.out.append(Notify("refused", values))
    answer(node, seat, sequence)


def answer(node: Node, seat: Seat, sequence: int) -> None:
    """Tell the client what its reservation is now."""
    node.out.append(Send(seat.client.client, MemoryReserved(seat.ordinal, sequence, seat.reserved_bytes)))
