"""The life of one lease: request, grant, revoke, release, overdue.

Rules:
- Lease ids of a GPU only grow.
- A release is accepted for the lease that the client has, whether it was revoked or not.
- A drain that passes its deadline is set aside: other clients run beside it.
- A drain longer than a quantum is a debt of its owner, the user or slot: while others want the GPU, no client of that
  owner is granted until every other owner could have had as much time.
- Shortly before a turn ends its holder and the expected next client are alerted, once a turn while others wait: a
  processor that has slept for a millisecond takes up to 150 us to wake, and a hand-over is three messages in a row.  A
  wrong guess costs its receiver some wake-ups, and changes no decision.
- The journal names every process that may work on the GPU when this coordinator dies: a sole holder, `MANY_HOLDERS`
  for several, and in recovery the process that this coordinator waits for.  Overdue and stray leases beside a holder
  are left out: their clients are told to stop, and a claim of theirs makes the lease stray again.

Non-goals: when leases begin and end (reconcile.py), what memory moves (memory/residency.py), claims (recovery.py).
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import Final

from nvshare.coordinator.engine.gangs import slots
from nvshare.coordinator.engine.memory import claims, moves, pinning, residency
from nvshare.coordinator.engine.memory.client_settings import (
    send_part,
    send_settings,
    send_settings_to_all,
)
from nvshare.coordinator.engine.memory.quantum import automatic_quantum_ns, moving_average
from nvshare.coordinator.model.commands import MANY_HOLDERS, Kill, Log, RecordLease, Send
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, IDLE, OVERDUE, REVOKING, WAITING, WITH_LEASE, Contention, Seat
from nvshare.coordinator.model.settings import MILLISECOND_NS, OverdueAction
from nvshare.coordinator.protocol.messages import (
    Grant,
    MemoryMode,
    Release,
    ReleaseReason,
    RemoteProtocolError,
    Revoke,
    Standby,
)
from nvshare.scheduler_policies.api import JobLeft, TurnEnded

ALERT_NS: Final = 1_500_000
"""Time between an alert and the end of the turn.  The shell's timer has a resolution of a millisecond."""
ALERTED_QUANTUM_NS: Final = 4 * ALERT_NS
"""In a shorter turn no processor falls asleep."""
LONGEST_ALERT_NS: Final = 20 * MILLISECOND_NS
"""The longest time that a client is asked to stay awake at each turn of another."""


def request(node: Node, seat: Seat, now_ns: int) -> None:
    """A thread of the client waits.  Idempotent: a request that crosses a grant or a revocation changes nothing."""
    gpu = seat.gpu
    if seat.phase is not IDLE or seat.lease.stray:
        return
    activate(node, gpu, seat)
    seat.enter(WAITING)
    place = seat.place
    place.waiting_since_ns = now_ns
    place.view = None
    if seat.schedulable:
        gpu.wait_queue.join(seat)
        gpu.schedule.stale = True


def activate(node: Node, gpu: Gpu, seat: Seat) -> None:
    """Counts the client among those that use the GPU, from its first request until it leaves."""
    if seat.place.active:
        return
    seat.place.active = True
    gpu.leases.active_seats += 1
    if gpu.leases.active_seats == 2:
        send_settings_to_all(node, gpu)  # from now on they are paced


def grant(node: Node, gpu: Gpu, seat: Seat, quantum_ns: int | None, now_ns: int) -> None:
    """The seat has the lease from now on.  The caller has removed it from the wait queue.

    `quantum_ns` None: for as long as the plan names it.
    """
    leases, mine, all_seats = gpu.leases, seat.statistics, gpu.leases.statistics
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
    if quantum_ns is not None:
        quantum_ns = renewed_quantum_ns(gpu, quantum_ns)
    start_lease(node, gpu, seat, lease_id, quantum_ns, now_ns)
    gang = gpu.gang
    seat.lease.called = gang is not None and seat.client.facts.gang == gang.name and gang.caller != gpu.uuid
    mine.leases += 1
    all_seats.grants += 1
    if leases.last_holder != client:
        all_seats.handovers += leases.last_holder != 0
        moves.close_turn(gpu)
        leases.last_holder = client
        seat.lease.handed_over_from_ns = leases.free_since_ns
    else:
        seat.lease.handed_over_from_ns = None
    leases.free_since_ns = None
    node.notify(
        "granted",
        uuid=gpu.uuid,
        client=client,
        name=seat.client.identity.name,
        lease=lease_id,
        quantum_ns=quantum_ns or 0,
        waiters=len(gpu.wait_queue) if quantum_ns is not None else 0,
        waited_ns=waited_ns,
    )


def start_lease(node: Node, gpu: Gpu, seat: Seat, lease_id: int, quantum_ns: int | None, now_ns: int) -> None:
    """Records, journal and message of a grant or a confirmed claim."""
    client, lease, leases = seat.client.client_id, seat.lease, gpu.leases
    activate(node, gpu, seat)
    seat.enter(HOLDING)
    lease.lease_id = lease_id
    lease.granted_at_ns = lease.began_ns = now_ns
    lease.quiet_before_ns = gpu.quiet_clock_ns(now_ns)
    seat.place.recent.mark(now_ns, seat.statistics.used_ns)
    lease.revoked_at_ns = 0
    lease.ends_ns = None if quantum_ns is None else now_ns + quantum_ns
    lease.alerted = lease.called = False
    leases.by_client[client] = seat
    leases.changed_at_ns = now_ns
    _set_running(gpu, seat, True, now_ns)
    claims.claim(seat)
    waiters = len(gpu.wait_queue) if quantum_ns is not None else 0
    lease.contention = Contention.WAITERS if waiters else Contention.QUIET
    send_part(node, seat)
    send_settings(node, seat)
    record(node, gpu)
    node.out.append(Send(client, Grant(seat.ordinal, lease_id, waiters)))


def _set_running(gpu: Gpu, seat: Seat, runs: bool, now_ns: int) -> None:
    leases, client = gpu.leases, seat.client.client_id
    if runs:
        leases.running[client] = seat
        if leases.ran_since_ns is None:
            leases.ran_since_ns = now_ns
    elif leases.running.pop(client, None) is not None and not leases.running and leases.ran_since_ns is not None:
        leases.ran_ns += now_ns - leases.ran_since_ns
        leases.ran_since_ns = None


def keep_quiet_clock(gpu: Gpu, now_ns: int) -> None:
    """The clock runs from the end of an event that leaves nobody waiting to the next one that changes this."""
    leases, quiet = gpu.leases, not gpu.is_waited_for
    if quiet is (leases.quiet_since_ns is None):
        leases.quiet_ns, leases.quiet_since_ns = gpu.quiet_clock_ns(now_ns), now_ns if quiet else None


def revoke(node: Node, gpu: Gpu, seat: Seat, why: str, now_ns: int) -> None:
    """Asks for the lease back.  The seat HOLDS it, or its claim is stray."""
    lease, client = seat.lease, seat.client.client_id
    _set_running(gpu, seat, False, now_ns)
    seat.enter(REVOKING)
    claims.claim(seat)  # a stray claim had none
    deadline_ns = node.settings.drain_deadline_ns
    lease.revoked_at_ns = now_ns
    lease.drain_deadline_ns = now_ns + deadline_ns
    # A drain shortens each turn between two slots: a turn that is nearly over counts, or turns would not rotate.
    lease.interrupted = why == "slot" and lease.ends_ns is not None and 2 * now_ns < lease.began_ns + lease.ends_ns
    seat.statistics.revokes += 1
    gpu.leases.statistics.revokes += 1
    node.out.append(Send(client, Revoke(seat.ordinal, lease.lease_id, deadline_ns)))
    alert_next(node, gpu, seat, now_ns)
    node.notify("revoked", uuid=gpu.uuid, client=client, lease=lease.lease_id, why=why)


def set_overdue(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """The drain has passed its deadline.  Invariant 10: a hung client does not hang the others."""
    _charge_drain(gpu, seat, now_ns)
    seat.enter(OVERDUE)
    seat.lease.drain_deadline_ns = None
    seat.lease.interrupted = False
    gpu.leases.last_holder = seat.client.client_id
    gpu.schedule.stale = True
    claims.claim(seat)
    _count_overdue(node, gpu, seat)
    _notify_policy(node, gpu, seat, now_ns)


def _charge_drain(gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """Others have waited.  Drains at the same time count once."""
    leases, owner = gpu.leases, seat.client.owner
    excess_ns = now_ns - seat.lease.revoked_at_ns - gpu.rules.quantum_ns
    waiting = (each for each in gpu.seats.values() if each.place.waiting_since_ns is not None)
    if excess_ns > 0 and (others := {each.client.owner for each in waiting} - {owner}):
        leases.debts[owner] = max(leases.debts.get(owner, 0), now_ns + excess_ns * len(others))


def end_debts(gpu: Gpu, now_ns: int) -> None:
    """Clients whose owner's debt is paid wait in turn from now on."""
    for owner in [owner for owner, until_ns in gpu.leases.debts.items() if now_ns >= until_ns]:
        del gpu.leases.debts[owner]
        gpu.schedule.stale = True
        for seat in gpu.wait_queue.seats():
            if seat.client.owner == owner:
                seat.place.waiting_since_ns = now_ns  # the policy is not to blame for the time before
                gpu.wait_queue.changed(seat)


def _count_overdue(node: Node, gpu: Gpu, seat: Seat) -> None:
    """Counts, logs, and acts as configured."""
    seat.statistics.overdue += 1
    gpu.leases.statistics.overdue += 1
    client, action = seat.client, node.settings.overdue_action
    node.notify("overdue", uuid=gpu.uuid, client=client.client_id, lease=seat.lease.lease_id, action=action.value)
    text = f"{gpu.uuid}: {client.identity} did not finish its work in time (drain_deadline); action: {action.value}"
    node.out.append(Log(logging.WARNING, text))
    if action is OverdueAction.DEMOTE:
        seat.place.demoted = True
    elif action is OverdueAction.KILL:
        node.out.append(Kill(client.client_id, client.identity.process_id, text))


def _notify_policy(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """The policy hears of the end of a turn once: when the lease is released or becomes overdue."""
    rate = seat.sent.allotment.rate if seat.sent.allotment is not None else 1.0
    quiet_ns = gpu.quiet_clock_ns(now_ns) - seat.lease.quiet_before_ns
    gpu.policy_guard.observe(lambda: TurnEnded(seat.view(), now_ns, seat.lease.called, rate, quiet_ns), node.out)
    seat.place.charged_ns, seat.place.view = seat.held_ns(now_ns), None


def end_lease(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> int:
    """The lease is over, for whatever reason.  Returns how long it was held."""
    leases, lease, place = gpu.leases, seat.lease, seat.place
    if seat.phase is REVOKING:
        _charge_drain(gpu, seat, now_ns)
    del leases.by_client[seat.client.client_id]
    leases.changed_at_ns = now_ns
    held_ns = 0 if lease.granted_at_ns is None else now_ns - lease.granted_at_ns
    _set_running(gpu, seat, False, now_ns)
    seat.enter(IDLE)
    seat.statistics.used_ns += held_ns
    seat.place.recent.mark(now_ns, seat.statistics.used_ns)
    gpu.leases.statistics.held_ns += held_ns
    lease.granted_at_ns = None
    lease.drain_deadline_ns = None
    place.last_released_ns = now_ns
    if not lease.interrupted:
        place.turn = leases.next_turn
        leases.next_turn += 1
    lease.stray = False
    lease.lease_id = 0
    gpu.schedule.stale = True
    gpu.schedule.members.pop(seat.client.client_id, None)  # a request in the same message waits in its turn
    claims.claim(seat)
    return held_ns


def release(node: Node, seat: Seat, message: Release, now_ns: int) -> None:
    """The client gives its lease back."""
    gpu, lease = seat.gpu, seat.lease
    if lease.stray and seat.phase is IDLE and message.lease_id == lease.lease_id:  # it was never granted
        lease.stray, lease.lease_id = False, 0
        if message.wanted:
            request(node, seat, now_ns)
        return
    if message.lease_id != lease.lease_id or seat.phase not in WITH_LEASE:
        raise RemoteProtocolError(f"releases lease {message.lease_id}, but has {lease.lease_id or 'none'}")
    revoked = seat.phase is not HOLDING
    in_time = seat.phase is not OVERDUE
    idle = message.reason == ReleaseReason.IDLE and not revoked
    _measure_switch(gpu, node, seat, message, now_ns)
    gpu.leases.free_since_ns = min(now_ns, lease.revoked_at_ns + message.drain_ns) if revoked else now_ns
    seat.statistics.submissions += message.submissions
    seat.statistics.idle_releases += idle
    gpu.leases.statistics.idle_releases += idle
    if not message.drained and in_time:
        _count_overdue(node, gpu, seat)
    elif in_time:
        seat.place.demoted = False
    lease.interrupted = lease.interrupted and message.wanted
    stale_before = gpu.schedule.stale
    held_ns = end_lease(node, gpu, seat, now_ns)
    if in_time and not lease.interrupted:
        _notify_policy(node, gpu, seat, now_ns)
    node.notify(
        "released",
        uuid=gpu.uuid,
        client=seat.client.client_id,
        lease=message.lease_id,
        idle=idle,
        drained=message.drained,
        drain_ns=message.drain_ns,
        held_ns=held_ns,
        opened_at_ns=message.opened_at_ns,
    )
    pinning.lease_ended(node, seat, message, revoked=revoked, now_ns=now_ns)
    if message.wanted:
        request(node, seat, now_ns)
    if revoked and _turn_waits_for_drains(gpu):  # so the last drain is the one to ask the policy after
        gpu.schedule.stale = stale_before


def _turn_waits_for_drains(gpu: Gpu) -> bool:
    """A member comes for a turn, which begins when all others have drained."""
    if all(seat.phase is not REVOKING for seat in gpu.leases.by_client.values()):
        return False
    comers = (member for client, member in gpu.schedule.members.items() if client not in gpu.leases.running)
    return any(member.quantum_ns is not None for member in comers)


def client_left(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """The client is gone.  Invariant 6: everything that it held or waited for on this GPU is free."""
    client = seat.client.client_id
    if seat in gpu.wait_queue:
        gpu.wait_queue.leave(seat)
    if seat.phase in WITH_LEASE:
        gpu.leases.free_since_ns = now_ns
        if not seat.lease.stray:
            gpu.recovery.lost = (seat.lease.lease_id, seat.client.identity.process_id)
        in_time = seat.phase is not OVERDUE
        end_lease(node, gpu, seat, now_ns)
        if in_time:
            _notify_policy(node, gpu, seat, now_ns)
    residency.client_left(node, seat, now_ns)
    del gpu.seats[client]
    gpu.schedule.members.pop(client, None)
    slots.remove_member(node, seat)
    gpu.schedule.stale = True
    gpu.policy_guard.observe(lambda: JobLeft(client), node.out)
    if seat.place.active:
        gpu.leases.active_seats -= 1
        if gpu.leases.active_seats == 1:
            send_settings_to_all(node, gpu)  # the one left need not be paced


def _measure_switch(gpu: Gpu, node: Node, seat: Seat, message: Release, now_ns: int) -> None:
    """Takes samples of the hand-over and the drain.

    A drain that failed has no cost.  The client reports the figures, so impossible ones are dropped.
    """
    granted_at_ns, costs = seat.lease.granted_at_ns, gpu.switching
    if granted_at_ns is None or seat.phase is OVERDUE or not message.drained:
        return
    start_ns, opened_at_ns, drain_ns = seat.lease.handed_over_from_ns, message.opened_at_ns, message.drain_ns
    if start_ns is not None and granted_at_ns <= opened_at_ns <= now_ns and opened_at_ns >= start_ns:
        sample_ns = opened_at_ns - start_ns
        costs.recent_handovers_ns.append(sample_ns)
        costs.handover_average_ns = moving_average(costs.handover_average_ns, sample_ns)
    if seat.phase is HOLDING or drain_ns > now_ns - granted_at_ns:
        return
    costs.recent_drains_ns.append(drain_ns)
    costs.drain_average_ns = moving_average(costs.drain_average_ns, drain_ns)
    costs.measured += 1
    if gpu.settings.quantum_ns is None:
        set_quantum(gpu, automatic_quantum_ns(gpu))


def set_quantum(gpu: Gpu, quantum_ns: int) -> None:
    """Puts a quantum in force; the policy decides what it means for present turns."""
    if quantum_ns != gpu.rules.quantum_ns:
        gpu.rules.quantum_ns = quantum_ns
        gpu.rules.view = None
        gpu.schedule.stale = True


def renewed_quantum_ns(gpu: Gpu, quantum_ns: int) -> int:
    """The quantum that a policy gave, or the automatic one if the policy gave that and it has changed."""
    before_ns = gpu.rules.quantum_ns
    if gpu.settings.quantum_ns is None:
        set_quantum(gpu, automatic_quantum_ns(gpu))
    return gpu.rules.quantum_ns if quantum_ns == before_ns else quantum_ns


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
    if len(leases) > 1:
        some = (seat for seat in leases.values() if seat.phase is not OVERDUE and not seat.lease.stray)
        regular = list(islice(some, 2))
        if len(regular) != 1:
            return MANY_HOLDERS
        return regular[0].client.identity.process_id
    return next(iter(leases.values())).client.identity.process_id


# --- alerts before the end of a turn ----------------------------------------------------------------------------------


def next_due_ns(seat: Seat) -> int | None:
    """When something is due for a running client while others wait: the alert, then the end of its turn."""
    lease = seat.lease
    return lease.ends_ns if lease.ends_ns is None or _no_alert(seat) else lease.ends_ns - ALERT_NS


def alert_before_end(node: Node, gpu: Gpu, now_ns: int) -> None:
    """Acts once for each turn, shortly before its end."""
    if not len(gpu.wait_queue):
        return
    for client, seat in gpu.leases.running.items():
        end_ns = seat.lease.ends_ns
        if end_ns is not None and end_ns - ALERT_NS <= now_ns < end_ns and not _no_alert(seat):
            node.out.append(Send(client, Standby(seat.ordinal, end_ns - now_ns + MILLISECOND_NS)))
            alert_next(node, gpu, seat, now_ns)


def alert_next(node: Node, gpu: Gpu, seat: Seat, now_ns: int) -> None:
    """Alerts the client that will probably be next, so that it is awake when the seat has drained."""
    following = None if seat.lease.alerted else _following(gpu)
    if following is None:
        return
    seat.lease.alerted = True
    end_ns = now_ns if seat.lease.ends_ns is None else seat.lease.ends_ns
    within_ns = max(0, end_ns - now_ns) + MILLISECOND_NS + 2 * int(gpu.switching.drain_average_ns)
    node.out.append(Send(following.client.client_id, Standby(following.ordinal, min(LONGEST_ALERT_NS, within_ns))))


def _following(gpu: Gpu) -> Seat | None:
    """The member that waits for a lease to end, else the next client in turn."""
    members = (gpu.seats[client] for client in gpu.schedule.members if client in gpu.seats)
    return next((seat for seat in members if seat in gpu.wait_queue), None) or residency.next_seat(gpu)


def _no_alert(seat: Seat) -> bool:
    lease = seat.lease
    if lease.alerted or lease.ends_ns is None:
        return True
    turn_ns = min(lease.ends_ns - lease.began_ns, seat.gpu.rules.quantum_ns)  # a policy may have renewed it
    return turn_ns < ALERTED_QUANTUM_NS
