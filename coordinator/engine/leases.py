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
from nvshare.coordinator.memory.client_settings import tell_everybody, tell_settings
from nvshare.coordinator.memory.quantum import automatic_quantum_ns, blend
from nvshare.coordinator.model.commands import Kill, Log, Notify, Send
from nvshare.coordinator.model.events import Released
from nvshare.coordinator.model.state import (
    HOLDING,
    IDLE,
    NEXT,
    OVERDUE,
    REVOKING,
    WAITING,
    WITH_LEASE,
    Gpu,
    Node,
    OverdueAction,
    Seat,
)
from nvshare.coordinator.protocol.messages import Grant, MemoryMode, RemoteProtocolError, Revoke, Sharing, Waiters
from nvshare.scheduler_policies.api import ClientView

if TYPE_CHECKING:
    from nvshare.coordinator.gangs.coscheduling import Gang


def want(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """A thread of the client waits.  Idempotent: a request that crosses a grant or a revocation says nothing new."""
    if seat.phase is not IDLE:
        return
    _works(node, gpu, seat)
    seat.enter(WAITING)
    seat.waiting_since_ns = now_ns
    seat.view = None
    if not seat.client.paused and not seat.fit.shut_out:
        gpu.line.join(seat)
        if len(gpu.line) == 1 and gpu.holder is not None and gpu.holder.phase is HOLDING:
            _renew_quantum(node, gpu, gpu.holder, now_ns)
        consider_preemption(node, gpu, now_ns)
        if seat.last_released_ns != now_ns or coscheduling.missed(seat, now_ns):
            coscheduling.join(node, seat, now_ns)


def _works(node: Node, gpu: Gpu, seat: Seat) -> None:
    """The client uses this GPU in earnest, from now until it leaves."""
    if seat.works:
        return
    seat.works = True
    gpu.working += 1
    if gpu.working == 2:
        tell_everybody(node, gpu)  # from now on they are paced


def consider_preemption(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Somebody began to wait, or an order of rank changed."""
    holder = gpu.holder
    if holder is None or holder.phase is not HOLDING or not len(gpu.line) or coscheduling.sheltered(holder):
        return
    seat = holder
    if gpu.umpire.preempt(lambda: seat.look(now_ns), gpu.line.views(), gpu.look(), now_ns, node.out):
        for mate in coscheduling.companions(seat, now_ns):
            if len(mate.gpu.line):
                revoke(node, mate.gpu, mate, "gang", now_ns)
        revoke(node, gpu, seat, "preempted", now_ns)


def blocked(gpu: Gpu) -> bool:
    """Somebody has a lease and still may use it, or is draining in time."""
    return any(seat.phase is not OVERDUE for seat in gpu.leases.values())


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Do what is due on this GPU."""
    if gpu.expected_holder is not None and now_ns >= gpu.recovery_deadline_ns:
        gpu.expected_holder = None
        node.out.append(Log(logging.WARNING, f"{gpu.uuid}: nobody claimed the lease of the earlier coordinator"))
    for seat in [s for s in gpu.leases.values() if s.phase is REVOKING] if gpu.leases else ():
        if seat.drain_deadline_ns is not None and now_ns >= seat.drain_deadline_ns:
            _pass_deadline(node, gpu, seat, now_ns)
    orders.look_for_stalled(node, gpu, now_ns)
    if gpu.switch is not None:
        switching.advance(node, gpu, now_ns)
        if gpu.switch is not None and gpu.switch.done and not coscheduling.holds_back(gpu):
            seat, quantum = gpu.switch.seat, gpu.switch.quantum_ns
            if quantum is not None and gpu.switch.policy is not gpu.umpire.policy:  # as in `_end_quantum`
                quantum = min(quantum, gpu.quantum_ns)
            called = gpu.switch.called
            switching.close(node, gpu, now_ns)
            grant(node, gpu, seat, quantum or _renew_quantum(node, gpu, seat, now_ns), now_ns)
            if called:  # its gang has given up meanwhile
                seat.called_at_ns = now_ns
            consider_preemption(node, gpu, now_ns)
    if len(gpu.line):
        if gpu.sharing is Sharing.CONCURRENT:
            for seat in gpu.line.seats():
                gpu.line.leave(seat)
                grant(node, gpu, seat, gpu.quantum_ns, now_ns)
        else:
            _end_quantum(node, gpu, now_ns)
            _fill(node, gpu, now_ns)
    _tell_waiters(node, gpu)
    prefetch.advance(node, gpu, now_ns)


def _end_quantum(node: Node, gpu: Gpu, now_ns: int) -> None:
    seat = gpu.holder
    if seat is None or seat.phase is not HOLDING:
        return
    if gpu.turn_policy != gpu.umpire.replaced and not coscheduling.in_step(seat):
        # The length of this turn was chosen by a policy that has been replaced, perhaps because of it.
        gpu.turn_policy = gpu.umpire.replaced
        seat.quantum_ends_ns = min(seat.quantum_ends_ns, now_ns + gpu.quantum_ns)
    standby.before_the_end(node, gpu, seat, now_ns)
    if now_ns < seat.quantum_ends_ns:
        return
    if seat.gang is not None and coscheduling.in_step(seat):
        _end_turn(node, seat.gang, now_ns)
        return
    if gpu.umpire.renew(lambda: seat.look(now_ns), gpu.line.views(), gpu.look(), now_ns, node.out):
        seat.quantum_ends_ns = now_ns + gpu.quantum_ns
        coscheduling.renewed(seat, now_ns)
        return
    revoke(node, gpu, seat, "quantum", now_ns)


def _end_turn(node: Node, gang: Gang, now_ns: int) -> None:
    """Of a gang: where somebody else waits, all leases end, unless all of the policies there would go on."""
    seats = [seat for seat in coscheduling.at_work(gang) if coscheduling.in_step(seat)]
    contended = [seat for seat in seats if len(seat.gpu.line)]
    for seat in contended:
        gpu = seat.gpu
        if not gpu.umpire.renew(partial(seat.look, now_ns), gpu.line.views(), gpu.look(), now_ns, node.out):
            break
    else:
        gang.ends_ns = now_ns + gang.quantum_ns
        for seat in seats:
            seat.quantum_ends_ns = gang.ends_ns
            coscheduling.renewed(seat, now_ns)
            node.touched[seat.gpu.uuid] = seat.gpu
        return
    for seat in contended:
        revoke(node, seat.gpu, seat, "quantum", now_ns)


def _fill(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Give the free GPU to whom the policy chooses; begin to move memory first where that is needed."""
    gpu.wake_at_ns = None  # an earlier answer of the policy; only an answer of this moment counts
    if gpu.switch is not None or gpu.recovering or (gpu.leases and blocked(gpu)):
        return
    line = gpu.line
    if not gpu.leases:
        waiting = line.views()
    else:  # only overdue ones
        fitting = [seat for seat in line.seats() if switching.fits_beside_overdue(gpu, seat)]
        # The demoted too, where the others cannot run: nobody has to wait for them.
        ranked = [seat for seat in fitting if not seat.demoted] or fitting
        waiting = tuple(seat.look(now_ns) for seat in ranked)
        if not waiting:
            return
    if gpu.kept_for is None:
        choice = coscheduling.choose(node, gpu, waiting, now_ns)
        if choice is None:
            return
        seat, quantum_ns = gpu.seats[choice.client], choice.quantum_ns
    if gpu.kept_for is not None:
        _take(node, gpu, now_ns)
        return
    quantum_ns = coscheduling.time_for(seat, quantum_ns, now_ns)
    line.leave(seat)
    if switching.begin(node, gpu, seat, quantum_ns, now_ns):
        seat.enter(NEXT)
    else:
        grant(node, gpu, seat, quantum_ns or _renew_quantum(node, gpu, seat, now_ns), now_ns)


def _take(node: Node, gpu: Gpu, now_ns: int) -> None:
    """The GPU is kept for a gang: its member is next, and waits for the others of its gang."""
    seat = coscheduling.next_member(node, gpu, now_ns)
    if seat is None:
        return
    gpu.line.leave(seat)
    if not switching.begin(node, gpu, seat, None, now_ns):
        switching.hold(gpu, seat, now_ns)
    assert gpu.switch is not None
    gpu.switch.called = coscheduling.is_call(seat)
    seat.enter(NEXT)
    node.touched[gpu.uuid] = gpu


def grant(node: Node, gpu: Gpu, seat: Seat, quantum_ns: int, now_ns: int) -> None:
    """The seat has the lease from now on.  The caller has taken it out of the line."""
    lease_id = gpu.next_lease_id
    gpu.next_lease_id = lease_id + 1
    if seat.client.memory_mode is MemoryMode.SWAP:  # the hook begins anew too: it asks before it grows
        seat.reserved_bytes = seat.resident_bytes
    client = seat.client.client
    waited_ns = 0
    if seat.waiting_since_ns is not None:
        waited_ns = now_ns - seat.waiting_since_ns
        seat.waiting_since_ns = None
        seat.waited_ns += waited_ns
        gpu.waited_ns += waited_ns
        seat.max_wait_ns = max(seat.max_wait_ns, waited_ns)
        gpu.max_wait_ns = max(gpu.max_wait_ns, waited_ns)
    take_up(node, gpu, seat, lease_id, quantum_ns, now_ns)
    seat.leases += 1
    seat.immune = gpu.owed_ns > 0 or seat.rest_ns > 0
    seat.rest_ns = 0
    seat.called_at_ns = None
    gpu.grants += 1
    if gpu.last_holder != client:
        gpu.handovers += gpu.last_holder != 0
        orders.turn_over(gpu)
        gpu.last_holder = client
        seat.handed_over_from_ns = gpu.free_since_ns
    else:
        seat.handed_over_from_ns = None
    gpu.free_since_ns = None
    waiters = len(gpu.line) if gpu.sharing is Sharing.EXCLUSIVE else 0
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": client,
        "name": seat.client.name,
        "lease": lease_id,
        "quantum_ns": quantum_ns,
        "waiters": waiters,
        "waited_ns": waited_ns,
    }
    node.out.append(Notify("granted", values))


def take_up(node: Node, gpu: Gpu, seat: Seat, lease_id: int, quantum_ns: int, now_ns: int) -> None:
    """Common to a grant and a confirmed claim: records, journal, the message."""
    client = seat.client.client
    _works(node, gpu, seat)
    seat.enter(HOLDING)
    seat.lease_id = lease_id
    seat.granted_at_ns = seat.counted_ns = now_ns
    seat.revoked_at_ns = 0
    seat.quantum_ends_ns = now_ns + quantum_ns
    seat.alerted = False
    seat.view = None
    gpu.leases[client] = seat
    waiters = 0
    if gpu.sharing is Sharing.EXCLUSIVE:
        assert gpu.holder is None, f"{gpu.uuid}: a second holder"
        gpu.holder = seat
        gpu.turn_policy = gpu.umpire.replaced
        waiters = len(gpu.line)
    seat.told_waiters = waiters > 0
    tell_settings(node, seat)
    record(node, gpu)
    node.out.append(Send(client, Grant(seat.ordinal, lease_id, quantum_ns, waiters)))


def revoke(node: Node, gpu: Gpu, seat: Seat, why: str, now_ns: int) -> None:
    """Ask for the lease back.  Only of a seat that HOLDS."""
    if seat is gpu.holder and seat.granted_at_ns is not None:
        gpu.turn_closed_ns += now_ns - seat.granted_at_ns
        coscheduling.account(seat, now_ns)
    seat.enter(REVOKING)
    deadline_ns = node.settings.drain_deadline_ns
    seat.revoked_at_ns = now_ns
    seat.drain_deadline_ns = now_ns + deadline_ns
    seat.revokes += 1
    gpu.revokes += 1
    if seat.gang is not None or seat.rest_ns:
        node.touched[gpu.uuid] = gpu
    client = seat.client.client
    node.out.append(Send(client, Revoke(seat.ordinal, seat.lease_id, deadline_ns)))
    standby.alert_next(node, gpu, seat, now_ns)
    node.out.append(Notify("revoked", {"uuid": gpu.uuid, "client": client, "lease": seat.lease_id, "why": why}))


def _pass_deadline(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """Invariant 10: a hung client does not hang the others."""
    called = coscheduling.was_called(seat)
    seat.enter(OVERDUE)
    seat.rest_ns = 0
    seat.drain_deadline_ns = None
    if seat is gpu.holder:
        gpu.holder = None
        gpu.last_holder = seat.client.client
    count_overdue(node, gpu, seat)
    _tell_policy(node, gpu, seat, called, now_ns)


def _tell_policy(node: Node, gpu: Gpu, seat: Seat, called: bool, now_ns: int) -> None:
    """The turn has ended.  Once for each: a lease that is overdue has ended for the policy before it comes back."""

    def look() -> ClientView:
        return replace(seat.look(now_ns), called=True) if called else seat.look(now_ns)

    gpu.umpire.released(look, now_ns, node.out)


def count_overdue(node: Node, gpu: Gpu, seat: Seat) -> None:
    """Count, show, act as configured."""
    seat.overdue += 1
    gpu.overdue += 1
    client = seat.client
    action = node.settings.overdue_action
    node.out.append(
        Notify("overdue", {"uuid": gpu.uuid, "client": client.client, "lease": seat.lease_id, "action": action.value})
    )
    text = f"{gpu.uuid}: {client.name} (process {client.process_id}) did not drain in time; action: {action.value}"
    node.out.append(Log(logging.WARNING, text))
    if action is OverdueAction.DEMOTE:
        seat.demoted = True
    elif action is OverdueAction.KILL:
        node.out.append(Kill(client.client, client.process_id, text))


def end_lease(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> int:
    """The lease is over, for whatever reason.  Returns how long it was held."""
    client = seat.client.client
    del gpu.leases[client]
    if seat.phase is HOLDING and seat is gpu.holder and seat.granted_at_ns is not None:
        gpu.turn_closed_ns += now_ns - seat.granted_at_ns
        coscheduling.account(seat, now_ns)
    coscheduling.turn_over(seat)
    if seat is gpu.holder:
        gpu.holder = None
    held_ns = 0 if seat.granted_at_ns is None else now_ns - seat.granted_at_ns
    seat.enter(IDLE)
    seat.used_ns += held_ns
    gpu.held_ns += held_ns
    seat.granted_at_ns = None
    seat.drain_deadline_ns = None
    seat.last_released_ns = now_ns
    if not seat.rest_ns:
        seat.turn = gpu.next_turn
        gpu.next_turn += 1
    seat.told_waiters = False
    seat.stray = False
    seat.view = None
    seat.lease_id = 0
    return held_ns


def release(node: Node, gpu: Gpu, seat: Seat, event: Released, now_ns: int) -> None:
    """The client gives its lease back.  Accepted whether it was asked to or not; for no other lease than the one that
    it has."""
    if event.lease_id != seat.lease_id or seat.phase not in WITH_LEASE:
        raise RemoteProtocolError(f"releases lease {event.lease_id}, but has {seat.lease_id or 'none'}")
    asked = seat.phase is not HOLDING
    in_time = seat.phase is not OVERDUE
    idle = event.idle and not asked
    measure(gpu, node, seat, drain_ns=event.drain_ns, opened_at_ns=event.opened_at_ns, now_ns=now_ns)
    gpu.free_since_ns = min(now_ns, seat.revoked_at_ns + event.drain_ns) if asked else now_ns
    seat.submissions += event.submissions
    seat.idle_releases += idle
    gpu.idle_releases += idle
    if not event.drained and in_time:
        count_overdue(node, gpu, seat)
    elif in_time:
        seat.demoted = False
    if not event.wanted:
        seat.rest_ns = 0
    called = coscheduling.was_called(seat)
    held_ns = end_lease(node, gpu, seat, now_ns)
    if in_time and not seat.rest_ns:
        _tell_policy(node, gpu, seat, called, now_ns)
    values: dict[str, int | str | bool | float | None] = {
        "uuid": gpu.uuid,
        "client": seat.client.client,
        "lease": event.lease_id,
        "idle": idle,
        "drained": event.drained,
        "drain_ns": event.drain_ns,
        "held_ns": held_ns,
        "opened_at_ns": event.opened_at_ns,
    }
    node.out.append(Notify("released", values))
    pinning.gave_up(node, seat, event, asked=asked, now_ns=now_ns)
    if event.wanted:
        want(node, gpu, seat, now_ns)


def leave(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """The client is gone: everything that it held or waited for on this GPU is free.  Invariant 6."""
    if seat in gpu.line:
        gpu.line.leave(seat)
    if seat.phase in WITH_LEASE:
        gpu.free_since_ns = now_ns
        in_time, called = seat.phase is not OVERDUE, coscheduling.was_called(seat)
        end_lease(node, gpu, seat, now_ns)
        if in_time:
            _tell_policy(node, gpu, seat, called, now_ns)
    del gpu.seats[seat.client.client]
    switching.forget(node, seat, now_ns)
    coscheduling.leave(node, seat)
    gpu.umpire.gone(seat.client.client, node.out)
    if seat.works:
        gpu.working -= 1
        if gpu.working == 1:
            tell_everybody(node, gpu)  # the one left need not be paced


def measure(gpu: Gpu, node: Node, seat: Seat, *, drain_ns: int, opened_at_ns: int, now_ns: int) -> None:
    """Take what a release tells about switching into account.  The figures are a client's, so what cannot be is
    dropped."""
    granted_at_ns = seat.granted_at_ns
    if granted_at_ns is None:
        return
    start_ns = seat.handed_over_from_ns
    if start_ns is not None and granted_at_ns <= opened_at_ns <= now_ns and opened_at_ns >= start_ns:
        sample_ns = opened_at_ns - start_ns
        gpu.recent_handovers_ns.append(sample_ns)
        gpu.handover_average_ns = blend(gpu.handover_average_ns, sample_ns)
    if seat.phase is HOLDING or drain_ns > now_ns - granted_at_ns:
        return
    gpu.recent_drains_ns.append(drain_ns)
    gpu.drained_ns += drain_ns
    gpu.drain_average_ns = blend(gpu.drain_average_ns, drain_ns)
    gpu.switches_measured += 1
    if gpu.quantum_setting_ns is None:
        set_quantum(gpu, automatic_quantum_ns(gpu, node.settings))


def set_quantum(gpu: Gpu, quantum_ns: int) -> None:
    """The quantum in force; for the lease at hand too, unless the policy chose another one for it."""
    before_ns = gpu.quantum_ns
    if quantum_ns == before_ns:
        return
    gpu.quantum_ns = quantum_ns
    gpu.view = None
    holder = gpu.holder
    if holder is None or holder.phase is not HOLDING or holder.granted_at_ns is None:
        return
    if holder.quantum_ends_ns == holder.granted_at_ns + before_ns and not coscheduling.in_step(holder):
        holder.quantum_ends_ns = holder.granted_at_ns + quantum_ns


def _renew_quantum(node: Node, gpu: Gpu, holder: Seat, now_ns: int) -> int:
    """The quantum for whoever has the lease or is about to get it, with what is known now."""
    if gpu.quantum_setting_ns is None and len(gpu.line) and gpu.sharing is Sharing.EXCLUSIVE:
        forecast.look(node, gpu, holder, now_ns)
        set_quantum(gpu, automatic_quantum_ns(gpu, node.settings))
    return gpu.quantum_ns


def _tell_waiters(node: Node, gpu: Gpu) -> None:
    """The holder hears when contention begins and ends."""
    seat = gpu.holder
    if seat is None or seat.phase is not HOLDING:
        return
    waiters = len(gpu.line)
    if seat.told_waiters is not (waiters > 0):
        seat.told_waiters = waiters > 0
        node.out.append(Send(seat.client.client, Waiters(seat.ordinal, seat.lease_id, waiters)))


def deadline_ns(node: Node, gpu: Gpu, now_ns: int) -> int | None:
    """The next time at which `advance`, which has just looked, must look though nothing happens; None: no such time.
    A deadline that has passed waits for an event: armed again, its timer would fire without end."""
    due: list[int | None] = [coscheduling.deadline_ns(gpu), pinning.deadline_ns(gpu)]
    due += [seat.drain_deadline_ns for seat in gpu.leases.values()]
    due += [seat.growth.deadline_ns for seat in gpu.growing.values() if seat.growth is not None]
    if gpu.expected_holder is not None:
        due.append(gpu.recovery_deadline_ns)
    if gpu.switch is not None and not gpu.switch.done:
        due.append(gpu.switch.deadline_ns)
    if gpu.switch is not None or gpu.growing:
        due += [gpu.settled_at_ns if gpu.survivors else None, orders.stall_ns(node, gpu)]
    if len(gpu.line) and gpu.sharing is Sharing.EXCLUSIVE:
        if gpu.holder is not None and gpu.holder.phase is HOLDING:
            due.append(standby.due_ns(gpu.holder))
        elif gpu.wake_at_ns is not None and gpu.switch is None and not blocked(gpu):
            due.append(gpu.wake_at_ns)
    return min((at_ns for at_ns in due if at_ns is not None and at_ns > now_ns), default=None)
