"""Parking: an idle client leaves its GPUs altogether, and comes back at its next call.

    RUNNING ──> LEAVING ──> CLOSING ──> SAVING ──> PARKED ──> WAKING ──> RUNNING
       │           │            │          │                     │
    PREPARING      └────────────┴──────────┴──> RUNNING          └──> PARKED, and another try

- PREPARING: a client that is to move runs on while its hook makes pinned host memory for all of its memory, which takes
  longer than the eviction; then, or after a while, it leaves.
- LEAVING: leases end, and memory goes to the host by ordinary evictions.
- CLOSING: the hook closes the ways by which a call could reach the driver, or says why it cannot (`ParkAnswer`).
- SAVING: the driver's checkpoint takes the rest, contexts included (`commands.Checkpoint`).
- WAKING: the driver brings that back (`commands.Restore`); memory follows as at any switch.

Rules:
- A request for a lease ends LEAVING and CLOSING, and wakes a client in SAVING and PARKED.  No seat of the client is
  schedulable until it runs again.
- A client that cannot be parked is refused before anything moves, as far as the cause is known here.
- A client of an earlier coordinator that was told to close counts as parked: perhaps a checkpoint was made.
- When a client that wants the GPU finds no room on the card although the figures leave it some, contexts have it, which
  no eviction frees.  Then the client that has been idle longest is parked, then the next one, until there is room.
  On an integrated GPU nobody is parked for that: all would lie in the same memory.
- A client is idle when it submits nothing and waits for nothing, also with a lease: parking takes the lease first.
- A request for room is refused when no client is leaving and none can count as idle before long.
- Each state has an end: a client that does not leave or close in time stays.  After `move_stall_ns` the next one is
  parked meanwhile.
- A refusal or failure leaves the client running, and holds until it has had another lease.
- A client that is to come back on another GPU (migration.py) takes the same way, also while it wants the GPU: its
  request waits until it has moved.

Non-goals: who calls the driver (system/checkpoints.py), which calls the hook stops (client_hook/src/coord/parking.c).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine import reconcile
from nvshare.coordinator.engine.memory import checks, client_settings, residency, room
from nvshare.coordinator.model import events
from nvshare.coordinator.model.client import Client, ParkState
from nvshare.coordinator.model.commands import Checkpoint, ExpectCheckpoint, Log, ParkingOver, Restore, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, IDLE, OVERDUE, REVOKING, WAITING, Seat
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol.messages import MemoryMode, Park, ParkAnswer

RETRY_NS: Final = SECOND_NS
"""After a failed return, which may only have lacked memory for the contexts."""
LEAST_IDLE_NS: Final = 2 * SECOND_NS
"""A client that was idle for less is not parked for others: it would come back at once."""
PREPARE_NS: Final = SECOND_NS
"""Preparing lasts no longer than this time and a nanosecond for each byte."""
NO_ROOM: Final = "its memory stays within the host's, which the GPU shares, so others have no more room"
RUNNING, PREPARING, LEAVING, CLOSING, SAVING, PARKED, WAKING = ParkState


def obstacle(node: Node, client: Client) -> str:
    """Why the client cannot be parked, as far as the coordinator knows; "": it may be possible."""
    return node.cannot_park or client_obstacle(client)


def client_obstacle(client: Client) -> str:
    """As `obstacle`, of this client alone."""
    if client.identity.process_id <= 0:
        return "its process is in a foreign PID namespace"
    if not client.seats:
        return "it uses no GPU"
    if client.facts.spatial:
        return "it is a client of MPS"
    if client.memory_mode is MemoryMode.MANAGED and any(seat.memory.allocated_bytes for seat in client.seats.values()):
        return "it has managed memory, which the driver's checkpoint refuses; start it with --memory swap"
    return ""


def set_parked(node: Node, client: Client, parked: bool, now_ns: int) -> None:
    """The operator parks or wakes a client."""
    if parked:
        client.parking.refused_at = -1
        integrated = any(seat.gpu.memory.integrated for seat in client.seats.values())
        begin(node, client, now_ns, NO_ROOM if integrated else "")
        return
    client.parking.move.target = ""
    if client.parking.state is PARKED:
        wake(node, client)
    elif client.parking.state in (PREPARING, LEAVING, CLOSING):
        _stay(node, client, "")
    else:
        client.parking.unwanted = client.parking.state is SAVING


def after(node: Node, client: Client) -> int:
    """Idleness in nanoseconds after which the client is parked; 0: never."""
    own_ns = client.facts.park_after_ns
    return node.settings.park_after_of_ns(client.facts.rank.job_class) if own_ns is None else own_ns


def look(node: Node, now_ns: int) -> None:
    """Parks clients that have been idle for their time, and tries failed returns again.  O(clients), once a second."""
    for client in node.clients.values():
        parking, after_ns = client.parking, after(node, client)
        if parking.state is PARKED and parking.retry_at_ns is not None and now_ns >= parking.retry_at_ns:
            wake(node, client)
        elif after_ns and (idle_ns := _idle_ns(node, client, now_ns)) is not None and idle_ns >= after_ns:
            begin(node, client, now_ns)
    for gpu in node.gpus.values():
        if gpu.memory.short or _is_tight(gpu):
            _make_room(node, gpu, now_ns)


def _used_ns(seat: Seat) -> int:
    """When the client used the GPU last: it got a lease, or its hook reported what it does, as it does at changes."""
    lease = seat.lease
    return max(seat.place.attached_at_ns, lease.granted_at_ns or lease.began_ns, seat.progress.last.at_ns)


def _asks(seat: Seat) -> bool:
    """A thread of the client waits for memory."""
    return seat.memory.growth is not None or seat.client.client_id in seat.gpu.memory.immovable.questions


def _idle_ns(node: Node, client: Client, now_ns: int) -> int | None:
    """How long the client has used none of its GPUs; None: it waits, or cannot be parked, as far as is known."""
    seats, parking = client.seats.values(), client.parking
    if parking.state is not RUNNING or parking.refused_at == _leases(client) or obstacle(node, client):
        return None
    if any(seat.phase not in (IDLE, HOLDING, REVOKING) or _asks(seat) for seat in seats):
        return None
    return now_ns - max(map(_used_ns, seats))


def wants_looks(node: Node) -> bool:
    """Something is to be done once a second.  O(GPUs)."""
    if node.settings.parks or node.parking or node.own_park_times:
        return True
    return any(gpu.memory.short or _is_crowded(gpu) for gpu in node.gpus.values())


def _is_crowded(gpu: Gpu) -> bool:
    """What is no memory of clients takes more of the card than the capacity leaves."""
    memory = gpu.memory
    return memory.other_bytes > memory.total_bytes - memory.capacity_bytes


def _is_tight(gpu: Gpu) -> bool:
    """A client that wants the GPU will not find the room that the figures leave it."""
    memory = gpu.memory
    if not _is_crowded(gpu):
        return False
    for seat in gpu.seats.values():
        if seat.phase is not IDLE:
            growth = seat.memory.growth
            needs = max(room.needs_bytes(seat), growth.total_bytes if growth is not None else 0)
            clients = min(memory.capacity_bytes, memory.claimed_bytes - seat.memory.claimed_bytes + needs)
            if clients + memory.other_bytes > memory.total_bytes:
                return True
    return False


def _make_room(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Parks the client that has been idle longest, one after the other."""
    checks.ask(node, gpu)
    clients = [seat.client for seat in gpu.seats.values()]
    leaving = [client.parking for client in clients if client.parking.state in (LEAVING, CLOSING, SAVING)]
    if any(now_ns - parking.began_ns < node.settings.move_stall_ns for parking in leaving):
        return
    may_park = (client for client in clients if client.facts.park_after_ns != 0 and not gpu.memory.integrated)
    idle = {client: ns for client in may_park if (ns := _idle_ns(node, client, now_ns)) is not None}
    longest = max(idle, key=lambda client: idle[client], default=None)
    if longest is not None and idle[longest] >= LEAST_IDLE_NS:
        begin(node, longest, now_ns, "others need its room")
        return
    growing = [seat.memory.growth for seat in gpu.memory.growing.values() if seat.memory.growth is not None]
    soon = idle and any(growth.waits and now_ns < growth.asked_ns + LEAST_IDLE_NS for growth in growing)
    if soon or any(parking.state is SAVING for parking in leaving):
        return
    gpu.memory.short = False
    for growth in growing:
        if growth.waits and not growth.evicts:
            growth.deadline_ns = now_ns
    node.concern(gpu)


def _leases(client: Client) -> int:
    return sum(seat.statistics.leases for seat in client.seats.values())


def _enter(node: Node, client: Client, state: ParkState) -> None:
    parking = client.parking
    parking.state = state
    if state in (PREPARING, LEAVING, CLOSING) or parking.retry_at_ns is not None:
        node.parking[client.client_id] = client
    else:
        node.parking.pop(client.client_id, None)
    if state in (PREPARING, LEAVING):
        identity = client.identity
        node.out.append(ExpectCheckpoint(client.client_id, identity.process_id, identity.user_id))
    elif state is RUNNING:
        node.out.append(ParkingOver(client.client_id))
    for seat in client.seats.values():
        seat.gpu.schedule.stale = True
        node.concern(seat.gpu)
    _notify(node, client)


def _notify(node: Node, client: Client) -> None:
    parking, uuid = client.parking, client.parking.move.target or None
    node.notify("parking", client=client.client_id, uuid=uuid, state=parking.state.value, why=parking.why)


def refuse(node: Node, client: Client, why: str) -> None:
    """Says why the client stays as it is."""
    client.parking.why = why
    _notify(node, client)


def prepare(node: Node, seat: Seat, now_ns: int) -> None:
    """The client leaves its GPU when its host memory is ready, which may be at once."""
    seat.client.parking.began_ns = now_ns
    _enter(node, seat.client, PREPARING)
    client_settings.send_prepare(node, seat)


def _is_prepared(seat: Seat, now_ns: int) -> bool:
    movable = seat.memory.resident_bytes - seat.memory.pinned_bytes
    ends_ns = seat.client.parking.began_ns + PREPARE_NS + movable
    return seat.memory.prepared_bytes >= movable or now_ns >= ends_ns


def begin(node: Node, client: Client, now_ns: int, why: str = "") -> None:
    """The client leaves its GPUs, unless it is on its way."""
    parking = client.parking
    if parking.state not in (RUNNING, PREPARING):
        return
    against = obstacle(node, client)
    if against and parking.state is PREPARING:
        _stay(node, client, against)
        return
    if against:
        parking.refused_at = _leases(client)
        refuse(node, client, against)
        return
    parking.why, parking.began_ns, parking.since_ns = why, now_ns, now_ns
    _enter(node, client, LEAVING)
    for seat in client.seats.values():
        reconcile.withdraw(node, seat, "parked", now_ns)


def advance(node: Node, now_ns: int) -> None:
    """Level-triggered: what clients that are on their way out need next."""
    for client in list(node.parking.values()):
        if client.parking.state is PARKED:
            continue  # it waits for its next attempt to come back
        if client.parking.state is PREPARING:
            if all(_is_prepared(seat, now_ns) for seat in client.used_seats):
                begin(node, client, now_ns)
            for seat in client.used_seats:  # it may have grown
                client_settings.send_prepare(node, seat)
            continue
        if not client.parking.move.target and any(seat.phase is WAITING for seat in client.seats.values()):
            _stay(node, client, "it wants the GPU")
        elif why := _stuck(node, client, now_ns):
            _stay(node, client, why)
        elif client.parking.state is LEAVING and all(_has_left(node, seat, now_ns) for seat in client.seats.values()):
            client.parking.since_ns = now_ns
            _enter(node, client, CLOSING)
            node.out.append(Send(client.client_id, Park(True)))


def _stuck(node: Node, client: Client, now_ns: int) -> str:
    """Why a client on its way out is not waited for any longer; "": it is."""
    seats, settings = client.seats.values(), node.settings
    if client.parking.state is CLOSING:
        return "its hook does not answer" if now_ns >= client.parking.since_ns + settings.move_stall_ns else ""
    if any(seat.phase is OVERDUE for seat in seats):
        return "it does not give its lease back"
    most_ns = settings.move_deadline_ns + sum(seat.memory.allocated_bytes for seat in seats)
    return "it does not leave its GPUs in time" if now_ns >= client.parking.since_ns + most_ns else ""


def _has_left(node: Node, seat: Seat, now_ns: int) -> bool:
    """All movable memory of the seat is on the host.  Lowers its target if it is not."""
    memory, move = seat.memory, seat.moves.move
    if move is not None and (move.moving or move.stalled):
        if now_ns >= move.heard_ns + node.settings.move_stall_ns:
            _stay(node, seat.client, "it does not move its memory")
        return False
    if seat.phase not in (IDLE, WAITING) or seat.lease.stray or _asks(seat):
        return False
    movable = memory.resident_bytes - memory.pinned_bytes
    if seat.client.memory_mode is not MemoryMode.SWAP or movable <= 0:
        return move is None
    if residency.movable_bytes(node, seat) < movable:
        _stay(node, seat.client, "the host has no room for its memory (host_budget)")
        return False
    residency.aim(node, seat, memory.pinned_bytes, now_ns)
    return False


def _stay(node: Node, client: Client, why: str, *, lost: bool = False) -> None:
    """The client runs on."""
    parking = client.parking
    if parking.state is RUNNING:
        return
    if parking.state not in (PREPARING, LEAVING):
        seats = client.used_seats
        moved = (seats[0].ordinal, seats[0].gpu.uuid) if len(seats) == 1 and parking.move.source else (0, "")
        node.out.append(Send(client.client_id, Park(False, *moved, lost)))
    parking.why, parking.refused_at = why, _leases(client) if why else -1
    parking.retry_at_ns, parking.unwanted, parking.move.target = None, False, ""
    _enter(node, client, RUNNING)
    for seat in client.seats.values():
        client_settings.send_prepare(node, seat)
        if seat.phase is WAITING and seat.schedulable and seat not in seat.gpu.wait_queue:
            seat.gpu.wait_queue.join(seat)


def answered(node: Node, client: Client, message: ParkAnswer, now_ns: int) -> None:
    """The hook has closed its ways to the driver, or cannot."""
    if client.parking.state is not CLOSING:
        return  # it crosses the end of the attempt
    if not message.ready:
        _stay(node, client, message.reason or "its hook refuses")
        return
    _enter(node, client, SAVING)
    identity = client.identity
    node.out.append(Checkpoint(client.client_id, identity.process_id, identity.user_id))


def saved(node: Node, event: events.Saved, now_ns: int) -> None:
    """The checkpoint is made, or has failed and the process runs."""
    client = node.clients.get(event.client)
    if client is None or client.parking.state is not SAVING:
        return
    if event.error:
        node.out.append(Log(logging.WARNING, f"{client.identity} cannot be parked: {event.error}"))
        if event.unsure:
            client.parking.move.target = ""
            wake(node, client, event.error)
        else:
            _stay(node, client, event.error, lost=event.lost)
        return
    _enter(node, client, PARKED)
    for seat in client.seats.values():
        checks.ask(node, seat.gpu)
        seat.gpu.memory.short = False
        residency.more_room(seat.gpu, now_ns)
    parking = client.parking
    if parking.unwanted or parking.move.target or any(seat.phase is WAITING for seat in client.seats.values()):
        wake(node, client)


def requested(node: Node, client: Client) -> None:
    """A thread of the client wants a GPU."""
    if client.parking.state is PARKED and client.parking.retry_at_ns is None:
        wake(node, client)


def wake(node: Node, client: Client, why: str = "") -> None:
    """The driver brings the client back, on the GPU to which it moves if there is one."""
    parking = client.parking
    parking.retry_at_ns, parking.unwanted, parking.why = None, False, why
    _enter(node, client, WAKING)
    move = (client.used_seats[0].gpu.uuid, parking.move.target) if parking.move.target else ()
    node.out.append(Restore(client.client_id, client.identity.process_id, client.identity.user_id, *move))


def restored(node: Node, event: events.Restored, now_ns: int) -> None:
    """The process runs again, or there is no room for its contexts yet."""
    client = node.clients.get(event.client)
    if client is None or client.parking.state is not WAKING:
        return
    if event.lost:  # its calls tell it
        node.out.append(Log(logging.ERROR, f"{client.identity} cannot be woken: {event.error}; end it"))
        _stay(node, client, event.error, lost=True)
        return
    if event.error:
        client.parking.why = event.error
        client.parking.retry_at_ns = now_ns + RETRY_NS
        for seat in client.seats.values():
            seat.gpu.memory.short = True
        node.out.append(Log(logging.WARNING, f"{client.identity} cannot be woken: {event.error}; it is tried again"))
        _enter(node, client, PARKED)
        return
    _stay(node, client, client.parking.why)
    for seat in client.seats.values():
        checks.ask(node, seat.gpu)  # what the checkpoint took counts again
