"""Which growth of memory is allowed.

Rules:
- A client's own limit is never exceeded; 0 means none.  A limit below what is in use lets nothing more be allocated.
  Clients of one group have their limit together.
- What cannot be moved must fit: the reservations of clients in `device` mode and the pinned memory of the others
  together are at most the GPU's capacity; and beside it there is room for what each client in `swap` mode needs
  (memory/room.py).
- Memory that can be moved is admitted beyond capacity, as far as the host has room for it: what a client that asks for
  host memory has and can move is at most what it may have there (`host_budget.most_bytes`).
- Giving memory back is always allowed, and so is having back on the GPU what was moved away from it.

May not go here: moving memory.
"""

from __future__ import annotations

from nvshare.coordinator.memory import host_budget, room
from nvshare.coordinator.model.commands import Notify, Send
from nvshare.coordinator.model.state import Client, Gpu, Node, Seat
from nvshare.coordinator.protocol.messages import MemoryMode, MemoryReserved


def _host_has_room(node: Node, seat: Seat, total_bytes: int) -> bool:
    """Whether the client could put everything on the host that it can move, if it had `total_bytes` on this GPU."""
    client = seat.client
    if not client.host_asked:
        return True
    others = sum(max(0, s.allocated_bytes - s.pinned_bytes) for s in client.seats.values() if s is not seat)
    return others + max(0, total_bytes - seat.pinned_bytes) <= host_budget.most_bytes(node, client)


def _group_bytes(seat: Seat) -> int:
    """What the others of its group have on this GPU."""
    group = seat.client.group
    if not group:
        return 0
    others = (other for other in seat.gpu.seats.values() if other is not seat and other.client.group == group)
    return sum(max(other.reserved_bytes, other.allocated_bytes) for other in others)


def refusal(node: Node, seat: Seat, total_bytes: int) -> str | None:
    """Why the client may not have `total_bytes` in all; None: it may."""
    has = seat.allocated_bytes if seat.client.memory_mode is not MemoryMode.DEVICE else 0
    if total_bytes <= max(seat.reserved_bytes, has):
        return None  # what it has only comes back to the GPU: nothing grows
    if seat.limit_bytes and total_bytes + _group_bytes(seat) > seat.limit_bytes:
        return "limit"
    if seat.client.memory_mode is not MemoryMode.DEVICE:
        return None if _host_has_room(node, seat, total_bytes) else "host"
    return immovable_refusal(seat, total_bytes)


def immovable_refusal(seat: Seat, total_bytes: int) -> str | None:
    """Why so much of the client's memory may not be immovable; None: it may."""
    gpu = seat.gpu
    if gpu.immovable.bytes - seat.fit.immovable_bytes + total_bytes > gpu.capacity_bytes:
        return "capacity"
    return "pins" if room.locked_out(seat, total_bytes) is not None else None


def reserve(node: Node, seat: Seat, sequence: int, total_bytes: int) -> None:
    """Answer a reservation."""
    why = refusal(node, seat, total_bytes)
    if why is not None:
        refuse(node, seat, sequence, total_bytes, why)
        return
    seat.reserved_bytes = total_bytes
    room.follow(seat)
    answer(node, seat, sequence)


def refuse(node: Node, seat: Seat, sequence: int, total_bytes: int, why: str) -> None:
    """Say no; the reservation stays what it is."""
    seat.gpu.refused_reservations += 1
    note_refusal(node, seat.gpu, seat.client, total_bytes, why)
    answer(node, seat, sequence, by_limit=why == "limit")


def note_refusal(node: Node, gpu: Gpu, client: Client, size: int, why: str) -> None:
    """So that somebody sees it."""
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": client.client,
        "bytes": size,
        "why": why,
    }
    node.out.append(Notify("refused", values))


def answer(node: Node, seat: Seat, sequence: int, *, by_limit: bool = False) -> None:
    """Tell the client what its reservation is now."""
    node.out.append(Send(seat.client.client, MemoryReserved(seat.ordinal, sequence, seat.reserved_bytes, by_limit)))
