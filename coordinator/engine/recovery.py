"""Attaching a GPU, and claims of clients that say that they hold its lease already.

A hook makes a claim when it connects again.  "Never two holders" follows from one rule.  A claim is confirmed only if
its id is near the last one that was given (`NEAR_IDS`), this coordinator has no holder on the GPU and no grant under
way, and one of these holds:
(a) the journal names the client's process, and the GPU waits for exactly this process;
(b) no lease is out, no process is waited for, and the id is one that neither this coordinator nor its journal has
    given: it is a lease of an earlier coordinator whose journal is lost.

Further rules:
- A process that has the claimed lease by an older connection keeps it: the lease moves to the new connection.
- In concurrent sharing a claim is confirmed unless another client holds that very id.
- Every other claim is *stray*: it is revoked at once and the client is not the holder.
- A stray client may be at work during recovery, or if this coordinator knows its process as the lease's last holder:
  then the GPU is granted to others only after its release or its drain deadline.  Any other stray claim delays no one.

Non-goals: ordinary grants (leases.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from nvshare.coordinator.engine import leases
from nvshare.coordinator.engine.gangs import slots
from nvshare.coordinator.engine.memory import checks, claims, room
from nvshare.coordinator.engine.memory.client_settings import send_settings
from nvshare.coordinator.model.client import Client, ParkState
from nvshare.coordinator.model.commands import MANY_HOLDERS, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.memory import SeatMemory
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, IDLE, OVERDUE, REVOKING, WAITING, Place, Seat
from nvshare.coordinator.model.settings import Sharing
from nvshare.coordinator.protocol.messages import (
    AttachGpu,
    MemoryMode,
    Rejected,
    Rejection,
    RemoteProtocolError,
    Revoke,
)

NEAR_IDS: Final = 1 << 20
"""The journal is written before a grant is sent, so it knows the last id.  A later id is honest only if the journal is
lost or could not be written.  Numbering continues behind every claim, stray ones included: a hook takes a later grant
of that id for a confirmation that its release has crossed, and ignores it.  The bound keeps clients from using up the
ids.
"""


def attach(node: Node, client: Client, message: AttachGpu, now_ns: int) -> None:
    """The client uses this GPU from now on."""
    gpu = node.gpus.get(message.uuid)
    known = client.seats.get(message.gpu)
    if known is not None:
        if known.gpu is not gpu:
            raise RemoteProtocolError(f"ordinal {message.gpu} is {known.gpu.uuid} already, not {message.uuid}")
        if message.lease_id not in (0, known.lease.lease_id):
            raise RemoteProtocolError(
                f"claims lease {message.lease_id} on a connection that has {known.lease.lease_id}"
            )
        send_settings(node, known, even_if_unchanged=True)
        if message.wanted:
            leases.request(node, known, now_ns)
        node.concern(known.gpu)
        return
    if gpu is None:
        known_gpus = ", ".join(node.gpus) or "none"
        text = f"no GPU {message.uuid} here; this coordinator serves: {known_gpus}"
        node.out.append(Send(client.client_id, Rejected(int(Rejection.UNKNOWN_GPU), False, text[:250], message.gpu)))
        return
    if client.client_id in gpu.seats:
        raise RemoteProtocolError(f"{message.uuid} is attached under another ordinal already")
    if message.lease_id and (message.parked or client.parking.closed):
        raise RemoteProtocolError(f"claims lease {message.lease_id}, and is parked")
    gpu.recovery.survivors = gpu.recovery.survivors or message.lease_id != 0 or message.allocated_bytes != 0
    seat = _add_seat(node, client, gpu, message, message.allocated_bytes, now_ns)
    if message.parked and len(client.seats) == 1:  # of a client that has asked for nothing yet
        client.parking.state = ParkState.PARKED  # perhaps: the driver knows (engine/parking/parking.py)
    _resolve_claim(node, gpu, seat, message, now_ns)
    if seat.phase is HOLDING and (client.facts.paused or client.parking.state is not ParkState.RUNNING):
        leases.revoke(node, gpu, seat, "paused" if client.facts.paused else "parked", now_ns)  # since its hello
    if message.wanted:
        leases.request(node, seat, now_ns)
    node.concern(gpu)


def move_seats(node: Node, seat: Seat, gpu: Gpu, now_ns: int) -> None:
    """The seat is on this GPU from now on, and one that the client has there is where this one was.

    Neither has a lease, and no memory of theirs moves.
    """
    there, home = gpu.seats.get(seat.client.client_id), seat.gpu
    pairs = [(seat, gpu)] if there is None else [(seat, gpu), (there, home)]
    arrivals = [(each, target, _as_attached(each, target), each.room.promised_bytes) for each, target in pairs]
    for each, _ in pairs:
        leases.client_left(node, each.gpu, each, now_ns)
    for arrival in arrivals:
        _arrive(node, *arrival, now_ns)


def _as_attached(seat: Seat, gpu: Gpu) -> AttachGpu:
    assert seat.phase in (IDLE, WAITING), f"{seat.phase} while it is moved"
    assert seat.moves.move is None, "its memory is on the host"
    allocated, resident, pinned, _ = seat.memory.reported  # that comes back, not what is on the GPU that it leaves
    return AttachGpu(
        gpu=seat.ordinal,
        uuid=gpu.uuid,
        lease_id=0,
        wanted=seat.phase is WAITING,
        allocated_bytes=allocated,
        resident_bytes=resident,
        pinned_bytes=pinned,
    )


def _arrive(node: Node, seat: Seat, gpu: Gpu, figures: AttachGpu, promised_bytes: int, now_ns: int) -> None:
    old, had = seat.gpu, seat.memory
    gpu.leases.next_lease_id = max(gpu.leases.next_lease_id, old.leases.next_lease_id)  # the hook expects growing ids
    attached_bytes = max(had.attached_bytes, figures.allocated_bytes)
    moved = _add_seat(node, seat.client, gpu, figures, attached_bytes, now_ns)
    moved.room.promised_bytes = promised_bytes
    room.update(moved)
    moved.memory.released_bytes = had.released_bytes
    moved.statistics, moved.progress = seat.statistics, seat.progress
    moved.moves = replace(seat.moves, rest=None)  # the hook counts its targets by ordinal
    moved.place.recent, moved.place.attached_at_ns = seat.place.recent, seat.place.attached_at_ns
    moved.place.last_released_ns, moved.place.charged_ns = seat.place.last_released_ns, seat.place.charged_ns
    if seat.place.active:
        leases.activate(node, gpu, moved)
    if figures.wanted:
        leases.request(node, moved, now_ns)


def _add_seat(node: Node, client: Client, gpu: Gpu, message: AttachGpu, attached_bytes: int, now_ns: int) -> Seat:
    limit = client.facts.limit_on(gpu.uuid)
    memory = SeatMemory(limit_bytes=limit, highest_limit_bytes=limit, attached_bytes=attached_bytes)
    place = Place(attached_at_ns=now_ns, turn=gpu.leases.next_turn)
    seat = Seat(client, gpu, message.gpu, place, memory)
    gpu.leases.next_turn += 1
    client.seats[message.gpu] = seat
    gpu.seats[client.client_id] = seat
    earlier = gpu.memory.immovable.ending.pop(client.identity.process_id, None)
    if earlier is not None:  # it has connected again, and what it had counts
        listed, process = gpu.memory.listed, str(client.identity.process_id)
        listed[process] = max(earlier.bytes, listed.get(process, 0))
    slots.add_member(node, seat)
    host = 0 if client.memory_mode is MemoryMode.DEVICE else max(0, message.allocated_bytes - message.resident_bytes)
    claims.set_usage(seat, message.allocated_bytes, message.resident_bytes, message.pinned_bytes, host)
    seat.memory.reserved_bytes = seat.memory.allocated_bytes
    claims.claim(seat)
    room.update(seat)
    checks.reported(node, seat)
    send_settings(node, seat)
    name, process_id = client.identity.name, client.identity.process_id
    node.notify("attached", uuid=gpu.uuid, client=client.client_id, name=name, process=process_id)
    return seat


def _resolve_claim(node: Node, gpu: Gpu, seat: Seat, message: AttachGpu, now_ns: int) -> None:
    process_id, may_work = seat.client.identity.process_id, gpu.recovering
    expected = gpu.recovery.expected_holder not in (None, MANY_HOLDERS) and gpu.recovery.expected_holder == process_id
    if expected:
        # The expected process has come back, so recovery ends, whatever it claims.
        gpu.recovery.expected_holder = None
    if message.lease_id == 0:
        return
    gpu.schedule.side_by_side = False  # what it claims is no grant to a member
    told = {"client": seat.client.client_id, "lease": message.lease_id}
    old = _earlier_seat(gpu, message.lease_id, process_id)
    if old is not None and old.phase is HOLDING:
        _transfer_lease(node, gpu, old, seat, now_ns)
        node.notify("claimed", uuid=gpu.uuid, **told)
        return
    deadline_ns = node.settings.drain_deadline_ns
    drain_deadline_ns = now_ns + deadline_ns
    if old is not None and old.phase is REVOKING:  # its release will come by the new connection
        may_work, drain_deadline_ns = True, old.lease.drain_deadline_ns or now_ns
        leases.end_lease(node, gpu, old, now_ns)
    confirmed = _is_confirmed(gpu, message.lease_id, expected)
    gpu.schedule.stale = True
    if message.lease_id < gpu.leases.next_lease_id + NEAR_IDS:
        gpu.leases.next_lease_id = max(gpu.leases.next_lease_id, message.lease_id + 1)
    if confirmed:
        gpu.leases.last_holder = seat.client.client_id
        leases.start_lease(node, gpu, seat, message.lease_id, gpu.rules.quantum_ns, now_ns)
        node.notify("claimed", uuid=gpu.uuid, **told)
        return
    seat.lease.stray = True
    seat.lease.lease_id = message.lease_id
    node.notify("stray", uuid=gpu.uuid, **told)
    if not may_work and gpu.recovery.lost != (message.lease_id, process_id):
        node.out.append(Send(seat.client.client_id, Revoke(seat.ordinal, message.lease_id, deadline_ns)))
        return
    gpu.recovery.lost = (0, 0)  # one claim may delay the others
    gpu.leases.by_client[seat.client.client_id] = seat
    leases.revoke(node, gpu, seat, "claim", now_ns)
    seat.lease.drain_deadline_ns = drain_deadline_ns
    claims.claim(seat)


def _earlier_seat(gpu: Gpu, lease_id: int, process_id: int) -> Seat | None:
    """The seat of an older connection of this process that has this lease."""
    for seat in gpu.leases.by_client.values():
        if seat.lease.lease_id == lease_id and seat.client.identity.process_id == process_id:
            return seat
    return None


def _transfer_lease(node: Node, gpu: Gpu, old: Seat, seat: Seat, now_ns: int) -> None:
    """Moves the lease from an older connection of the same process, with the rest of its quantum."""
    lease_id = old.lease.lease_id
    ends_ns, called = old.lease.ends_ns, old.lease.called
    left_ns = None if ends_ns is None else max(1, ends_ns - now_ns)
    leases.end_lease(node, gpu, old, now_ns)
    gpu.leases.last_holder = seat.client.client_id
    leases.start_lease(node, gpu, seat, lease_id, left_ns, now_ns)
    seat.lease.called = called


def _is_confirmed(gpu: Gpu, lease_id: int, expected: bool) -> bool:
    if lease_id >= gpu.leases.next_lease_id + NEAR_IDS:
        return False
    several = gpu.settings.sharing is Sharing.AUTO and gpu.recovery.expected_holder == MANY_HOLDERS
    if gpu.settings.sharing is Sharing.CONCURRENT or several:
        return all(seat.lease.lease_id != lease_id for seat in gpu.leases.by_client.values())
    if expected:
        # Stray and overdue leases are not the holder's.  Leases of concurrent sharing during recovery are.
        others = all(seat.lease.stray or seat.phase is OVERDUE for seat in gpu.leases.by_client.values())
        return others and gpu.switching.switch is None
    return (
        not gpu.recovering
        and not gpu.leases.by_client
        and gpu.switching.switch is None
        and lease_id >= gpu.leases.next_lease_id
    )
