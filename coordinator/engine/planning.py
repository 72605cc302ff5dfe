"""The plan of one GPU: the policy's, within what the operator, the gangs, memory and the cost of switching allow.

Rules:
- The policy is asked when something has changed that matters to it, at the end of a turn while others wait, and when
  it wants to be.
- It does not see waiting clients whose owner is in debt (engine/leases.py), as long as there are others.
- `exclusive` keeps the first member only.  `concurrent` makes all clients members as long as their memory fits.
- A member whose memory does not fit beside the others' is left out; the first one never is.
- A switch of memory that would exceed its share of the time waits (memory/switch_credit.py).

Non-goals: carrying out the plan (reconcile.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from nvshare.coordinator.engine.gangs import slots
from nvshare.coordinator.engine.memory import claims, switch_credit
from nvshare.coordinator.engine.policy_guard import FALLBACK, LATEST_NS, SOONEST_NS
from nvshare.coordinator.model.commands import Log
from nvshare.coordinator.model.gpu import Gpu, Schedule
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, OVERDUE, REVOKING, WAITING, Seat
from nvshare.coordinator.model.settings import SECOND_NS, Sharing
from nvshare.scheduler_policies.api import Allotment, JobClass, JobView, Plan, State

SPARE_SHARE: Final = 16
"""A client that was left out for lack of memory becomes a member again once capacity / 16 is free beside it."""
LOOK_NS: Final = SECOND_NS
"""In concurrent sharing all clients are considered this often, and as soon as their memory does not fit."""
STARVED_NS: Final = 120 * SECOND_NS
"""A policy that leaves the first job in turn order waiting for this time of the others' turns is replaced."""


def update(node: Node, gpu: Gpu, now_ns: int) -> bool:
    """Asks the policy if it must be asked.  O(1) otherwise, while all memory fits.  Returns whether it was asked."""
    schedule = gpu.schedule
    if not (schedule.stale or _is_due(gpu, now_ns) or _fit_has_changed(gpu) or _may_fit_beside_overdue(gpu)):
        return False
    if _all_fit_still(gpu, now_ns):
        schedule.stale = False
        clients = (seat.client.client_id for seat in gpu.wait_queue.seats())
        schedule.members |= {client: Allotment(client) for client in clients}
        return False
    schedule.stale = schedule.held_back = schedule.side_by_side = False
    schedule.planned_ns = now_ns
    before, was_crowded = schedule.members, schedule.crowded
    jobs = _jobs(node, gpu, now_ns)
    if not jobs:
        schedule.members, schedule.order, schedule.ask_again_ns, schedule.crowded = {}, (), None, False
        return True
    plan, members = _planned(node, gpu, jobs, now_ns)
    if schedule.crowded and not was_crowded:  # the policy did not know that memory is short
        plan, members = _planned(node, gpu, jobs, now_ns)
    schedule.order, schedule.why, schedule.reports = plan.order, plan.why, plan.reports
    again_ns = plan.ask_again_ns
    if again_ns is not None:
        again_ns = min(max(again_ns, now_ns + SOONEST_NS), now_ns + LATEST_NS)
    schedule.ask_again_ns = again_ns
    members = _affordable(node, gpu, schedule, members, now_ns)
    schedule.members = _with_turns_that_come(gpu, before, members)
    _apply_turns(gpu, schedule, now_ns)
    if before.keys() != schedule.members.keys():
        names = ",".join(str(client) for client in schedule.members)
        node.notify("plan", uuid=gpu.uuid, running=names, why=schedule.why)
    in_turns = any(member.quantum_ns is not None for member in schedule.members.values())
    concurrent = gpu.settings.sharing is Sharing.CONCURRENT
    schedule.side_by_side = concurrent and not in_turns and len(schedule.members) == len(jobs)
    return True


def _all_fit_still(gpu: Gpu, now_ns: int) -> bool:
    """Whether clients that come join the members, without a look at all of them.  Idle ones leave at the next look."""
    schedule, memory, leases = gpu.schedule, gpu.memory, gpu.leases
    return (
        schedule.side_by_side
        and gpu.settings.sharing is Sharing.CONCURRENT
        and now_ns < schedule.planned_ns + LOOK_NS
        and memory.needed_bytes <= memory.capacity_bytes
        and not (memory.growing or gpu.wait_queue.hides)
        and len(leases.by_client) == len(leases.running)
    )


def _with_turns_that_come(
    gpu: Gpu, before: dict[int, Allotment], members: dict[int, Allotment]
) -> dict[int, Allotment]:
    """A member that comes for a turn keeps it until the others have drained.

    The policy does not see clients that drain, so it may find nobody to take turns with.  In concurrent sharing there
    are no turns.
    """
    if len(gpu.leases.by_client) == len(gpu.leases.running) or gpu.settings.sharing is Sharing.CONCURRENT:
        return members
    if not any(seat.phase is REVOKING and seat.lease.ends_ns is not None for seat in gpu.leases.by_client.values()):
        return members
    return {
        client: before[client]
        if new.quantum_ns is None and client in before and gpu.seats[client].phase is WAITING
        else new
        for client, new in members.items()
    }


def _is_due(gpu: Gpu, now_ns: int) -> bool:
    again_ns = gpu.schedule.ask_again_ns
    if again_ns is not None and now_ns >= again_ns:
        return True
    return bool(len(gpu.wait_queue)) and any(
        seat.lease.ends_ns is not None and now_ns >= seat.lease.ends_ns for seat in gpu.leases.running.values()
    )


def _jobs(node: Node, gpu: Gpu, now_ns: int) -> tuple[JobView, ...]:
    """The clients that may run: those that do or come, then those that wait, in turn order.

    A member that waits for others to drain comes, so that a policy does not change its mind about it meanwhile.
    """
    here = list(gpu.leases.running.values())
    if len(gpu.leases.running) > 1:
        silent_since_ns = now_ns - node.settings.silent_ns
        here = [seat for seat in here if not _is_idle(seat, silent_since_ns)] or here
    if gpu.switching.switch is not None:
        here.append(gpu.switching.switch.seat)
    if len(here) > 1:
        here.sort(key=_turn)
    schedule, queue = gpu.schedule, gpu.wait_queue
    present = [seat.view() for seat in here]
    coming: list[Seat] = []
    if len(schedule.members) > len(present):
        named = (gpu.seats.get(client) for client in schedule.members)
        coming = [seat for seat in named if seat is not None and seat in queue and not queue.hides_seat(seat)]
    if len(gpu.leases.by_client) > len(gpu.leases.running) and any(
        seat.phase is OVERDUE for seat in gpu.leases.by_client.values()
    ):
        fitting = [seat for seat in queue.seats() if claims.fits_beside_overdue(gpu, seat)]
        ranked = [seat for seat in fitting if not seat.place.demoted] or fitting
        coming = [seat for seat in coming if seat in ranked]
        waiting = tuple(seat.view() for seat in ranked if seat not in coming)
    else:
        waiting = queue.views_without(coming) if coming else queue.views()
    if coming:
        present += [replace(seat.view(), state=State.COMING) for seat in coming]
        present.sort(key=lambda job: job.turn.number)
    jobs = (*present, *waiting)
    if gpu.leases.debts:
        return tuple(job for job in jobs if job.state is State.RUNNING or not gpu.seats[job.client].in_debt) or jobs
    return jobs


def _is_idle(seat: Seat, silent_since_ns: int) -> bool:
    """The member has done nothing for so long that its lease is better given back: its next call asks again."""
    progress, lease = seat.progress, seat.lease
    return progress.last.lease_id == lease.lease_id and progress.last.at_ns < silent_since_ns and lease.ends_ns is None


def _turn(seat: Seat) -> int:
    return seat.place.turn


def _planned(node: Node, gpu: Gpu, jobs: tuple[JobView, ...], now_ns: int) -> tuple[Plan, dict[int, Allotment]]:
    """The plan, and those of its members that fit."""
    if node.gangs:
        plan = slots.plan(node, gpu, jobs, lambda some: _ask(node, gpu, tuple(some), now_ns), now_ns)
    else:
        plan = _ask(node, gpu, jobs, now_ns)
    plan = _limited(gpu, plan)
    if gpu.wait_queue.hides:  # demoted clients wait for an end, so there is one
        quantum_ns = gpu.rules.quantum_ns
        ending = (replace(member, quantum_ns=member.quantum_ns or quantum_ns) for member in plan.running)
        plan = replace(plan, running=tuple(ending))
    members = _fitting(gpu, plan.running)
    gpu.schedule.crowded = len(members) < len(plan.running)
    gang = gpu.gang
    if gpu.schedule.crowded and gang is not None and not gang.told:
        left_out = [gpu.seats[a.client].client for a in plan.running if a.client not in members]
        mates = [client for client in left_out if client.facts.gang == gang.name]
        if mates:
            gang.told = True
            text = f"{gpu.uuid}: {mates[0].identity} does not fit beside the other members of gang {gang.name}; "
            node.out.append(Log(logging.WARNING, f"{text}they take turns, and collectives make no progress"))
    return plan, members


def _ask(node: Node, gpu: Gpu, jobs: tuple[JobView, ...], now_ns: int) -> Plan:
    sharing = gpu.settings.sharing
    if sharing is Sharing.CONCURRENT:
        plan = Plan(tuple(Allotment(job.client) for job in jobs), why="the operator wants all programs side by side")
        if len(_fitting(gpu, plan.running)) == len(jobs):
            return plan
    plan = gpu.policy_guard.decide(gpu.view(), jobs, now_ns, node.out)
    running = {allotment.client for allotment in plan.running}
    # A job with a limit waits by its own wish.
    first = next((job for job in jobs if job.client not in running and job.rank.share_limit == 1.0), None)
    if first is not None and first.turn.waiting_since_ns is not None and not gpu.recovering and gpu.gang is None:
        turns = len(gpu.seats) * (12 if node.gangs else 4)  # a gang's slot of two quanta may follow each turn
        limit_ns = STARVED_NS + turns * (gpu.rules.quantum_ns + int(gpu.switching.wait_average_ns))
        starves = now_ns - first.turn.waiting_since_ns > limit_ns and gpu.schedule.members and plan.running
        if starves and gpu.policy_guard.name != FALLBACK:
            gpu.policy_guard.starves(first, now_ns, node.out)
            return _ask(node, gpu, jobs, now_ns)
    return plan


def _limited(gpu: Gpu, plan: Plan) -> Plan:
    """Exclusive sharing: the first member only, in a gang's slot with its mates, and it has a turn."""
    if gpu.settings.sharing is not Sharing.EXCLUSIVE or not plan.running:
        return plan
    if gpu.gang is not None:
        mates = tuple(a for a in plan.running if gpu.seats[a.client].client.facts.gang == gpu.gang.name)
        if mates:
            return replace(plan, running=mates)
    first = plan.running[0]
    if first.quantum_ns is None:
        first = replace(first, quantum_ns=gpu.rules.quantum_ns)
    return replace(plan, running=(first,))


# --- memory -----------------------------------------------------------------------------------------------------------


def needed_bytes(seat: Seat) -> int:
    """Memory that must be on the GPU while the client runs, its open question included."""
    growth = seat.memory.growth
    asked = 0 if growth is None else growth.total_bytes
    return min(max(seat.memory.allocated_bytes, seat.memory.claimed_bytes, asked), seat.gpu.memory.capacity_bytes)


def _fit_has_changed(gpu: Gpu) -> bool:
    """Whether members do not fit any more, or a client that was left out may fit again."""
    memory, schedule = gpu.memory, gpu.schedule
    if schedule.crowded and memory.allocated_bytes <= memory.capacity_bytes - memory.capacity_bytes // SPARE_SHARE:
        return True
    if len(schedule.members) < 2 or (memory.allocated_bytes <= memory.capacity_bytes and not memory.growing):
        return False
    members = tuple(schedule.members.values())
    return len(_fitting(gpu, members)) < len(members)


def _may_fit_beside_overdue(gpu: Gpu) -> bool:
    """Clients wait for room beside overdue ones, and any report of memory may have made it."""
    return not gpu.schedule.members and bool(gpu.leases.by_client) and len(gpu.wait_queue) > 0


def _fitting(gpu: Gpu, running: tuple[Allotment, ...]) -> dict[int, Allotment]:
    """The members whose memory fits together."""
    if len(running) < 2:
        return {allotment.client: allotment for allotment in running}
    free = gpu.memory.capacity_bytes - gpu.memory.immovable.bytes
    spare = gpu.memory.capacity_bytes // SPARE_SHARE if gpu.schedule.crowded else 0
    found: dict[int, Allotment] = {}
    for allotment in running:
        seat = gpu.seats[allotment.client]
        needs = needed_bytes(seat) - seat.room.immovable_bytes
        if found and needs > free - (0 if seat.phase is HOLDING or allotment.quantum_ns is not None else spare):
            continue
        free -= needs
        found[allotment.client] = allotment
    return found


def _affordable(
    node: Node, gpu: Gpu, schedule: Schedule, members: dict[int, Allotment], now_ns: int
) -> dict[int, Allotment]:
    """The members, or the present ones while a switch of memory would cost more than its share of the time."""
    present = [*gpu.leases.running.values()]
    if gpu.switching.switch is not None:
        present.append(gpu.switching.switch.seat)
    leaving = [seat for seat in present if seat.client.client_id not in members]
    if not leaving or not members:
        return members
    comers = [gpu.seats[client] for client in members if gpu.seats[client].phase is WAITING]
    if not any(claims.missing_bytes(seat) for seat in comers):
        return members
    urgent = any(seat.client.facts.rank.job_class is JobClass.INTERACTIVE for seat in comers)
    wait_ns = switch_credit.lacking_ns(gpu, now_ns, urgent=urgent)
    if wait_ns == 0:
        return members
    schedule.held_back = True
    again_ns = now_ns + max(wait_ns, SOONEST_NS)
    if gpu.leases.running:  # else nobody works it off, and the grant for which memory moves comes first
        schedule.ask_again_ns = again_ns if schedule.ask_again_ns is None else min(again_ns, schedule.ask_again_ns)
    if switch_credit.is_news(gpu, now_ns):
        text = f"{gpu.uuid}: turns are lengthened, because moving memory would take more than a fifth of the time"
        node.out.append(Log(logging.WARNING, text))
    schedule.order = (*(seat.client.client_id for seat in comers), *schedule.order)
    if gpu.settings.sharing is Sharing.EXCLUSIVE:  # perhaps since now
        members, leaving = {}, leaving[:1]
    kept = {seat.client.client_id: Allotment(seat.client.client_id, _until(seat, again_ns)) for seat in leaving}
    kept |= {client: allotment for client, allotment in members.items() if gpu.seats[client].phase in (HOLDING, NEXT)}
    return kept


def _until(seat: Seat, end_ns: int) -> int:
    """The quantum with which the present turn lasts until then, so that to the policy it is over."""
    return end_ns - seat.lease.began_ns if seat.phase is HOLDING else seat.gpu.rules.quantum_ns


def _apply_turns(gpu: Gpu, schedule: Schedule, now_ns: int) -> None:
    """Sets the ends of the running members' turns; a turn that is over begins anew."""
    for client, seat in gpu.leases.running.items():
        allotment, lease = schedule.members.get(client), seat.lease
        if allotment is None:
            continue
        if allotment.quantum_ns is None:
            lease.ends_ns = None
            continue
        if lease.began_ns + allotment.quantum_ns <= now_ns:
            lease.began_ns, lease.alerted = now_ns, False
            seat.place.view = None
        lease.ends_ns = lease.began_ns + allotment.quantum_ns
