"""Migration: a client leaves its GPU as at parking, and comes back on another one.

Rules:
- What the driver cannot do is refused before anything moves.  It exchanges whole GPUs of one model.
- A GPU at which the client only looks does not count.  Where that is the target, its two seats change places.
- The seat moves when the driver says where the process is (`Restored.gpu`), whoever has moved it: also a coordinator
  before this one, or a helper that has died since.
- A restoration that fails on the other GPU is followed by one at home.
- The setting `rebalance` moves a client to an idle GPU of the same model, if its own leaves it without time for longer
  during the next minute than the move takes: it waits, or runs beside others at less than its rate alone.  While it
  has a gang's GPU, those of the gang that nobody else wants are idle: it joins others on a GPU without a gang, if these
  are no more than here.  One client moves at a time, and each at most once a minute.

Non-goals: the way out and back (parking.py), the driver's calls (system/checkpoints.py), what the program sees of its
GPU afterwards (client_hook/src/contexts/gpu.c).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine import recovery
from nvshare.coordinator.engine.parking import parking
from nvshare.coordinator.model import events
from nvshare.coordinator.model.client import Client, ParkState
from nvshare.coordinator.model.commands import Log
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, WAITING, Seat
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.units import format_duration, format_size

AHEAD_NS: Final = 60 * SECOND_NS
CONTEXTS_NS: Final = 2 * SECOND_NS
"""What a move takes beside the bytes."""
PATIENCE_NS: Final = 10 * SECOND_NS
"""A move that takes longer keeps nobody else from moving: its process may be stopped."""
USUAL_RATE: Final = 10.0
"""Bytes a nanosecond, until a GPU's link is measured."""


def obstacle(node: Node, client: Client, gpu: Gpu) -> str:
    """Why the client cannot move to this GPU, as far as the coordinator knows; "": it may be possible."""
    why = parking.obstacle(node, client)
    if why:
        return why
    if len(client.used_seats) != 1:
        return "it uses several GPUs"
    (seat,) = client.used_seats
    if seat.gpu is gpu:
        return "it is there already"
    if client.identity.group:
        return "it is in a Kubernetes slot, whose GPU is that of its pod"
    if client.facts.gang:
        return f"it is in the gang {client.facts.gang}"
    if client.memory_mode is not MemoryMode.SWAP:
        return "its memory cannot move; start it with --memory swap"
    if gpu.uuid.startswith("MIG") or seat.gpu.uuid.startswith("MIG"):
        return "the driver does not exchange MIG instances"
    if (gpu.name, gpu.memory.total_bytes) != (seat.gpu.name, seat.gpu.memory.total_bytes):
        return f"the cards differ: {_model(seat.gpu)} and {_model(gpu)}"
    if gpu.recovering:
        return "that GPU waits for a lease of an earlier coordinator"
    if client.parking.state is ParkState.WAKING:
        return "it is coming back just now"
    room_bytes = max(0, gpu.memory.capacity_bytes - gpu.memory.immovable.bytes)
    if seat.memory.allocated_bytes > room_bytes:
        return f"it has {format_size(seat.memory.allocated_bytes)}, and that GPU has room for {format_size(room_bytes)}"
    return ""


def _model(gpu: Gpu) -> str:
    return f"{gpu.name} with {format_size(gpu.memory.total_bytes)}"


def set_target(node: Node, client: Client, target: str, now_ns: int) -> None:
    """The operator moves a client to the GPU `target`."""
    gpu = node.gpus.get(target)
    why = obstacle(node, client, gpu) if gpu is not None else f"no GPU {target} here"
    if why or gpu is None:
        parking.refuse(node, client, why)
    else:
        _begin(node, client, gpu, "by the operator", now_ns)


def _begin(node: Node, client: Client, gpu: Gpu, why: str, now_ns: int) -> None:
    move = client.parking.move
    move.target, move.why, move.tried_at_ns = gpu.uuid, why, now_ns
    node.notify("migrating", uuid=gpu.uuid, client=client.client_id, why=why)
    if client.parking.state is ParkState.PARKED:
        client.parking.began_ns = now_ns
        parking.wake(node, client)
        return
    (seat,) = client.used_seats
    if seat.phase is HOLDING:
        parking.prepare(node, seat, now_ns)
    else:
        parking.begin(node, client, now_ns)


def restored(node: Node, event: events.Restored, now_ns: int) -> None:
    """The process runs, here or there, or is still off the GPUs."""
    client = node.clients.get(event.client)
    if client is None or client.parking.state is not ParkState.WAKING:
        return
    move = client.parking.move
    if event.error and move.target and not event.lost:
        why = f"it cannot be moved to {move.target}: {event.error}"
        node.out.append(Log(logging.WARNING, f"{client.identity}: {why}; it comes back on its GPU"))
        move.target = ""
        parking.wake(node, client, why)
        return
    gpu = node.gpus.get(event.gpu)
    if not event.error and gpu is not None and len(client.used_seats) == 1:
        (seat,) = client.used_seats
        if seat.gpu is not gpu:
            node.concern(seat.gpu)
            node.concern(gpu)
            _arrived(node, seat, gpu, now_ns)
    parking.restored(node, event, now_ns)


def _arrived(node: Node, seat: Seat, gpu: Gpu, now_ns: int) -> None:
    client, move = seat.client, seat.client.parking.move
    move.source, move.source_why = seat.gpu.uuid, move.why or "by an earlier coordinator"
    recovery.move_seats(node, seat, gpu, now_ns)
    node.notify(
        "migrated",
        uuid=gpu.uuid,
        client=client.client_id,
        name=client.identity.name,
        **{"from": move.source},
        elapsed_ns=now_ns - client.parking.began_ns if client.parking.began_ns else 0,
        why=move.source_why,
    )


# --- rebalance ------------------------------------------------------------------------------------------------------


def look(node: Node, now_ns: int) -> None:
    """Moves the client that gains most, if any does.  O(clients), once a second."""
    moves = [client.parking.move for client in node.clients.values() if client.parking.move.target]
    if not node.settings.rebalance or any(now_ns - (move.tried_at_ns or 0) < PATIENCE_NS for move in moves):
        return
    idle = [gpu for gpu in node.gpus.values() if _is_idle(gpu)]
    busy = [gpu for gpu in node.gpus.values() if node.gangs and gpu not in idle and _has_room_for_one(gpu)]
    best: tuple[int, Seat, Gpu] | None = None
    for home in node.gpus.values() if idle or busy else ():
        saved_ns = _keeps_idle_ns(node, home) if busy else 0
        emptier = [gpu for gpu in busy if _wanting(gpu) < _wanting(home)]
        for seat in home.seats.values():
            if not _may_move(seat, now_ns):
                continue
            for gain_ns, targets in ((_loses_ns(seat), idle), (saved_ns, emptier)):
                net_ns = gain_ns - _cost_ns(seat)
                if net_ns <= (0 if best is None else best[0]):
                    continue
                target = next((gpu for gpu in targets if not obstacle(node, seat.client, gpu)), None)
                if target is not None:
                    best = net_ns, seat, target
    if best is not None:
        net_ns, seat, target = best
        cost_ns = _cost_ns(seat)
        gain, cost = format_duration(net_ns + cost_ns), format_duration(cost_ns)
        if target in idle:
            why = f"its GPU would have no time for it for {gain} of the next minute"
        else:
            why = f"other GPUs of the gang beside it would be idle for {gain} of the next minute"
        _begin(node, seat.client, target, f"{why}, and the move takes about {cost}", now_ns)


def _is_idle(gpu: Gpu) -> bool:
    """No client has used it, parked ones apart."""
    if gpu.recovering or gpu.leases.by_client or gpu.switching.switch is not None:
        return False
    parked = ParkState.PARKED
    return not any(seat.place.active and seat.client.parking.state is not parked for seat in gpu.seats.values())


def _may_move(seat: Seat, now_ns: int) -> bool:
    client, tried_ns = seat.client, seat.client.parking.move.tried_at_ns
    if seat.phase not in (WAITING, HOLDING) or client.facts.paused or client.parking.state is not ParkState.RUNNING:
        return False
    return tried_ns is None or now_ns - tried_ns >= AHEAD_NS


def _loses_ns(seat: Seat) -> int:
    """Part of the next minute for which its GPU has no time for it: all that wait for it get it for equal times."""
    if seat.room.unschedulable:
        return AHEAD_NS
    if seat.phase is HOLDING:
        beside_others, progress = len(seat.gpu.leases.by_client) > 1, seat.progress
        slower = beside_others and 0.0 < progress.rate < progress.alone_rate
        return round(AHEAD_NS * (1.0 - progress.rate / progress.alone_rate)) if slower else 0
    return AHEAD_NS - AHEAD_NS // max(1, _wanting(seat.gpu))


def _wanting(gpu: Gpu) -> int:
    return len(gpu.wait_queue) + len(gpu.leases.by_client) + (gpu.switching.switch is not None)


def _has_room_for_one(gpu: Gpu) -> bool:
    """No gang uses it."""
    return not gpu.recovering and not any(seat.client.facts.gang for seat in gpu.seats.values())


def _keeps_idle_ns(node: Node, home: Gpu) -> int:
    """Time of other GPUs in the next minute that only gangs want whose member waits for a client of this GPU."""
    members = [seat.client.facts.gang for seat in home.seats.values() if seat.place.active]
    gpus = {seat.gpu.uuid: seat.gpu for gang in members if gang for seat in node.gangs[gang].seats}
    gpus.pop(home.uuid, None)
    alone = sum(
        all(seat.client.facts.gang or not seat.place.active for seat in gpu.seats.values()) for gpu in gpus.values()
    )
    return alone * AHEAD_NS // max(1, _wanting(home))


def _cost_ns(seat: Seat) -> int:
    rate = seat.gpu.switching.move_rate or USUAL_RATE
    return CONTEXTS_NS + int(2 * seat.memory.allocated_bytes / rate)
