"""Gangs: programs that compute at the same time, on several GPUs of this node or on one.

A gang's members exchange what they compute, so a turn of one alone is lost: coscheduling (Ousterhout, ICDCS 1982), of
GPUs as in Gandiva (Xiao et al., OSDI 2018).

Rules:
- A gang is *called* when the policy of a GPU gives a member a turn, or slots have been measured to be better than
  running side by side (trials.py), while mates want GPUs too, and other clients want one of them or two members want
  the same one.  Called gangs wait in one queue of the node; policies do not see them.
- A gang gets a *slot*: all GPUs that its members want, or none.  The first in the queue is first; a later one may pass
  it on GPUs that no earlier one wants.
- In a slot all members run, with the clients that run without a turn; with interactive ones only, if slots have been
  measured.  It lasts for a quantum from the moment at which all run, and for two at most; longer while no other client
  waits, or while members' memory comes in.  Members that come late join it.
- After a slot each GPU is its policy's for a quantum, if other clients want it then.
- A kernel of a collective may wait for a mate at the end of a slot.  If a member drains for `STUCK_NS` while a mate
  waits, the gang is called again, `RETRIES` times in a row: no other client could run there anyway.

Non-goals: what a plan does to leases (engine/reconcile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Final

from nvshare.coordinator.engine.gangs import trials
from nvshare.coordinator.model.gang import Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, REVOKING, WAITING, Seat
from nvshare.scheduler_policies.api import Allotment, JobClass, JobView, Plan

WANTING: Final = frozenset({WAITING, NEXT, HOLDING, REVOKING})
"""A member that gives its lease back counts: its drain may last until a mate computes, and then it asks again."""
STUCK_NS: Final = 100_000_000
RETRIES: Final = 3
AHEAD: Final = 8
"""Gangs of the queue whose memory comes in ahead."""
_NEARNESS: Final = {HOLDING: 0, NEXT: 1, WAITING: 2, REVOKING: 3}


def add_member(node: Node, seat: Seat) -> None:
    """The seat's client names a gang, or none."""
    name = seat.client.facts.gang
    if name:
        gang = node.gangs.setdefault(name, Gang(name))
        gang.seats.append(seat)
        for mate in gang.seats:
            mate.gpu.settings_changed()  # gang members get a longer idle timeout


def remove_member(node: Node, seat: Seat) -> None:
    """The seat is no member any more."""
    gang = node.gangs.get(seat.client.facts.gang)
    if gang is None:
        return
    gang.seats.remove(seat)
    for mate in gang.seats:
        mate.gpu.settings_changed()
    if not gang.seats:
        for gpu in list(gang.gpus.values()):
            _leave(node, gang, gpu)
        node.queue.pop(gang.name, None)
        del node.gangs[gang.name]


# --- the plan of one GPU ------------------------------------------------------------------------------------------


def plan(
    node: Node, gpu: Gpu, jobs: Sequence[JobView], decide: Callable[[Sequence[JobView]], Plan], now_ns: int
) -> Plan:
    """The plan of a slot, or the policy's for the jobs that no queued gang has; `decide` asks the policy."""
    found = decide(jobs) if gpu.gang is not None else _of_policy(node, gpu, jobs, decide, now_ns)
    gang = gpu.gang
    if gang is None:
        return found
    quantum_ns = _quantum_ns(gang)
    due_ns = (gang.began_ns if gang.together_ns is None else gang.together_ns) + quantum_ns
    ends_ns = due_ns if gang.together_ns is not None else max(due_ns + quantum_ns, _moves_until_ns(gang))
    if ends_ns <= now_ns:  # no other client waits
        ends_ns = now_ns + quantum_ns
    mine = [seat for seat in _wanting(gang) if seat.gpu is gpu and seat.phase is not REVOKING]
    mine.sort(key=lambda seat: (_NEARNESS[seat.phase], seat.place.turn))
    running = [
        Allotment(seat.client.client_id, max(1, ends_ns - (seat.lease.began_ns if seat.phase is HOLDING else now_ns)))
        for seat in mine
    ]
    members = {allotment.client for allotment in running}
    running += [replace(a, quantum_ns=None) for a in found.running if a.client not in members and _stays(gang, gpu, a)]
    ends = due_ns > now_ns and (gang.together_ns is None or _is_contended(node, gang))  # else a move's end is awaited
    again_ns = due_ns if ends else None
    why = f"gang {gang.name} has its slot{gang.trial.why}"
    return replace(found, running=tuple(running), ask_again_ns=again_ns, why=why)


def _stays(gang: Gang, gpu: Gpu, allotment: Allotment) -> bool:
    """A client without a turn, or one that runs without: else two that take turns would interrupt each other."""
    seat = gpu.seats[allotment.client]
    runs_on = allotment.quantum_ns is None or (seat.phase is HOLDING and seat.lease.ends_ns is None)
    return runs_on and not _makes_way(gang, seat)


def _makes_way(gang: Gang, seat: Seat) -> bool:
    """Whether a client that runs without a turn leaves the gang's slots."""
    return gang.trial.in_slots and seat.client.facts.rank.job_class is not JobClass.INTERACTIVE


def _of_policy(
    node: Node, gpu: Gpu, jobs: Sequence[JobView], decide: Callable[[Sequence[JobView]], Plan], now_ns: int
) -> Plan:
    """The policy's plan.  It may call gangs, and so begin a slot.

    If only members of queued gangs want the GPU, they run by the policy, as no other client could.
    """
    again_ns = _retry(node, gpu, now_ns)
    others = [job for job in jobs if job.gang not in node.queue] if node.queue else jobs
    found = decide(others or jobs)
    while others and gpu.gang is None and (gang := _named(node, gpu, found, now_ns)) is not None:
        gang.retries = 0
        _call(node, gang, gpu, now_ns)
        others = [job for job in others if job.gang != gang.name]
        found = decide(others) if others and gpu.gang is None else found
    if node.queue:
        again_ns = [*again_ns, _rests_until_ns(gpu)]
        soon = (seat for gang in islice(node.queue.values(), AHEAD) for seat in gang.seats if seat.gpu is gpu)
        order = tuple(seat.client.client_id for seat in soon)
        order = (*order, *(client for client in found.order if client not in order))
        found = replace(found, running=_before_slots(node, gpu, found.running, jobs, decide), order=order)
    here = (gang for gang in node.gangs.values() if gang.trial.why and any(seat.gpu is gpu for seat in gang.seats))
    told = "".join(gang.trial.why for gang in here)
    asked = [found.ask_again_ns] if found.ask_again_ns is not None else []
    due_ns = min([at_ns for at_ns in again_ns if at_ns > now_ns] + asked, default=None)
    return replace(found, ask_again_ns=due_ns, why=found.why + told)


def _before_slots(
    node: Node,
    gpu: Gpu,
    running: Sequence[Allotment],
    jobs: Sequence[JobView],
    decide: Callable[[Sequence[JobView]], Plan],
) -> tuple[Allotment, ...]:
    """Clients that leave a slot which is to come have turns until then.

    A client that is alone while the policy does not see the gang is one of them, or the gang would lose its rival.
    """
    here = [gang for gang in node.queue.values() if any(seat.gpu is gpu for seat in gang.seats)]
    if not here:
        return tuple(running)
    beside = {a.client for a in decide(jobs).running if a.quantum_ns is None}
    beside -= {client for client in beside if any(_makes_way(gang, gpu.seats[client]) for gang in here)}
    quantum_ns = gpu.rules.quantum_ns
    return tuple(a if a.client in beside else replace(a, quantum_ns=a.quantum_ns or quantum_ns) for a in running)


def _named(node: Node, gpu: Gpu, found: Plan, now_ns: int) -> Gang | None:
    """The first gang of the plan that needs a slot."""
    for allotment in found.running:
        seat = gpu.seats[allotment.client]
        gang = node.gangs.get(seat.client.facts.gang)
        if gang is None or seat not in _wanting(gang):
            continue
        if trials.has_slots(node, gang, _wanting(gang), allotment, now_ns) and _needs_slot(gang):
            return gang
    return None


def _retry(node: Node, gpu: Gpu, now_ns: int) -> list[int]:
    """Calls the gangs of members whose drain lasts; returns when to look again."""
    again_ns = []
    if len(gpu.leases.by_client) > len(gpu.leases.running):
        for seat in gpu.leases.by_client.values():
            gang = node.gangs.get(seat.client.facts.gang) if seat.phase is REVOKING else None
            if gang is None or gang.name in node.queue or gang.gpus or gang.retries >= RETRIES:
                continue
            again_ns.append(seat.lease.revoked_at_ns + STUCK_NS)
            if _is_stuck(seat, now_ns) and _needs_slot(gang) and any(mate.phase is WAITING for mate in gang.seats):
                gang.retries += 1
                _call(node, gang, gpu, now_ns)
    return again_ns


def _wanting(gang: Gang) -> list[Seat]:
    seats = (seat for seat in gang.seats if seat.phase in WANTING and seat.schedulable)
    return [seat for seat in seats if not (seat.place.demoted or seat.in_debt)]


def _needs_slot(gang: Gang) -> bool:
    """Whether members should run together, and would not by themselves."""
    seats = _wanting(gang)
    gpus = {seat.gpu.uuid: seat.gpu for seat in seats}
    among_rivals = len(gpus) >= _fewest(gang) and any(_has_rivals(gang, gpu) for gpu in gpus.values())
    return among_rivals or len(gpus) < len(seats)


def _fewest(gang: Gang) -> int:
    """Members that have a slot.  A gang that is in slots by measurement has no turns but these."""
    return 1 if gang.trial.in_slots else 2


def _is_contended(node: Node, gang: Gang) -> bool:
    """Whether others want a GPU of the slot; a gang in the queue may run there without a turn, and wait elsewhere."""
    if any(_has_rivals(gang, gpu) for gpu in gang.gpus.values()):
        return True
    return any(seat.gpu.gang is gang for other in node.queue.values() for seat in _wanting(other))


def _has_rivals(gang: Gang, gpu: Gpu) -> bool:
    """Whether clients outside of the gang wait for this GPU, or run on it and would leave it to a slot."""
    switch = gpu.switching.switch
    if switch is not None and switch.seat.client.facts.gang != gang.name:
        return True
    for seat in gpu.leases.running.values():
        if seat.client.facts.gang != gang.name and (seat.lease.ends_ns is not None or _makes_way(gang, seat)):
            return True
    return len(gpu.wait_queue) > sum(seat.gpu is gpu and seat in gpu.wait_queue for seat in gang.seats)


def _quantum_ns(gang: Gang) -> int:
    return max(gpu.rules.quantum_ns for gpu in gang.gpus.values())


# --- slots --------------------------------------------------------------------------------------------------------


def _call(node: Node, gang: Gang, gpu: Gpu, now_ns: int) -> None:
    gang.caller = gpu.uuid
    if gang.gpus:
        _join(node, gang, gpu)
        return
    node.queue[gang.name] = gang
    gpus = {seat.gpu.uuid: seat.gpu for seat in _wanting(gang)}
    node.notify("gang_due", gang=gang.name, gpus=len(gpus))
    for each in gpus.values():
        if each.gang is not None:  # its slot has an end from now on
            _changed(node, each)
        elif now_ns < (end_ns := _rests_until_ns(each)):
            each.schedule.ask_again_ns = min(end_ns, each.schedule.ask_again_ns or end_ns)
            node.concern(each)
    _begin_slots(node, now_ns)


def _begin_slots(node: Node, now_ns: int) -> None:
    """Begins the slots that can begin, in the order of the queue."""
    reserved = {gpu.uuid for gpu in node.gpus.values() if gpu.gang is not None or gpu.recovering}
    for gang in list(node.queue.values()):
        if len(reserved) == len(node.gpus):
            return
        gpus = {seat.gpu.uuid: seat.gpu for seat in _wanting(gang)}
        if not _needs_slot(gang):
            del node.queue[gang.name]
            for seat in gang.seats:
                _changed(node, seat.gpu)
            continue
        if reserved.isdisjoint(gpus) and all(_is_free(gang, gpu, now_ns) for gpu in gpus.values()):
            del node.queue[gang.name]
            gang.began_ns, gang.together_ns = now_ns, None
            for gpu in gpus.values():
                _join(node, gang, gpu)
        reserved |= gpus.keys()


def _is_free(gang: Gang, gpu: Gpu, now_ns: int) -> bool:
    """Whether the policy's time is over, or a member of the gang drains and so keeps all others out."""
    return now_ns >= _rests_until_ns(gpu) or any(seat.gpu is gpu and _is_stuck(seat, now_ns) for seat in gang.seats)


def _is_stuck(seat: Seat, now_ns: int) -> bool:
    return seat.phase is REVOKING and now_ns >= seat.lease.revoked_at_ns + STUCK_NS


def _rests_until_ns(gpu: Gpu) -> int:
    since_ns = gpu.schedule.rests_since_ns
    return 0 if since_ns is None else since_ns + gpu.rules.quantum_ns


def _join(node: Node, gang: Gang, gpu: Gpu) -> None:
    gang.gpus[gpu.uuid] = gpu
    gpu.gang = gang
    _changed(node, gpu)


def _leave(node: Node, gang: Gang, gpu: Gpu) -> None:
    del gang.gpus[gpu.uuid]
    gpu.gang = None
    _changed(node, gpu)


def _changed(node: Node, gpu: Gpu) -> None:
    gpu.schedule.stale, gpu.schedule.side_by_side = True, False  # its members are those of another plan
    node.concern(gpu)


def advance(node: Node, now_ns: int) -> None:
    """Level-triggered: changes, ends and begins slots.  Concerns their GPUs."""
    for gang in {gpu.gang.name: gpu.gang for gpu in node.gpus.values() if gpu.gang is not None}.values():
        seats, quantum_ns = _wanting(gang), _quantum_ns(gang)
        wanted = {seat.gpu.uuid: seat.gpu for seat in seats}
        is_over = gang.together_ns is not None and now_ns >= gang.together_ns + quantum_ns
        if len(seats) < _fewest(gang) or (is_over and _is_contended(node, gang)):
            _end(node, gang, quantum_ns, now_ns)
            continue
        for uuid in gang.gpus.keys() - wanted.keys():
            _leave(node, gang, gang.gpus[uuid])
        for uuid in wanted.keys() - gang.gpus.keys():
            if wanted[uuid].gang is None and not wanted[uuid].recovering and _is_free(gang, wanted[uuid], now_ns):
                _join(node, gang, wanted[uuid])
        missing = sum(seat.phase is not HOLDING for seat in seats)
        late = now_ns >= max(gang.began_ns + quantum_ns, _moves_until_ns(gang))
        if gang.together_ns is None and (not missing or late):
            _gathered(node, gang, missing, quantum_ns, now_ns)
    if node.queue:
        _begin_slots(node, now_ns)


def _moves_until_ns(gang: Gang) -> int:
    """The deadline of the memory that comes in for members; 0: none does."""
    switches = [seat.gpu.switching.switch for seat in gang.seats]
    return max((s.deadline_ns for s in switches if s is not None and s.seat in gang.seats), default=0)


def _gathered(node: Node, gang: Gang, missing: int, quantum_ns: int, now_ns: int) -> None:
    gang.together_ns, gathered_ns = now_ns, now_ns - gang.began_ns
    trials.slot_has_begun(gang, now_ns)
    gang.turns += 1
    gang.gathered_ns += gathered_ns
    node.gang_turns += 1
    node.gang_gathered_ns += gathered_ns
    told = {"missing": missing, "quantum_ns": quantum_ns, "gathered_ns": gathered_ns}
    node.notify("gang_gathered", gang=gang.name, gpus=len(gang.gpus), **told)
    for gpu in gang.gpus.values():
        _changed(node, gpu)


def _end(node: Node, gang: Gang, quantum_ns: int, now_ns: int) -> None:
    for gpu in list(gang.gpus.values()):
        _leave(node, gang, gpu)
        interested = (seat.client.facts.gang for seat in chain(gpu.leases.running.values(), gpu.wait_queue.seats()))
        wanted = any(name != gang.name and name not in node.queue for name in interested)
        gpu.schedule.rests_since_ns = now_ns if wanted else None
        for seat in gang.seats:
            if seat.gpu is gpu and seat.phase is HOLDING:  # its turn is over, whenever it was granted
                seat.lease.began_ns = min(seat.lease.began_ns, now_ns - quantum_ns)
                seat.place.view = None
            elif seat.gpu is gpu:
                gpu.schedule.members.pop(seat.client.client_id, None)  # the policy has not named it
