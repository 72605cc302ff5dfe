"""The life of leases on one GPU: wait, choose, grant, revoke, release, overdue.

Rules:
- Exclusive: a grant happens only when every other lease of the GPU has ended or is overdue (`blocked`).
- Ids of leases only grow.
- The quantum counts from the grant, and matters only while somebody waits: a holder alone is left in peace.
- `advance` is level-triggered: it looks at the GPU and does what is due, so each event only records what happened.
- A drain that passed its deadline is set aside: the others take turns beside it.  Of them only those are let on whose
  memory certainly fits beside it (`switching.fits_beside_overdue`).

Non-goals: the next client (the policy), what memory moves (switching.py, planner.py), who may claim what
(recovery.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nvshare.coordinator.engine import standby
from nvshare.coordinator.engine.recovery_record import record
from nvshare.coordinator.gangs import coscheduling
from nvshare.coordinator.memory import forecast, orders, pinning, prefetch, switching
from nvshare.coordinator.memory.client_settings import send_settings, send_settings_to_all
from nvshare.coordinator.memory.quantum import automatic_quantum_ns, moving_average
from nvshare.coordinator.model.commands import Kill, Log, Notify, Send
from nvshare.coordinator.model.events import Released
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, IDLE, NEXT, OVERDUE, REVOKING, WAITING, WITH_LEASE, Seat
from nvshare.coordinator.model.settings import OverdueAction
from nvshare.coordinator.protocol.messages import Grant, MemoryMode, RemoteProtocolError, Revoke, Sharing, Waiters
from nvshare.scheduler_policies.api import ClientView

if TYPE_CHECKING:
    from nvshare.coordinator.model.gang import Gang


def request_lease(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """A thread of the client waits.  Idempotent: a request that crosses a grant or a revocation says nothing new."""
    if seat.phase is not IDLE:
        return
    _activate(node, gpu, seat)
    seat.enter(WAITING)
    seat.place.waiting_since_ns = now_ns
    seat.place.view = None
    if not seat.client.paused and not seat.room.unschedulable:
        gpu.wait_queue.join(seat)
        if len(gpu.wait_queue) == 1 and gpu.leases.holder is not None and gpu.leases.holder.phase is HOLDING:
            _renew_quantum(node, gpu, gpu.leases.holder, now_ns)
        consider_preemption(node, gpu, now_ns)
        if seat.place.last_released_ns != now_ns or coscheduling.missed_turn(seat, now_ns):
            coscheduling.member_waits(node, seat, now_ns)


def _activate(node: Node, gpu: Gpu, seat: Seat) -> None:
    """The client uses this GPU in earnest, from now until it leaves."""
    if seat.place.active:
        return
    seat.place.active = True
    gpu.leases.active_seats += 1
    if gpu.leases.active_seats == 2:
        send_settings_to_all(node, gpu)  # from now on they are paced


def consider_preemption(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Somebody began to wait, or an order of rank changed."""
    holder = gpu.leases.holder
    if (
        holder is None
        or holder.phase is not HOLDING
        or not len(gpu.wait_queue)
        or coscheduling.protected_from_policy(holder)
    ):
        return
    seat = holder
    if gpu.policy_guard.preempt(lambda: seat.view(now_ns), gpu.wait_queue.views(), gpu.view(), now_ns, node.out):
        for mate in coscheduling.mates_in_turn(seat, now_ns):
            if len(mate.gpu.wait_queue):
                revoke(node, mate.gpu, mate, "gang", now_ns)
        revoke(node, gpu, seat, "preempted", now_ns)


def blocked(gpu: Gpu) -> bool:
    """Somebody has a lease and still may use it, or is draining in time."""
    return any(seat.phase is not OVERDUE for seat in gpu.leases.by_client.values())


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Do what is due on this GPU."""
    if gpu.recovery.expected_holder is not None and now_ns >= gpu.recovery.deadline_ns:
        gpu.recovery.expected_holder = None
        node.out.append(Log(logging.WARNING, f"{gpu.uuid}: nobody claimed the lease of the earlier coordinator"))
    for seat in [s for s in gpu.leases.by_client.values() if s.phase is REVOKING] if gpu.leases.by_client else ():
        if seat.lease.drain_deadline_ns is not None and now_ns >= seat.lease.drain_deadline_ns:
            _set_overdue(node, gpu, seat, now_ns)
    orders.mark_stalled(node, gpu, now_ns)
    if gpu.switching.switch is not None:
        switching.advance(node, gpu, now_ns)
        if gpu.switching.switch is not None and gpu.switching.switch.done and not coscheduling.waits_for_mates(gpu):
            seat, quantum = gpu.switching.switch.seat, gpu.switching.switch.quantum_ns
            if (
                quantum is not None and gpu.switching.switch.policy is not gpu.policy_guard.policy
            ):  # as in `_end_quantum`
                quantum = min(quantum, gpu.rules.quantum_ns)
            co_scheduled = gpu.switching.switch.co_scheduled
            switching.close(node, gpu, now_ns)
            grant(node, gpu, seat, quantum or _renew_quantum(node, gpu, seat, now_ns), now_ns)
            if co_scheduled:  # its gang has had its turn meanwhile
                seat.gang_turn.co_scheduled_at_ns = now_ns
            consider_preemption(node, gpu, now_ns)
    if len(gpu.wait_queue):
        if gpu.rules.sharing is Sharing.CONCURRENT:
            for seat in gpu.wait_queue.seats():
                gpu.wait_queue.leave(seat)
                grant(node, gpu, seat, gpu.rules.quantum_ns, now_ns)
        else:
            _end_quantum(node, gpu, now_ns)
            _choose_next(node, gpu, now_ns)
    _send_waiters(node, gpu)
    prefetch.advance(node, gpu, now_ns)


def _end_quantum(node: Node, gpu: Gpu, now_ns: int) -> None:
    seat = gpu.leases.holder
    if seat is None or seat.phase is not HOLDING:
        return
    if gpu.leases.policy_epoch != gpu.policy_guard.replaced and not coscheduling.in_gang_turn(seat):
        # The length of this turn was chosen by a policy that has been replaced, perhaps because of it.
        gpu.leases.policy_epoch = gpu.policy_guard.replaced
        seat.lease.quantum_ends_ns = min(seat.lease.quantum_ends_ns, now_ns + gpu.rules.quantum_ns)
    standby.alert_before_end(node, gpu, seat, now_ns)
    if now_ns < seat.lease.quantum_ends_ns:
        return
    if seat.gang_turn.gang is not None and coscheduling.in_gang_turn(seat):
        _end_gang_turn(node, seat.gang_turn.gang, now_ns)
        return
    if gpu.policy_guard.renew(lambda: seat.view(now_ns), gpu.wait_queue.views(), gpu.view(), now_ns, node.out):
        seat.lease.quantum_ends_ns = now_ns + gpu.rules.quantum_ns
        coscheduling.turn_renewed(seat, now_ns)
        return
    revoke(node, gpu, seat, "quantum", now_ns)


def _end_gang_turn(node: Node, gang: Gang, now_ns: int) -> None:
    """Of a gang: where somebody else waits, all leases end, unless all of the policies there would go on."""
    seats = [seat for seat in coscheduling.running_members(gang) if coscheduling.in_gang_turn(seat)]
    contended = [seat for seat in seats if len(seat.gpu.wait_queue)]
    for seat in contended:
        gpu = seat.gpu
        if not gpu.policy_guard.renew(partial(seat.view, now_ns), gpu.wait_queue.views(), gpu.view(), now_ns, node.out):
            break
    else:
        gang.ends_ns = now_ns + gang.quantum_ns
        for seat in seats:
            seat.lease.quantum_ends_ns = gang.ends_ns
            coscheduling.turn_renewed(seat, now_ns)
            node.changed_gpus[seat.gpu.uuid] = seat.gpu
        return
    for seat in contended:
        revoke(node, seat.gpu, seat, "quantum", now_ns)


def _choose_next(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Give the free GPU to whom the policy chooses; begin to move memory first where that is needed."""
    gpu.leases.policy_wakes_at_ns = None  # an earlier answer of the policy; only an answer of this moment counts
    if gpu.switching.switch is not None or gpu.recovering or (gpu.leases.by_client and blocked(gpu)):
        return
    line = gpu.wait_queue
    if not gpu.leases.by_client:
        waiting = line.views()
    else:  # only overdue ones
        fitting = [seat for seat in line.seats() if switching.fits_beside_overdue(gpu, seat)]
        # The demoted too, where the others cannot run: nobody has to wait for them.
        ranked = [seat for seat in fitting if not seat.place.demoted] or fitting
        waiting = tuple(seat.view(now_ns) for seat in ranked)
        if not waiting:
            return
    if gpu.gangs.reserved_for is None:
        choice = coscheduling.choose(node, gpu, waiting, now_ns)
        if choice is None:
            return
        seat, quantum_ns = gpu.seats[choice.client], choice.quantum_ns
    if gpu.gangs.reserved_for is not None:
        _choose_member(node, gpu, now_ns)
        return
    quantum_ns = coscheduling.quantum_for(seat, quantum_ns, now_ns)
    line.leave(seat)
    if switching.begin(node, gpu, seat, quantum_ns, now_ns):
        seat.enter(NEXT)
    else:
        grant(node, gpu, seat, quantum_ns or _renew_quantum(node, gpu, seat, now_ns), now_ns)


def _choose_member(node: Node, gpu: Gpu, now_ns: int) -> None:
    """The GPU is kept for a gang: its member is next, and waits for the others of its gang."""
    seat = coscheduling.next_member(node, gpu, now_ns)
    if seat is None:
        return
    gpu.wait_queue.leave(seat)
    if not switching.begin(node, gpu, seat, None, now_ns):
        switching.wait_for_mates(gpu, seat, now_ns)
    assert gpu.switching.switch is not None
    gpu.switching.switch.co_scheduled = coscheduling.will_be_co_scheduled(seat)
    seat.enter(NEXT)
    node.changed_gpus[gpu.uuid] = gpu


def grant(node: Node, gpu: Gpu, seat: Seat, quantum_ns: int, now_ns: int) -> None:
    """The seat has the lease from now on.  The caller has taken it out of the line."""
    lease_id = gpu.leases.next_lease_id
    gpu.leases.next_lease_id = lease_id + 1
    if seat.client.memory_mode is MemoryMode.SWAP:  # the hook begins anew too: it asks before it grows
        seat.memory.reserved_bytes = seat.memory.resident_bytes
    client = seat.client.client_id
    waited_ns = 0
    if seat.place.waiting_since_ns is not None:
        waited_ns = now_ns - seat.place.waiting_since_ns
        seat.place.waiting_since_ns = None
        seat.statistics.waited_ns += waited_ns
        gpu.statistics.waited_ns += waited_ns
        seat.statistics.max_wait_ns = max(seat.statistics.max_wait_ns, waited_ns)
        gpu.statistics.max_wait_ns = max(gpu.statistics.max_wait_ns, waited_ns)
    start_lease(node, gpu, seat, lease_id, quantum_ns, now_ns)
    seat.statistics.leases += 1
    seat.gang_turn.protected_from_gangs = gpu.gangs.debt_ns > 0 or seat.gang_turn.remaining_ns > 0
    seat.gang_turn.remaining_ns = 0
    seat.gang_turn.co_scheduled_at_ns = None
    gpu.statistics.grants += 1
    if gpu.leases.last_holder != client:
        gpu.statistics.handovers += gpu.leases.last_holder != 0
        orders.close_turn(gpu)
        gpu.leases.last_holder = client
        seat.lease.handed_over_from_ns = gpu.leases.free_since_ns
    else:
        seat.lease.handed_over_from_ns = None
    gpu.leases.free_since_ns = None
    waiters = len(gpu.wait_queue) if gpu.rules.sharing is Sharing.EXCLUSIVE else 0
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": client,
        "name": seat.client.identity.name,
        "lease": lease_id,
        "quantum_ns": quantum_ns,
        "waiters": waiters,
        "waited_ns": waited_ns,
    }
    node.out.append(Notify("granted", values))


def start_lease(node: Node, gpu: Gpu, seat: Seat, lease_id: int, quantum_ns: int, now_ns: int) -> None:
    """Common to a grant and a confirmed claim: records, journal, the message."""
    client = seat.client.client_id
    _activate(node, gpu, seat)
    seat.enter(HOLDING)
    seat.lease.lease_id = lease_id
    seat.lease.granted_at_ns = seat.gang_turn.accounted_until_ns = now_ns
    seat.lease.revoked_at_ns = 0
    seat.lease.quantum_ends_ns = now_ns + quantum_ns
    seat.lease.alerted = False
    seat.place.view = None
    gpu.leases.by_client[client] = seat
    waiters = 0
    if gpu.rules.sharing is Sharing.EXCLUSIVE:
        assert gpu.leases.holder is None, f"{gpu.uuid}: a second holder"
        gpu.leases.holder = seat
        gpu.leases.policy_epoch = gpu.policy_guard.replaced
        waiters = len(gpu.wait_queue)
    seat.lease.waiters_sent = waiters > 0
    send_settings(node, seat)
    record(node, gpu)
    node.out.append(Send(client, Grant(seat.ordinal, lease_id, quantum_ns, waiters)))


def revoke(node: Node, gpu: Gpu, seat: Seat, why: str, now_ns: int) -> None:
    """Ask for the lease back.  Only of a seat that HOLDS."""
    if seat is gpu.leases.holder and seat.lease.granted_at_ns is not None:
        gpu.leases.turns_closed_ns += now_ns - seat.lease.granted_at_ns
        coscheduling.account_turn(seat, now_ns)
    seat.enter(REVOKING)
    deadline_ns = node.settings.leases.drain_deadline_ns
    seat.lease.revoked_at_ns = now_ns
    seat.lease.drain_deadline_ns = now_ns + deadline_ns
    seat.statistics.revokes += 1
    gpu.statistics.revokes += 1
    if seat.gang_turn.gang is not None or seat.gang_turn.remaining_ns:
        node.changed_gpus[gpu.uuid] = gpu
    client = seat.client.client_id
    node.out.append(Send(client, Revoke(seat.ordinal, seat.lease.lease_id, deadline_ns)))
    standby.alert_next(node, gpu, seat, now_ns)
    node.out.append(Notify("revoked", {"uuid": gpu.uuid, "client": client, "lease": seat.lease.lease_id, "why": why}))


def _set_overdue(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """Invariant 10: a hung client does not hang the others."""
    co_scheduled = coscheduling.was_co_scheduled(seat)
    seat.enter(OVERDUE)
    seat.gang_turn.remaining_ns = 0
    seat.lease.drain_deadline_ns = None
    if seat is gpu.leases.holder:
        gpu.leases.holder = None
        gpu.leases.last_holder = seat.client.client_id
    count_overdue(node, gpu, seat)
    _turn_ended(node, gpu, seat, co_scheduled, now_ns)


def _turn_ended(node: Node, gpu: Gpu, seat: Seat, co_scheduled: bool, now_ns: int) -> None:
    """The policy hears of the end of a turn once: when the lease is released or becomes overdue."""

    def view() -> ClientView:
        return replace(seat.view(now_ns), called=True) if co_scheduled else seat.view(now_ns)

    gpu.policy_guard.released(view, now_ns, node.out)


def count_overdue(node: Node, gpu: Gpu, seat: Seat) -> None:
    """Count, show, act as configured."""
    seat.statistics.overdue += 1
    gpu.statistics.overdue += 1
    client = seat.client
    action = node.settings.leases.overdue_action
    node.out.append(
        Notify(
            "overdue",
            {"uuid": gpu.uuid, "client": client.client_id, "lease": seat.lease.lease_id, "action": action.value},
        )
    )
    text = f"{gpu.uuid}: {client.identity} did not drain in time; action: {action.value}"
    node.out.append(Log(logging.WARNING, text))
    if action is OverdueAction.DEMOTE:
        seat.place.demoted = True
    elif action is OverdueAction.KILL:
        node.out.append(Kill(client.client_id, client.identity.process_id, text))


def end_lease(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> int:
    """The lease is over, for whatever reason.  Returns how long it was held."""
    client = seat.client.client_id
    del gpu.leases.by_client[client]
    if seat.phase is HOLDING and seat is gpu.leases.holder and seat.lease.granted_at_ns is not None:
        gpu.leases.turns_closed_ns += now_ns - seat.lease.granted_at_ns
        coscheduling.account_turn(seat, now_ns)
    coscheduling.lease_ended(seat)
    if seat is gpu.leases.holder:
        gpu.leases.holder = None
    held_ns = 0 if seat.lease.granted_at_ns is None else now_ns - seat.lease.granted_at_ns
    seat.enter(IDLE)
    seat.statistics.used_ns += held_ns
    gpu.statistics.held_ns += held_ns
    seat.lease.granted_at_ns = None
    seat.lease.drain_deadline_ns = None
    seat.place.last_released_ns = now_ns
    if not seat.gang_turn.remaining_ns:
        seat.place.turn = gpu.leases.next_turn
        gpu.leases.next_turn += 1
    seat.lease.waiters_sent = False
    seat.lease.stray = False
    seat.place.view = None
    seat.lease.lease_id = 0
    return held_ns


def release(node: Node, gpu: Gpu, seat: Seat, event: Released, now_ns: int) -> None:
    """The client gives its lease back.  Accepted whether it was asked to or not; for no other lease than the one that
    it has."""
    if event.lease_id != seat.lease.lease_id or seat.phase not in WITH_LEASE:
        raise RemoteProtocolError(f"releases lease {event.lease_id}, but has {seat.lease.lease_id or 'none'}")
    asked = seat.phase is not HOLDING
    in_time = seat.phase is not OVERDUE
    idle = event.idle and not asked
    measure_switch(gpu, node, seat, drain_ns=event.drain_ns, opened_at_ns=event.opened_at_ns, now_ns=now_ns)
    gpu.leases.free_since_ns = min(now_ns, seat.lease.revoked_at_ns + event.drain_ns) if asked else now_ns
    seat.statistics.submissions += event.submissions
    seat.statistics.idle_releases += idle
    gpu.statistics.idle_releases += idle
    if not event.drained and in_time:
        count_overdue(node, gpu, seat)
    elif in_time:
        seat.place.demoted = False
    if not event.wanted:
        seat.gang_turn.remaining_ns = 0
    co_scheduled = coscheduling.was_co_scheduled(seat)
    held_ns = end_lease(node, gpu, seat, now_ns)
    if in_time and not seat.gang_turn.remaining_ns:
        _turn_ended(node, gpu, seat, co_scheduled, now_ns)
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
    pinning.lease_ended(node, seat, event, asked=asked, now_ns=now_ns)
    if event.wanted:
        request_lease(node, gpu, seat, now_ns)


def client_left(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """The client is gone: everything that it held or waited for on this GPU is free.  Invariant 6."""
    if seat in gpu.wait_queue:
        gpu.wait_queue.leave(seat)
    if seat.phase in WITH_LEASE:
        gpu.leases.free_since_ns = now_ns
        in_time, co_scheduled = seat.phase is not OVERDUE, coscheduling.was_co_scheduled(seat)
        end_lease(node, gpu, seat, now_ns)
        if in_time:
            _turn_ended(node, gpu, seat, co_scheduled, now_ns)
    del gpu.seats[seat.client.client_id]
    switching.client_left(node, seat, now_ns)
    coscheduling.remove_member(node, seat)
    gpu.policy_guard.gone(seat.client.client_id, node.out)
    if seat.place.active:
        gpu.leases.active_seats -= 1
        if gpu.leases.active_seats == 1:
            send_settings_to_all(node, gpu)  # the one left need not be paced


def measure_switch(gpu: Gpu, node: Node, seat: Seat, *, drain_ns: int, opened_at_ns: int, now_ns: int) -> None:
    """Take what a release tells about switching into account.  The figures are a client's, so what cannot be is
    dropped."""
    granted_at_ns = seat.lease.granted_at_ns
    if granted_at_ns is None:
        return
    start_ns = seat.lease.handed_over_from_ns
    if start_ns is not None and granted_at_ns <= opened_at_ns <= now_ns and opened_at_ns >= start_ns:
        sample_ns = opened_at_ns - start_ns
        gpu.switching.recent_handovers_ns.append(sample_ns)
        gpu.switching.handover_average_ns = moving_average(gpu.switching.handover_average_ns, sample_ns)
    if seat.phase is HOLDING or drain_ns > now_ns - granted_at_ns:
        return
    gpu.switching.recent_drains_ns.append(drain_ns)
    gpu.statistics.drained_ns += drain_ns
    gpu.switching.drain_average_ns = moving_average(gpu.switching.drain_average_ns, drain_ns)
    gpu.switching.measured += 1
    if gpu.rules.quantum_setting_ns is None:
        set_quantum(gpu, automatic_quantum_ns(gpu, node.settings))


def set_quantum(gpu: Gpu, quantum_ns: int) -> None:
    """The quantum in force; for the lease at hand too, unless the policy chose another one for it."""
    before_ns = gpu.rules.quantum_ns
    if quantum_ns == before_ns:
        return
    gpu.rules.quantum_ns = quantum_ns
    gpu.rules.view = None
    holder = gpu.leases.holder
    if holder is None or holder.phase is not HOLDING or holder.lease.granted_at_ns is None:
        return
    if holder.lease.quantum_ends_ns == holder.lease.granted_at_ns + before_ns and not coscheduling.in_gang_turn(holder):
        holder.lease.quantum_ends_ns = holder.lease.granted_at_ns + quantum_ns


def _renew_quantum(node: Node, gpu: Gpu, holder: Seat, now_ns: int) -> int:
    """The quantum for whoever has the lease or is about to get it, with what is known now."""
    if gpu.rules.quantum_setting_ns is None and len(gpu.wait_queue) and gpu.rules.sharing is Sharing.EXCLUSIVE:
        forecast.update(node, gpu, holder, now_ns)
        set_quantum(gpu, automatic_quantum_ns(gpu, node.settings))
    return gpu.rules.quantum_ns


def _send_waiters(node: Node, gpu: Gpu) -> None:
    """The holder hears when contention begins and ends."""
    seat = gpu.leases.holder
    if seat is None or seat.phase is not HOLDING:
        return
    waiters = len(gpu.wait_queue)
    if seat.lease.waiters_sent is not (waiters > 0):
        seat.lease.waiters_sent = waiters > 0
        node.out.append(Send(seat.client.client_id, Waiters(seat.ordinal, seat.lease.lease_id, waiters)))


def next_deadline_ns(node: Node, gpu: Gpu, now_ns: int) -> int | None:
    """The next time at which `advance`, which has just looked, must look though nothing happens; None: no such time.
    A deadline that has passed waits for an event: armed again, its timer would fire without end."""
    due: list[int | None] = [coscheduling.deadline_ns(gpu), pinning.deadline_ns(gpu)]
    due += [seat.lease.drain_deadline_ns for seat in gpu.leases.by_client.values()]
    due += [seat.memory.growth.deadline_ns for seat in gpu.memory.growing.values() if seat.memory.growth is not None]
    if gpu.recovery.expected_holder is not None:
        due.append(gpu.recovery.deadline_ns)
    if gpu.switching.switch is not None and not gpu.switching.switch.done:
        due.append(gpu.switching.switch.deadline_ns)
    if gpu.switching.switch is not None or gpu.memory.growing:
        due += [gpu.recovery.reconnected_at_ns if gpu.recovery.survivors else None, orders.stall_deadline_ns(node, gpu)]
    if len(gpu.wait_queue) and gpu.rules.sharing is Sharing.EXCLUSIVE:
        if gpu.leases.holder is not None and gpu.leases.holder.phase is HOLDING:
            due.append(standby.next_due_ns(gpu.leases.holder))
        elif gpu.leases.policy_wakes_at_ns is not None and gpu.switching.switch is None and not blocked(gpu):
            due.append(gpu.leases.policy_wakes_at_ns)
    return min((at_ns for at_ns in due if at_ns is not None and at_ns > now_ns), default=None)
