"""Which growth of memory is allowed.

Rules:
- A client's own limit is never exceeded; 0 means none.  A limit below what is in use lets nothing more be allocated.
  Clients of one group have their limit together.
- What cannot be moved must fit: the reservations of clients in `device` mode and the pinned memory of the others
  together are at most the GPU's capacity.
- Memory that can be moved is admitted beyond capacity, as far as the host has room for it: what a client that asks for
  host memory has and can move is at most its share of the budget and what is left of that.
- Giving memory back is always allowed.

May not go here: moving memory.
"""

from __future__ import annotations

from coordinator.commands import Notify, Send
from coordinator.state import Client, Gpu, Node, Seat
from coordinator.wire import MemoryMode, MemoryReserved


def immovable_bytes(seat: Seat) -> int:
    """What this client may have on the card that nobody can move away."""
    if seat.client.memory_mode is MemoryMode.DEVICE:
        return max(seat.reserved_bytes, seat.resident_bytes)
    return seat.pinned_bytes


def _host_has_room(node: Node, seat: Seat, total_bytes: int) -> bool:
    """Whether the client could put everything on the host that it can move, if it had `total_bytes` on this GPU."""
    client = seat.client
    if not client.host_asked:
        return True
    others = sum(max(0, s.allocated_bytes - s.pinned_bytes) for s in client.seats.values() if s is not seat)
    movable = others + max(0, total_bytes - seat.pinned_bytes)
    return movable <= client.host_share_bytes + max(0, node.host_budget_bytes - node.host_shared_bytes)


def _group_bytes(seat: Seat) -> int:
    """What the others of its group have on this GPU."""
    group = seat.client.group
    if not group:
        return 0
    others = (other for other in seat.gpu.seats.values() if other is not seat and other.client.group == group)
    return sum(max(other.reserved_bytes, other.allocated_bytes) for other in others)


def refusal(node: Node, seat: Seat, total_bytes: int) -> str | None:
    """Why the client may not have `total_bytes` in all; None: it may."""
    gpu = seat.gpu
    if total_bytes <= seat.reserved_bytes:
        return None
    if seat.limit_bytes and total_bytes + _group_bytes(seat) > seat.limit_bytes:
        return "limit"
    if seat.client.memory_mode is not MemoryMode.DEVICE:
        return None if _host_has_room(node, seat, total_bytes) else "host"
    others = sum(immovable_bytes(other) for other in gpu.seats.values() if other is not seat)
    return "capacity" if others + total_bytes > gpu.capacity_bytes else None


def reserve(node: Node, seat: Seat, sequence: int, total_bytes: int) -> None:
    """Answer a reservation."""
    why = refusal(node, seat, total_bytes)
    if why is not None:
        refuse(node, seat, sequence, total_bytes, why)
        return
    seat.reserved_bytes = total_bytes
    answer(node, seat, sequence)


def refuse(node: Node, seat: Seat, sequence: int, total_bytes: int, why: str) -> None:
    """Say no; the reservation stays what it is."""
    seat.gpu.refused_reservations += 1
    note_refusal(node, seat.gpu, seat.client, total_bytes, why)
    answer(node, seat, sequence)


def note_refusal(node: Node, gpu: Gpu | None, client: Client, size: int, why: str) -> None:
    """So that somebody sees it."""
    values: dict[str, int | str | bool | float | None] = {
        "uuid": None if gpu is None else gpu.uuid,
        "client": client.client,
        "bytes": size,
        "why": why,
    }
    node.out.append(Notify("refused", values))


def answer(node: Node, seat: Seat, sequence: int) -> None:
    """Tell the client what its reservation is now."""
    node.out.append(Send(seat.client.client, MemoryReserved(seat.ordinal, sequence, seat.reserved_bytes)))
