"""Why a client waits for a GPU, and why it gets no more memory there."""

from __future__ import annotations

from dataclasses import dataclass

from nvshare.coordinator.engine.snapshot.gpus import queue
from nvshare.coordinator.model.client import Client, Identity
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import NEXT, Seat


@dataclass(frozen=True, slots=True)
class WaitSnapshot:
    """Why one client waits for one GPU."""

    index: int
    """The GPU's number on the node."""
    identity: Identity
    holders: tuple[Identity, ...]
    place: int
    """Clients that come before it; 0: it is the next one, or has no place."""
    paused: bool
    lacking_bytes: int
    """Room that its memory lacks beside immovable memory; 0: it fits."""
    stuck: Identity | None
    """Its memory was to make room for this program's, and does not move."""
    recovering: bool
    stopped: bool
    """Recovering, and the earlier holder is stopped."""
    in_debt: bool
    moving: bool
    """It was chosen, and memory moves."""


@dataclass(frozen=True, slots=True)
class RefusalSnapshot:
    """Why one client gets no more memory on one GPU."""

    index: int
    identity: Identity
    capacity_bytes: int
    immovable: tuple[tuple[Identity, int], ...]
    """Immovable memory of the other clients, most first."""


def take_wait(node: Node, seat: Seat) -> WaitSnapshot | None:
    """Why this client waits; None when it does not.  O(waiting clients of the GPU)."""
    gpu, client = seat.gpu, seat.client
    if seat.place.waiting_since_ns is None:
        return None
    order = queue(gpu)
    return WaitSnapshot(
        index=list(node.gpus).index(gpu.uuid),
        identity=client.identity,
        holders=tuple(each.client.identity for each in gpu.leases.by_client.values()),
        place=order.index(client.client_id) if client.client_id in order else 0,
        paused=client.paused,
        lacking_bytes=seat.room.lacking_bytes if seat.room.unschedulable else 0,
        stuck=_stuck(seat) if seat.room.unschedulable else None,
        recovering=gpu.recovering,
        stopped=gpu.recovery.holder_stopped,
        in_debt=seat.in_debt,
        moving=seat.phase is NEXT,
    )


def _stuck(waiting: Seat) -> Identity | None:
    for seat in waiting.gpu.seats.values():
        order = seat.moves.order
        if seat is not waiting and order is not None and order.evict and order.stalled:
            return seat.client.identity
    return None


def take_refusal(node: Node, client: Client, uuid: str) -> RefusalSnapshot:
    """Immovable memory of the other clients on this GPU.  O(clients of the GPU)."""
    gpu = node.gpus[uuid]
    others = [seat for seat in gpu.seats.values() if seat.client is not client and seat.room.immovable_bytes]
    others.sort(key=lambda seat: -seat.room.immovable_bytes)
    return RefusalSnapshot(
        index=list(node.gpus).index(uuid),
        identity=client.identity,
        capacity_bytes=gpu.memory.capacity_bytes,
        immovable=tuple((seat.client.identity, seat.room.immovable_bytes) for seat in others),
    )
