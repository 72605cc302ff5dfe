"""What clients have on a GPU, and the most that they may come to have.

Rules:
- *Claimed* is the most of: what a client has, what it was promised, and the targets that it may still obey.  So the
  most that all clients may come to have resident is always known, whichever messages are under way.
- A client counts with what it may have, whatever it reports.  A report counts up to what the client claimed before:
  that was promised on this connection.  More counts only if the driver's figures show it (checks.py).  Memory
  counts as immovable if these show it, or if it was allowed to be (pinning.py).
- What moves out is free at once.  What a client that is gone had leaves the GPU by itself, when its process has ended;
  what it exported stays claimed until the driver's figures say how much of it others hold (checks.py).

Non-goals: targets (residency.py), how a client is told of them (moves.py).
"""

from __future__ import annotations

from nvshare.coordinator.engine.memory import room
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import Ending
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, OVERDUE, REVOKING, WITH_LEASE, Seat
from nvshare.coordinator.protocol.messages import MOST_BYTES, MemoryMode


def set_usage(seat: Seat, allocated: int, resident: int, pinned: int, host: int, most: int | None = None) -> None:
    """Changes a seat's memory usage and the GPU's sums; nothing else does.

    The client reports the figures, so they are bounded to what it may have; `most` replaces the bound of `resident`.
    """
    gpu, claimed = seat.gpu, seat.memory.claimed_bytes
    seat.memory.reported = allocated, resident, pinned, host
    if allocated > seat.memory.allocated_bytes:
        allocated = max(seat.memory.allocated_bytes, min(allocated, room.most_bytes(seat)))
    said = min(resident, allocated)
    if most is None:
        most = claimed if said <= claimed else max(claimed, shown_bytes(seat))
    resident = min(said, most)
    said_pinned, pinned = min(pinned, said), min(pinned, resident)
    if seat.client.memory_mode is not MemoryMode.DEVICE:
        allowed = max(seat.memory.pinned_bytes, seat.room.promised_bytes)
        pinned = pinned if pinned <= allowed else min(pinned, max(allowed, shown_bytes(seat)))
    elif resident < said:
        allocated = resident
    seat.memory.unconfirmed_bytes = max(said - resident, said_pinned - pinned)
    host = min(host, MOST_BYTES)
    needs = allocated != seat.memory.allocated_bytes
    gpu.memory.allocated_bytes += allocated - seat.memory.allocated_bytes
    gpu.memory.resident_bytes += resident - seat.memory.resident_bytes
    gpu.memory.host_bytes += host - seat.memory.host_bytes
    seat.memory.allocated_bytes = allocated
    gpu.memory.overflow.reported[seat.client.client_id] = None
    seat.memory.resident_bytes = resident
    seat.memory.pinned_bytes = pinned
    seat.memory.host_bytes = host
    if resident:
        gpu.memory.evictable[seat.client.client_id] = seat
    else:
        gpu.memory.evictable.pop(seat.client.client_id, None)
    claim(seat)
    room.update(seat, needs=needs)
    gpu.wait_queue.changed(seat)


def shown_bytes(seat: Seat) -> int:
    """The most that the client's process has by the driver's figures; managed pages are the driver's own affair."""
    if seat.client.memory_mode is MemoryMode.MANAGED:
        return MOST_BYTES
    memory = seat.gpu.memory
    return memory.listed.get(str(seat.client.identity.process_id), 0) + memory.unlisted_bytes


def wanted_bytes(seat: Seat) -> int:
    """Memory that should be on the GPU while the client runs."""
    return min(seat.memory.allocated_bytes, seat.gpu.memory.capacity_bytes)


def missing_bytes(seat: Seat) -> int:
    """Memory that must come in before the client runs.

    While all clients fit, memory that was never evicted comes by itself.
    """
    gpu = seat.gpu
    if seat.memory.host_bytes == 0 and gpu.memory.allocated_bytes <= gpu.memory.capacity_bytes:
        return 0
    return max(0, wanted_bytes(seat) - seat.memory.resident_bytes)


def is_complete(seat: Seat) -> bool:
    """Nothing must move before the client runs."""
    return seat.moves.move is None and missing_bytes(seat) == 0


def claim(seat: Seat) -> None:
    """Counts again what the client claims of its GPU.  Called whenever something that `claimed_bytes` reads changes."""
    now, mine, whole = claimed_bytes(seat), seat.memory, seat.gpu.memory
    if seat.client.identity.group:
        whole.changed_groups[seat.client.owner] = None
    needed = max(now, mine.allocated_bytes)
    whole.needed_bytes += needed - mine.needed_bytes
    mine.needed_bytes = needed
    if now != mine.claimed_bytes:
        whole.claimed_bytes += now - mine.claimed_bytes
        mine.claimed_bytes = now
        seat.gpu.wait_queue.changed(seat)


def claimed_bytes(seat: Seat) -> int:
    """The most that the client may come to have without another message."""
    claimed, told, mode = seat.memory.resident_bytes, seat.moves.open, seat.client.memory_mode
    if told:
        claimed = max(claimed, *told.values())
    if mode is MemoryMode.DEVICE:
        return max(claimed, seat.memory.reserved_bytes)
    if seat.phase in (HOLDING, REVOKING):
        claimed = max(claimed, wanted_bytes(seat))
        if mode is MemoryMode.SWAP:
            claimed = max(claimed, seat.memory.reserved_bytes)
    return claimed


def settled_bytes(seat: Seat) -> int:
    """The memory of a client without a lease once it has come to its newest target."""
    move = seat.moves.move
    return seat.memory.resident_bytes if move is None else min(seat.memory.claimed_bytes, move.target_bytes)


def ending_bytes(gpu: Gpu) -> int:
    """Memory of clients that are gone and whose processes have not ended."""
    ending = gpu.memory.immovable.ending
    return sum(each.bytes for each in ending.values()) if ending else 0


def free_bytes(gpu: Gpu) -> int:
    """Memory that nobody claims; below zero when too much was promised."""
    return gpu.memory.capacity_bytes - gpu.memory.claimed_bytes - ending_bytes(gpu)


def leaving_bytes(gpu: Gpu) -> int:
    """Memory that will be free without another message.  O(moves)."""
    leaving = ending_bytes(gpu)
    for seat in gpu.memory.moving.values():
        move, memory = seat.moves.move, seat.memory
        if move is not None and not move.stalled and seat.phase not in WITH_LEASE:
            leaving += max(0, memory.claimed_bytes - max(move.target_bytes, memory.pinned_bytes))
    return leaving


def crowded_bytes(gpu: Gpu) -> int:
    """What the driver's figures show beside clients and spare memory: contexts, and memory that only importers hold.

    On an integrated GPU, everything else of the host, and what it keeps.
    """
    memory = gpu.memory
    return max(0, memory.other_bytes + memory.kept_bytes - (memory.total_bytes - memory.capacity_bytes))


def fits_beside_overdue(gpu: Gpu, seat: Seat) -> bool:
    """Whether a client may run beside one whose drain is overdue, whose memory cannot move."""
    if seat.client.memory_mode is MemoryMode.MANAGED:
        return True  # pages fault in as there is room
    overdue = (other for other in gpu.leases.by_client.values() if other.phase is OVERDUE)
    stuck = sum(each.memory.resident_bytes for each in overdue if each.client.memory_mode is not MemoryMode.MANAGED)
    wanted = wanted_bytes(seat)
    return not wanted or stuck + wanted <= gpu.memory.capacity_bytes


def outlive_client(node: Node, seat: Seat, size: int, exported: int, now_ns: int) -> None:
    """The client is gone, and the driver frees its memory when its process has ended."""
    gpu, process_id = seat.gpu, seat.client.identity.process_id
    if size and all(other.client.identity.process_id != process_id for other in gpu.seats.values()):
        gpu.memory.immovable.ending[process_id] = Ending(size, now_ns + node.settings.move_stall_ns, exported)
