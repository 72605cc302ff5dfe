"""The life of one lease: request, grant, revoke, release, overdue.

Rules:
- Lease ids of a GPU only grow.
- A release is accepted for the lease that the client has, whether it was revoked or not.
- A drain that passes its deadline is set aside: other clients take turns beside it.
- The journal names every process that may work on the GPU when this coordinator dies: a sole holder, `MANY_HOLDERS`
  for several, and in recovery the process that this coordinator waits for.  Overdue and stray leases beside a holder
  are left out: their clients are told to stop, and a claim of theirs makes the lease stray again.

Non-goals: when leases begin and end (turns.py), what memory moves (memory/switching.py), claims (recovery.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from nvshare.coordinator.engine import standby
from nvshare.coordinator.gangs import coscheduling, members
from nvshare.coordinator.memory import forecast, orders, pinning, switching
from nvshare.coordinator.memory.client_settings import send_settings, send_settings_to_all
from nvshare.coordinator.memory.quantum import automatic_quantum_ns, moving_average
from nvshare.coordinator.model.commands import MANY_HOLDERS, Kill, Log, Notify, RecordLease, Send
from nvshare.coordinator.model.events import Released
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, IDLE, OVERDUE, REVOKING, WAITING, WITH_LEASE, Seat
from nvshare.coordinator.model.settings import OverdueAction
from nvshare.coordinator.protocol.messages import Grant, MemoryMode, RemoteProtocolError, Revoke, Sharing
from nvshare.scheduler_policies.api import ClientView


def request_lease(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """A thread of the client waits.  Idempotent: a request that crosses a grant or a revocation changes nothing."""
    if seat.phase is not IDLE:
        return
    _activate(node, gpu, seat)
    seat.enter(WAITING)
    place = seat.place
    place.waiting_since_ns = now_ns
    place.view = None
    if seat.schedulable:
        gpu.wait_queue.join(seat)
        holder = gpu.leases.holder
        if len(gpu.wait_queue) == 1 and holder is not None and holder.phase is HOLDING:
            renew_quantum(node, gpu, holder, now_ns)
        consider_preemption(node, gpu, now_ns)
        if place.last_released_ns != now_ns or coscheduling.missed_turn(seat, now_ns):
            coscheduling.member_waits(node, seat, now_ns)


def _activate(node: Node, gpu: Gpu, seat: Seat) -> None:
    """From its first request until it leaves, the client counts among those that use the GPU."""
    if seat.place.active:
        return
    seat.place.active = True
    gpu.leases.active_seats += 1
    if gpu.leases.active_seats == 2:
        send_settings_to_all(node, gpu)  # from now on they are paced


def consider_preemption(node: Node, gpu: Gpu, now_ns: int) -> None:
    """A client began to wait, or priorities changed: the policy may revoke the holder's lease early."""
    holder = gpu.leases.holder
    if holder is None or holder.phase is not HOLDING or not len(gpu.wait_queue):
        return
    seat = holder
    if members.protected_from_policy(seat):
        return
    if gpu.policy_guard.preempt(lambda: seat.view(now_ns), gpu.wait_queue.views(), gpu.view(), now_ns, node.out):
        for mate in members.mates_in_turn(seat, now_ns):
            if len(mate.gpu.wait_queue):
                revoke(node, mate.gpu, mate, "gang", now_ns)
        revoke(node, gpu, seat, "preempted", now_ns)


def blocked(gpu: Gpu) -> bool:
    """A lease is in use, or its drain is within the deadline."""
    return any(seat.phase is not OVERDUE for seat in gpu.leases.by_client.values())


def grant(node: Node, gpu: Gpu, seat: Seat, quantum_ns: int, now_ns: int) -> None:
    """The seat has the lease from now on.  The caller has removed it from the wait queue."""
    leases, mine, all_seats = gpu.leases, seat.statistics, gpu.statistics
    lease_id = leases.next_lease_id
    leases.next_lease_id = lease_id + 1
    if seat.client.memory_mode is MemoryMode.SWAP:  # the hook starts from this figure too: it asks before it grows
        seat.memory.reserved_bytes = seat.memory.resident_bytes
    client = seat.client.client_id
    waited_ns = 0
    if seat.place.waiting_since_ns is not None:
        waited_ns = now_ns - seat.place.waiting_since_ns
        seat.place.waiting_since_ns = None
        mine.waited_ns += waited_ns
        all_seats.waited_ns += waited_ns
        mine.max_wait_ns = max(mine.max_wait_ns, waited_ns)
        all_seats.max_wait_ns = max(all_seats.max_wait_ns, waited_ns)
    start_lease(node, gpu, seat, lease_id, quantum_ns, now_ns)
    mine.leases += 1
    gang_turn = seat.gang_turn
    gang_turn.protected_from_gangs = gpu.gangs.debt_ns > 0 or gang_turn.remaining_ns > 0
    gang_turn.remaining_ns = 0
    gang_turn.co_scheduled_at_ns = None
    all_seats.grants += 1
    if leases.last_holder != client:
        all_seats.handovers += leases.last_holder != 0
        orders.close_turn(gpu)
        leases.last_holder = client
        seat.lease.handed_over_from_ns = leases.free_since_ns
    else:
        seat.lease.handed_over_from_ns = None
    leases.free_since_ns = None
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": client,
        "name": seat.client.identity.name,
        "lease": lease_id,
        "quantum_ns": quantum_ns,
        "waiters": len(gpu.wait_queue) if gpu.rules.sharing is Sharing.EXCLUSIVE else 0,
        "waited_ns": waited_ns,
    }
    node.out.append(Notify("granted", values))


def start_lease(node: Node, gpu: Gpu, seat: Seat, lease_id: int, quantum_ns: int, now_ns: int) -> None:
    """What a grant and a confirmed claim have in common: records, journal, message."""
    client, lease, leases = seat.client.client_id, seat.lease, gpu.leases
    _activate(node, gpu, seat)
    seat.enter(HOLDING)
    lease.lease_id = lease_id
    lease.granted_at_ns = seat.gang_turn.accounted_until_ns = now_ns
    lease.revoked_at_ns = 0
    lease.begin_quantum(now_ns, quantum_ns)
    lease.alerted = False
    seat.place.view = None
    leases.by_client[client] = seat
    waiters = 0
    if gpu.rules.sharing is Sharing.EXCLUSIVE:
        assert leases.holder is None, f"{gpu.uuid}: a second holder"
        leases.holder = seat
        leases.policy_epoch = gpu.policy_guard.replaced
        waiters = len(gpu.wait_queue)
    lease.waiters_sent = waiters > 0
    send_settings(node, seat)
    record(node, gpu)
    node.out.append(Send(client, Grant(seat.ordinal, lease_id, quantum_ns, waiters)))


def revoke(node: Node, gpu: Gpu, seat: Seat, why: str, now_ns: int) -> None:
    """Asks for the lease back.  The seat HOLDS it."""
    lease, client = seat.lease, seat.client.client_id
    if seat is gpu.leases.holder and lease.granted_at_ns is not None:
        gpu.leases.turns_closed_ns += now_ns - lease.granted_at_ns
        members.account_turn(seat, now_ns)
    seat.enter(REVOKING)
    deadline_ns = node.settings.leases.drain_deadline_ns
    lease.revoked_at_ns = now_ns
    lease.drain_deadline_ns = now_ns + deadline_ns
    seat.statistics.revokes += 1
    gpu.statistics.revokes += 1
    if seat.gang_turn.gang is not None or seat.gang_turn.remaining_ns:
        node.changed_gpus[gpu.uuid] = gpu
    node.out.append(Send(client, Revoke(seat.ordinal, lease.lease_id, deadline_ns)))
    standby.alert_next(node, gpu, seat, now_ns)
    node.out.append(Notify("revoked", {"uuid": gpu.uuid, "client": client, "lease": lease.lease_id, "why": why}))


def set_overdue(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """The drain has passed its deadline.  Invariant 10: a hung client does not hang the others."""
    co_scheduled = members.was_co_scheduled(seat)
    seat.enter(OVERDUE)
    seat.gang_turn.remaining_ns = 0
    seat.lease.drain_deadline_ns = None
    if seat is gpu.leases.holder:
        gpu.leases.holder = None
        gpu.leases.last_holder = seat.client.client_id
    _count_overdue(node, gpu, seat)
    _notify_policy(node, gpu, seat, co_scheduled, now_ns)


def _count_overdue(node: Node, gpu: Gpu, seat: Seat) -> None:
    """Counts, logs, and acts as configured."""
    seat.statistics.overdue += 1
    gpu.statistics.overdue += 1
    client, action = seat.client, node.settings.leases.overdue_action
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": client.client_id,
        "lease": seat.lease.lease_id,
        "action": action.value,
    }
    node.out.append(Notify("overdue", values))
    text = f"{gpu.uuid}: {client.identity} did not drain in time; action: {action.value}"
    node.out.append(Log(logging.WARNING, text))
    if action is OverdueAction.DEMOTE:
        seat.place.demoted = True
    elif action is OverdueAction.KILL:
        node.out.append(Kill(client.client_id, client.identity.process_id, text))


def _notify_policy(node: Node, gpu: Gpu, seat: Seat, co_scheduled: bool, now_ns: int) -> None:
    """The policy hears of the end of a turn once: when the lease is released or becomes overdue."""

    def view() -> ClientView:
        return replace(seat.view(now_ns), called=True) if co_scheduled else seat.view(now_ns)

    gpu.policy_guard.released(view, now_ns, node.out)


def end_lease(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> int:
    """The lease is over, for whatever reason.  Returns how long it was held."""
    leases, lease, place = gpu.leases, seat.lease, seat.place
    del leases.by_client[seat.client.client_id]
    held_ns = 0 if lease.granted_at_ns is None else now_ns - lease.granted_at_ns
    if seat is leases.holder:
        if seat.phase is HOLDING and lease.granted_at_ns is not None:
            leases.turns_closed_ns += held_ns
            members.account_turn(seat, now_ns)
        leases.holder = None
    members.lease_ended(seat)
    seat.enter(IDLE)
    seat.statistics.used_ns += held_ns
    gpu.statistics.held_ns += held_ns
    lease.granted_at_ns = None
    lease.drain_deadline_ns = None
    place.last_released_ns = now_ns
    if not seat.gang_turn.remaining_ns:
        place.turn = leases.next_turn
        leases.next_turn += 1
    lease.waiters_sent = False
    lease.stray = False
    place.view = None
    lease.lease_id = 0
    return held_ns


def release(node: Node, gpu: Gpu, seat: Seat, event: Released, now_ns: int) -> None:
    """The client gives its lease back."""
    lease = seat.lease
    if event.lease_id != lease.lease_id or seat.phase not in WITH_LEASE:
        raise RemoteProtocolError(f"releases lease {event.lease_id}, but has {lease.lease_id or 'none'}")
    revoked = seat.phase is not HOLDING
    in_time = seat.phase is not OVERDUE
    idle = event.idle and not revoked
    _measure_switch(gpu, node, seat, event, now_ns)
    gpu.leases.free_since_ns = min(now_ns, lease.revoked_at_ns + event.drain_ns) if revoked else now_ns
    seat.statistics.submissions += event.submissions
    seat.statistics.idle_releases += idle
    gpu.statistics.idle_releases += idle
    if not event.drained and in_time:
        _count_overdue(node, gpu, seat)
    elif in_time:
        seat.place.demoted = False
    if not event.wanted:
        seat.gang_turn.remaining_ns = 0
    co_scheduled = members.was_co_scheduled(seat)
    held_ns = end_lease(node, gpu, seat, now_ns)
    if in_time and not seat.gang_turn.remaining_ns:
        _notify_policy(node, gpu, seat, co_scheduled, now_ns)
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": seat.client.client_id,
        "lease": event.lease_id,
        "idle": idle,
        "drained": event.drained,
        "drain_ns": event.drain_ns,
        "held_ns": held_ns,
        "opened_at_ns": event.opened_at_ns,
    }
    node.out.append(Notify("released", values))
    pinning.lease_ended(node, seat, event, revoked=revoked, now_ns=now_ns)
    if event.wanted:
        request_lease(node, gpu, seat, now_ns)


def client_left(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """The client is gone.  Invariant 6: everything that it held or waited for on this GPU is free."""
    client = seat.client.client_id
    if seat in gpu.wait_queue:
        gpu.wait_queue.leave(seat)
    if seat.phase in WITH_LEASE:
        gpu.leases.free_since_ns = now_ns
        in_time, co_scheduled = seat.phase is not OVERDUE, members.was_co_scheduled(seat)
        end_lease(node, gpu, seat, now_ns)
        if in_time:
            _notify_policy(node, gpu, seat, co_scheduled, now_ns)
    del gpu.seats[client]
    switching.client_left(node, seat, now_ns)
    coscheduling.remove_member(node, seat)
    gpu.policy_guard.gone(client, node.out)
    if seat.place.active:
        gpu.leases.active_seats -= 1
        if gpu.leases.active_seats == 1:
            send_settings_to_all(node, gpu)  # the one left need not be paced


def _measure_switch(gpu: Gpu, node: Node, seat: Seat, event: Released, now_ns: int) -> None:
    """Takes samples of the hand-over and the drain.  The client reports the figures, so impossible ones are dropped."""
    granted_at_ns, costs = seat.lease.granted_at_ns, gpu.switching
    if granted_at_ns is None:
        return
    start_ns, opened_at_ns, drain_ns = seat.lease.handed_over_from_ns, event.opened_at_ns, event.drain_ns
    if start_ns is not None and granted_at_ns <= opened_at_ns <= now_ns and opened_at_ns >= start_ns:
        sample_ns = opened_at_ns - start_ns
        costs.recent_handovers_ns.append(sample_ns)
        costs.handover_average_ns = moving_average(costs.handover_average_ns, sample_ns)
    if seat.phase is HOLDING or drain_ns > now_ns - granted_at_ns:
        return
    costs.recent_drains_ns.append(drain_ns)
    costs.drain_average_ns = moving_average(costs.drain_average_ns, drain_ns)
    costs.measured += 1
    if gpu.rules.quantum_setting_ns is None:
        set_quantum(gpu, automatic_quantum_ns(gpu, node.settings))


def set_quantum(gpu: Gpu, quantum_ns: int) -> None:
    """Puts a quantum in force, also for the present lease unless the policy chose another one for it."""
    before_ns = gpu.rules.quantum_ns
    if quantum_ns == before_ns:
        return
    gpu.rules.quantum_ns = quantum_ns
    gpu.rules.view = None
    holder = gpu.leases.holder
    if holder is None or holder.phase is not HOLDING:
        return
    lease = holder.lease
    if lease.quantum_ends_ns == lease.quantum_since_ns + before_ns and not members.in_gang_turn(holder):
        lease.begin_quantum(lease.quantum_since_ns, quantum_ns)


def renew_quantum(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> int:
    """The quantum for a seat that has the lease or is about to get it, with what is known now."""
    if gpu.rules.quantum_setting_ns is None and len(gpu.wait_queue) and gpu.rules.sharing is Sharing.EXCLUSIVE:
        forecast.update(node, gpu, seat, now_ns)
        set_quantum(gpu, automatic_quantum_ns(gpu, node.settings))
    return gpu.rules.quantum_ns


def record(node: Node, gpu: Gpu) -> None:
    """Writes to the journal if the entry has changed.

    Called before a grant is sent, and at the end of each event.  The end of a lease is written with the grant that
    follows, because each write delays the hand-over.
    """
    entry = (gpu.leases.next_lease_id - 1, _process_to_wait_for(gpu))
    if entry != gpu.recovery.recorded:
        gpu.recovery.recorded = entry
        node.out.append(RecordLease(gpu.uuid, *entry))


def _process_to_wait_for(gpu: Gpu) -> int:
    leases, expected = gpu.leases.by_client, gpu.recovery.expected_holder
    if expected is not None:
        return MANY_HOLDERS if any(not seat.lease.stray for seat in leases.values()) else expected
    if not leases:
        return 0
    if gpu.rules.sharing is Sharing.CONCURRENT:
        return MANY_HOLDERS
    if gpu.leases.holder is not None:
        return gpu.leases.holder.client.identity.process_id
    if len(leases) > 1:
        return MANY_HOLDERS
    return next(iter(leases.values())).client.identity.process_id
