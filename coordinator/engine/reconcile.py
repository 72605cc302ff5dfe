"""Acts on the difference between the plan of a GPU and what is.

Rules:
- `advance` is level-triggered: it looks at the GPU and does what is pending, so events only record what happened.
- Clients that are not in the plan give their leases back.  A member is granted when its memory is there and no lease
  is being given back; a member without a turn does not wait for the latter.
- One member's memory comes in at a time (memory/residency.py).  A switch for a client that is not in the plan any more
  is cancelled.

Non-goals: the plan (planning.py), the life of a lease (leases.py).
"""

from __future__ import annotations

import logging

from nvshare.coordinator.engine import leases, planning
from nvshare.coordinator.engine.memory import admission, client_settings, moves, pinning, residency
from nvshare.coordinator.engine.memory.claims import is_complete
from nvshare.coordinator.model.commands import Log, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, REVOKING, WAITING, Contention, Seat
from nvshare.coordinator.protocol.messages import Waiters
from nvshare.scheduler_policies.api import Allotment


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Does what is pending on this GPU."""
    _pass_deadlines(node, gpu, now_ns)
    asked = planning.update(node, gpu, now_ns)
    members = gpu.schedule.members
    if asked and gpu.leases.running.keys() - members.keys():
        for seat in [seat for client, seat in gpu.leases.running.items() if client not in members]:
            leases.revoke(node, gpu, seat, "slot" if gpu.gang is not None else "plan", now_ns)
    switch = gpu.switching.switch
    if switch is not None and switch.seat.client.client_id not in members:
        cancel_switch(node, gpu, now_ns)
    client_settings.send_overflow(node, gpu)
    admission.answer_growth(node, gpu, now_ns)
    if not gpu.recovering:
        _bring_in(node, gpu, now_ns)
    if asked or not gpu.schedule.side_by_side:  # else nothing has changed for those that run
        _inform(node, gpu, now_ns)
    leases.keep_quiet_clock(gpu, now_ns)
    leases.alert_before_end(node, gpu, now_ns)
    residency.bring_next(node, gpu, now_ns)
    client_settings.send_slot_figures(node, gpu)


def _pass_deadlines(node: Node, gpu: Gpu, now_ns: int) -> None:
    recovery, by_client = gpu.recovery, gpu.leases.by_client
    if recovery.expected_holder is not None and now_ns >= recovery.deadline_ns and not recovery.holder_stopped:
        if not gpu.leases.last_holder:  # else holders of several leases have come back
            text = f"{gpu.uuid}: no program claimed the lease of the earlier coordinator"
            node.out.append(Log(logging.WARNING, text))
        recovery.expected_holder = None
    if len(by_client) > len(gpu.leases.running):
        for seat in [seat for seat in by_client.values() if seat.phase is REVOKING]:
            if seat.lease.drain_deadline_ns is not None and now_ns >= seat.lease.drain_deadline_ns:
                leases.set_overdue(node, gpu, seat, now_ns)
    if gpu.leases.debts:
        leases.end_debts(gpu, now_ns)
    moves.mark_stalled(node, gpu, now_ns)


def cancel_switch(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Cancels the switch and requeues its client.  What has moved has moved."""
    switch = gpu.switching.switch
    if switch is None:
        return
    residency.cancel(node, gpu, now_ns)
    switch.seat.enter(WAITING)
    if switch.seat.schedulable:
        gpu.wait_queue.join(switch.seat)


def withdraw(node: Node, seat: Seat, why: str, now_ns: int) -> None:
    """Takes a seat that is not schedulable any more out of its turn: of the queue, a switch, or its lease."""
    if seat in seat.gpu.wait_queue:
        seat.gpu.wait_queue.leave(seat)
    elif seat.phase is NEXT:
        cancel_switch(node, seat.gpu, now_ns)
    elif seat.phase is HOLDING:
        leases.revoke(node, seat.gpu, seat, why, now_ns)


def readmit(seat: Seat, now_ns: int) -> None:
    """The seat may be schedulable again.  The time before does not count as waiting."""
    if seat.phase is WAITING and seat.schedulable and seat not in seat.gpu.wait_queue:
        seat.place.waiting_since_ns = now_ns
        seat.place.view = None
        seat.gpu.wait_queue.join(seat)


def _bring_in(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Grants members that are ready, and moves the memory of the first one that is not."""
    members, switch = gpu.schedule.members, gpu.switching.switch
    if switch is not None:
        residency.advance(node, gpu, now_ns)
        seat = switch.seat
        allotment = members[seat.client.client_id]
        if switch.done and _may_begin(gpu, seat, allotment):
            residency.close(node, gpu, now_ns)
            leases.grant(node, gpu, seat, allotment.quantum_ns, now_ns)
    if len(members) == len(gpu.leases.running):
        return
    waiting = [seat.client.client_id for seat in gpu.wait_queue.seats()] if gpu.schedule.side_by_side else members
    for client in list(waiting):
        if client not in members:
            continue
        seat, allotment = gpu.seats[client], members[client]
        if seat.phase is not WAITING or not _may_begin(gpu, seat, allotment):
            continue
        if is_complete(seat):
            gpu.wait_queue.leave(seat)
            residency.count_free(node, gpu, seat)
            leases.grant(node, gpu, seat, allotment.quantum_ns, now_ns)
        elif gpu.switching.switch is None:
            gpu.wait_queue.leave(seat)
            if residency.begin(node, gpu, seat, now_ns):
                seat.enter(NEXT)
            else:
                leases.grant(node, gpu, seat, allotment.quantum_ns, now_ns)


def _may_begin(gpu: Gpu, seat: Seat, allotment: Allotment) -> bool:
    """Every lease that must end has ended.  In a slot of its gang a mate may still drain: it may wait for this one."""
    if allotment.quantum_ns is None:
        return True
    draining = [other for other in gpu.leases.by_client.values() if other.phase is REVOKING]
    if not draining or gpu.gang is None or not is_complete(seat):
        return not draining
    return {seat.client.facts.gang, *(other.client.facts.gang for other in draining)} == {gpu.gang.name}


def _inform(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Members hear what they get, and when contention for their turn begins and ends."""
    waiters = len(gpu.wait_queue)
    for client, seat in gpu.leases.running.items():
        lease = seat.lease
        contended = waiters > 0 and lease.ends_ns is not None
        if contended is not (lease.contention is Contention.WAITERS):
            lease.contention = Contention.WAITERS if contended else Contention.QUIET
            node.out.append(Send(client, Waiters(seat.ordinal, lease.lease_id, waiters if contended else 0)))
        elif lease.contention is Contention.QUIET and lease.ends_ns is not None and now_ns >= lease.ends_ns:
            lease.contention = Contention.NONE
        client_settings.send_part(node, seat)


def deadline_ns(node: Node, gpu: Gpu, now_ns: int) -> int | None:
    """When `advance` must look again though nothing happens; None: never.

    A deadline that has passed waits for an event.  With a timer for it, the timer would fire without end.
    """
    switch, growing, recovery = gpu.switching.switch, gpu.memory.growing, gpu.recovery
    due: list[int | None] = [pinning.deadline_ns(gpu), gpu.schedule.ask_again_ns, *gpu.leases.debts.values()]
    if len(gpu.leases.by_client) > len(gpu.leases.running):
        due += [seat.lease.drain_deadline_ns for seat in gpu.leases.by_client.values()]
    if growing:
        due += [seat.memory.growth.deadline_ns for seat in growing.values() if seat.memory.growth is not None]
    if recovery.expected_holder is not None:
        due.append(recovery.deadline_ns)
    if switch is not None and not switch.done:
        due.append(switch.deadline_ns)
    if switch is not None or growing:
        due += [recovery.reconnected_at_ns if recovery.survivors else None, moves.stall_deadline_ns(node, gpu)]
    if gpu.leases.active_seats >= 2 and not gpu.schedule.side_by_side:
        due += [seat.lease.ends_ns for seat in gpu.leases.running.values() if seat.lease.contention is Contention.QUIET]
    if len(gpu.wait_queue):
        due += [leases.next_due_ns(seat) for seat in gpu.leases.running.values()]
    return min((at_ns for at_ns in due if at_ns is not None and at_ns > now_ns), default=None)
