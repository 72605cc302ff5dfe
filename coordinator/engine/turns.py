"""Turns on one GPU: when leases begin and end.

Rules:
- `advance` is level-triggered: it looks at the GPU and does what is due, so events only record what happened.
- Exclusive sharing: a grant needs every other lease of the GPU to be over or overdue (`leases.blocked`).
- Beside an overdue lease only clients run whose memory fits beside it (`switching.fits_beside_overdue`).
- The quantum counts from the grant.  It ends only while another client waits.

Non-goals: which client is next (the policy), what memory moves (memory/planner.py).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from nvshare.coordinator.engine import leases, standby
from nvshare.coordinator.gangs import coscheduling, members
from nvshare.coordinator.memory import orders, pinning, prefetch, switching
from nvshare.coordinator.model.commands import Log, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, REVOKING
from nvshare.coordinator.protocol.messages import Sharing, Waiters

if TYPE_CHECKING:
    from nvshare.coordinator.model.gang import Gang


def advance(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Does what is due on this GPU."""
    recovery, by_client, queue = gpu.recovery, gpu.leases.by_client, gpu.wait_queue
    if recovery.expected_holder is not None and now_ns >= recovery.deadline_ns:
        recovery.expected_holder = None
        node.out.append(Log(logging.WARNING, f"{gpu.uuid}: nobody claimed the lease of the earlier coordinator"))
    for seat in [seat for seat in by_client.values() if seat.phase is REVOKING] if by_client else ():
        if seat.lease.drain_deadline_ns is not None and now_ns >= seat.lease.drain_deadline_ns:
            leases.set_overdue(node, gpu, seat, now_ns)
    orders.mark_stalled(node, gpu, now_ns)
    if gpu.switching.switch is not None:
        _end_switch(node, gpu, now_ns)
    if len(queue):
        if gpu.rules.sharing is Sharing.CONCURRENT:
            for seat in queue.seats():
                queue.leave(seat)
                leases.grant(node, gpu, seat, gpu.rules.quantum_ns, now_ns)
        else:
            _end_quantum(node, gpu, now_ns)
            _choose_next(node, gpu, now_ns)
    _send_waiters(node, gpu)
    prefetch.advance(node, gpu, now_ns)


def _end_switch(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Grants the lease once memory has moved."""
    switching.advance(node, gpu, now_ns)
    switch = gpu.switching.switch
    if switch is None or not switch.done or members.waits_for_mates(gpu):
        return
    seat, quantum_ns = switch.seat, switch.quantum_ns
    if quantum_ns is not None and switch.policy is not gpu.policy_guard.policy:  # as in `_end_quantum`
        quantum_ns = min(quantum_ns, gpu.rules.quantum_ns)
    switching.close(node, gpu, now_ns)
    leases.grant(node, gpu, seat, quantum_ns or leases.renew_quantum(node, gpu, seat, now_ns), now_ns)
    if switch.co_scheduled:  # its gang has had its turn meanwhile
        seat.gang_turn.co_scheduled_at_ns = now_ns
    leases.consider_preemption(node, gpu, now_ns)


def _end_quantum(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Revokes the holder's lease at the end of its quantum, unless the policy renews it."""
    seat = gpu.leases.holder
    if seat is None or seat.phase is not HOLDING:
        return
    lease, guard = seat.lease, gpu.policy_guard
    if gpu.leases.policy_epoch != guard.replaced and not members.in_gang_turn(seat):
        # A policy that has been replaced chose the length of this turn, and may have been replaced because of it.
        gpu.leases.policy_epoch = guard.replaced
        if lease.quantum_ends_ns > now_ns + gpu.rules.quantum_ns:
            lease.begin_quantum(now_ns, gpu.rules.quantum_ns)
    standby.alert_before_end(node, gpu, seat, now_ns)
    if now_ns < lease.quantum_ends_ns:
        return
    if seat.gang_turn.gang is not None and members.in_gang_turn(seat):
        _end_gang_turn(node, seat.gang_turn.gang, now_ns)
        return
    if guard.renew(lambda: seat.view(now_ns), gpu.wait_queue.views(), gpu.view(), now_ns, node.out):
        lease.begin_quantum(now_ns, gpu.rules.quantum_ns)
        members.turn_renewed(seat, now_ns)
        return
    leases.revoke(node, gpu, seat, "quantum", now_ns)


def _end_gang_turn(node: Node, gang: Gang, now_ns: int) -> None:
    """Revokes a gang's leases where others wait, unless all policies there renew them."""
    seats = [seat for seat in members.running_members(gang) if members.in_gang_turn(seat)]
    contended = [seat for seat in seats if len(seat.gpu.wait_queue)]
    for seat in contended:
        gpu = seat.gpu
        if not gpu.policy_guard.renew(partial(seat.view, now_ns), gpu.wait_queue.views(), gpu.view(), now_ns, node.out):
            break
    else:
        gang.ends_ns = now_ns + gang.quantum_ns
        for seat in seats:
            seat.lease.quantum_ends_ns = gang.ends_ns
            members.turn_renewed(seat, now_ns)
            node.changed_gpus[seat.gpu.uuid] = seat.gpu
        return
    for seat in contended:
        leases.revoke(node, seat.gpu, seat, "quantum", now_ns)


def _choose_next(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Gives the free GPU to the client that the policy chooses; memory moves first where it must."""
    gpu.leases.policy_wakes_at_ns = None  # only the policy's answer of this moment counts
    by_client, queue = gpu.leases.by_client, gpu.wait_queue
    if gpu.switching.switch is not None or gpu.recovering or (by_client and leases.blocked(gpu)):
        return
    if not by_client:
        waiting = queue.views()
    else:  # only overdue leases
        fitting = [seat for seat in queue.seats() if switching.fits_beside_overdue(gpu, seat)]
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
    queue.leave(seat)
    if switching.begin(node, gpu, seat, quantum_ns, now_ns):
        seat.enter(NEXT)
    else:
        leases.grant(node, gpu, seat, quantum_ns or leases.renew_quantum(node, gpu, seat, now_ns), now_ns)


def _choose_member(node: Node, gpu: Gpu, now_ns: int) -> None:
    """The GPU is reserved for a gang: its member is next, and waits for the others of the gang."""
    seat = coscheduling.next_member(node, gpu, now_ns)
    if seat is None:
        return
    gpu.wait_queue.leave(seat)
    if not switching.begin(node, gpu, seat, None, now_ns):
        switching.wait_for_mates(gpu, seat, now_ns)
    assert gpu.switching.switch is not None
    gpu.switching.switch.co_scheduled = members.will_be_co_scheduled(seat)
    seat.enter(NEXT)
    node.changed_gpus[gpu.uuid] = gpu


def _send_waiters(node: Node, gpu: Gpu) -> None:
    """The holder hears when contention begins and ends."""
    seat = gpu.leases.holder
    if seat is None or seat.phase is not HOLDING:
        return
    waiters = len(gpu.wait_queue)
    if seat.lease.waiters_sent is not (waiters > 0):
        seat.lease.waiters_sent = waiters > 0
        node.out.append(Send(seat.client.client_id, Waiters(seat.ordinal, seat.lease.lease_id, waiters)))


def deadline_ns(node: Node, gpu: Gpu, now_ns: int) -> int | None:
    """When `advance` must look again though nothing happens; None: never.

    A deadline that has passed waits for an event.  With a timer for it, the timer would fire without end.
    """
    switch, growing, holder = gpu.switching.switch, gpu.memory.growing, gpu.leases.holder
    recovery, wakes_at_ns = gpu.recovery, gpu.leases.policy_wakes_at_ns
    due: list[int | None] = [members.deadline_ns(gpu), pinning.deadline_ns(gpu)]
    due += [seat.lease.drain_deadline_ns for seat in gpu.leases.by_client.values()]
    due += [seat.memory.growth.deadline_ns for seat in growing.values() if seat.memory.growth is not None]
    if recovery.expected_holder is not None:
        due.append(recovery.deadline_ns)
    if switch is not None and not switch.done:
        due.append(switch.deadline_ns)
    if switch is not None or growing:
        due += [recovery.reconnected_at_ns if recovery.survivors else None, orders.stall_deadline_ns(node, gpu)]
    if len(gpu.wait_queue) and gpu.rules.sharing is Sharing.EXCLUSIVE:
        if holder is not None and holder.phase is HOLDING:
            due.append(standby.next_due_ns(holder))
        elif wakes_at_ns is not None and switch is None and not leases.blocked(gpu):
            due.append(wakes_at_ns)
    return min((at_ns for at_ns in due if at_ns is not None and at_ns > now_ns), default=None)
