"""Gangs: programs that compute at the same time, each on its GPU of this node.

A gang's members exchange what they compute, so a turn of one alone is lost: coscheduling (Ousterhout, ICDCS 1982), of
GPUs as in Gandiva (Xiao et al., OSDI 2018).

Rules:
- When the plan of any GPU gives a member a turn while other clients want one of the gang's GPUs, the gang gets a
  *slot*: all GPUs that its members want, for one quantum.  It gets all of them or none.
- In a slot the member has the GPU, beside the clients that the policy plans without a turn.  Whoever runs without one
  stays, whatever the policy plans for it later in the slot.  Members that are ready wait for the others for one quantum
  at most.
- A client that a slot interrupts in the first half of its turn keeps its place in turn order.
- Between two slots on a GPU its policy has the GPU for a quantum, if other clients wait there.
- A gang that cannot have all of its GPUs yet is due; the plan goes on without it, unless only members of gangs that
  wait for their slots want the GPU.  Of two gangs that want the same GPU, the one that is due longer has its slot
  first, also when the plan names only the other one.

Bound of a wait, with Q the longest quantum or drain of the node and k quanta the bound of the policy alone:
3 (k + 2) Q, since at most one slot follows each turn of the policy, and a member may run for two quanta in it, one of
them while the others gather; for a member of one of G gangs 3 G Q more.  Time in which memory moves does not count,
nor time in which moving it would cost too much; for a member on any GPU.  Mates on one GPU share the gang's slots
there; their waits have no bound.  Nor has any wait beside gangs while the policy of one of the node's GPUs states none.

Non-goals: what a plan does to leases (engine/reconcile.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nvshare.coordinator.memory import orders, switch_credit
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.gang import Gang, Slot
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, OVERDUE, REVOKING, WAITING, Seat
from nvshare.scheduler_policies.api import Allotment, JobView, Plan

WANTING: Final = frozenset({WAITING, NEXT, HOLDING, REVOKING})
"""A member that gives its lease back counts: its drain may last until a mate computes, and then it asks again."""


def add_member(node: Node, seat: Seat) -> None:
    """The seat's client names a gang, or none."""
    name = seat.client.gang
    if name:
        gang = node.gangs.setdefault(name, Gang(name))
        gang.seats.append(seat)
        for mate in gang.seats:
            mate.gpu.settings_changed()  # gang members get a longer idle timeout


def remove_member(node: Node, seat: Seat) -> None:
    """The seat is no member any more."""
    gang = node.gangs.get(seat.client.gang)
    if gang is None:
        return
    gang.seats.remove(seat)
    for mate in gang.seats:
        mate.gpu.settings_changed()
    if not gang.seats:
        if gang.slot is not None:
            _end(node, gang.slot, None)
        del node.gangs[gang.name]


# --- the plan of one GPU ------------------------------------------------------------------------------------------


def apply(node: Node, gpu: Gpu, plan: Plan, jobs: Sequence[JobView], now_ns: int) -> Plan:
    """The policy's plan, changed by a slot; a slot may end before it, or begin with it."""
    if gpu.slot is not None and gpu.slot.ends_ns is not None and now_ns >= gpu.slot.ends_ns:
        _end(node, gpu.slot, now_ns)
    if gpu.slot is None:
        plan = _call_gang(node, gpu, plan, jobs, now_ns)
    slot = gpu.slot
    member = None if slot is None else _member(slot.gang, gpu)
    if slot is None or member is None:
        return plan
    client = member.client.client_id
    if all(allotment.client != client for allotment in plan.running):
        gpu.schedule.called = client
    ends_ns = slot.gather_by_ns + slot.quantum_ns if slot.ends_ns is None else slot.ends_ns
    since_ns = member.lease.began_ns if member.phase is HOLDING else now_ns
    mine = Allotment(client, max(1, ends_ns - since_ns))
    rest = tuple(replace(a, quantum_ns=None) for a in plan.running if a.client != client and _stays(gpu, a))
    due_ns = slot.gather_by_ns if slot.ends_ns is None else slot.ends_ns
    return replace(plan, running=(mine, *rest), ask_again_ns=due_ns, why=f"gang {slot.gang.name} has its slot")


def _stays(gpu: Gpu, allotment: Allotment) -> bool:
    """A client without a turn, or one that runs without: else two that take turns would interrupt each other."""
    seat = gpu.seats[allotment.client]
    return allotment.quantum_ns is None or (seat.phase is HOLDING and seat.lease.ends_ns is None)


def _call_gang(node: Node, gpu: Gpu, plan: Plan, jobs: Sequence[JobView], now_ns: int) -> Plan:
    """Begins the slot of the first gang in the plan, or of one that is due longer; plans without gangs that cannot
    have their GPUs yet."""
    passed_over: set[str] = set()
    while gpu.slot is None and (gang := _first_gang(node, gpu, plan, passed_over)) is not None:
        if gang.slot is not None:
            _extend(node, gang.slot, gpu)
            break
        first = _first_due(node, gang, now_ns)
        if all(_is_free(first, each, now_ns) for each in _wanted(first).values()):
            quantum_ns = max((a.quantum_ns or 0 for a in plan.running), default=0)
            _begin(node, first, max(quantum_ns, gpu.rules.quantum_ns), now_ns)
        if gpu.slot is None:
            passed_over.add(gang.name)
            jobs = [job for job in jobs if job.gang != gang.name]
            others = jobs if any(not _awaits_slot(node, gpu, job) for job in jobs) else ()
            plan = _without(node, gpu, gang, plan, others, now_ns)
    return plan


def _awaits_slot(node: Node, gpu: Gpu, job: JobView) -> bool:
    gang = node.gangs.get(job.gang)
    return gang is not None and _needs_slot(gang, gpu)


def _first_gang(node: Node, gpu: Gpu, plan: Plan, passed_over: set[str]) -> Gang | None:
    """The first gang in the plan that needs a slot."""
    for allotment in plan.running:
        gang = node.gangs.get(gpu.seats[allotment.client].client.gang)
        if gang is None or gang.name in passed_over or allotment.quantum_ns is None:
            continue
        if _needs_slot(gang, gpu):
            return gang
    return None


def _needs_slot(gang: Gang, gpu: Gpu) -> bool:
    """Whether other members want other GPUs, and other clients want one of the gang's."""
    gpus = _wanted(gang)
    return len(gpus) > 1 and gpu.uuid in gpus and any(_has_rivals(gang, each) for each in gpus.values())


def _wanted(gang: Gang) -> dict[str, Gpu]:
    """The GPUs that members want and can have."""
    return {
        seat.gpu.uuid: seat.gpu
        for seat in gang.seats
        if seat.phase in WANTING and seat.schedulable and not (seat.place.demoted or seat.in_debt)
    }


def _has_rivals(gang: Gang, gpu: Gpu) -> bool:
    """Whether clients of no gang, or another one, wait for this GPU or have a turn on it."""
    for seat in gpu.leases.running.values():
        if seat.client.gang != gang.name and seat.lease.ends_ns is not None:
            return True
    return _others_wait(gang, gpu)


def _others_wait(gang: Gang, gpu: Gpu) -> bool:
    if gpu.switching.switch is not None and gpu.switching.switch.seat.client.gang != gang.name:
        return True
    mine = sum(seat in seat.gpu.wait_queue for seat in gang.seats if seat.gpu is gpu)
    return len(gpu.wait_queue) > mine


def _member(gang: Gang, gpu: Gpu) -> Seat | None:
    """The member that has this GPU in a slot: the one that runs, else the one that comes, else the next in turn."""
    here = [seat for seat in gang.seats if seat.gpu is gpu and seat.phase in WANTING and seat.schedulable]
    rank = {HOLDING: 0, NEXT: 1, WAITING: 2, REVOKING: 3}
    return min(here, key=lambda seat: (rank[seat.phase], seat.place.turn), default=None)


def _first_due(node: Node, gang: Gang, now_ns: int) -> Gang:
    """The gang itself, or one that is due longer and wants the same GPU: that one has its slot first."""
    gpus, mine = _wanted(gang), _due(gang, now_ns)
    earlier = [
        other
        for other in node.gangs.values()
        if other.slot is None and other.due_since_ns is not None and _due(other, now_ns) < mine
        if len(theirs := _wanted(other)) > 1 and not gpus.keys().isdisjoint(theirs)
    ]
    if not earlier:
        return gang
    return _first_due(node, min(earlier, key=lambda other: _due(other, now_ns)), now_ns)


def _due(gang: Gang, now_ns: int) -> tuple[int, str]:
    """Its place in the order of slots."""
    return now_ns if gang.due_since_ns is None else gang.due_since_ns, gang.name


def _is_free(gang: Gang, gpu: Gpu, now_ns: int) -> bool:
    if gpu.slot is not None or gpu.recovering:
        return False
    switch = gpu.switching.switch
    if switch is not None and switch.seat.client.gang != gang.name and switch_credit.owes(gpu, now_ns):
        return False  # only the client for which memory moves can work off what the GPU owes
    return now_ns >= gpu.schedule.slot_again_ns or not _others_wait(gang, gpu)


def _without(node: Node, gpu: Gpu, gang: Gang, plan: Plan, others: Sequence[JobView], now_ns: int) -> Plan:
    """The gang is due: until it can have its GPUs others run here.

    If all that want to run are members of gangs that wait for a slot, `others` is empty: they run as planned.
    """
    if gang.due_since_ns is None:
        gang.due_since_ns = now_ns
        node.out.append(Notify("gang_due", {"gang": gang.name, "gpus": len(_wanted(gang))}))
    again = [each.schedule.slot_again_ns for each in _wanted(gang).values() if each.schedule.slot_again_ns > now_ns]
    again += [each.slot.ends_ns for each in _wanted(gang).values() if each.slot is not None and each.slot.ends_ns]
    again_ns = min(again, default=None)
    if others:
        plan = gpu.policy_guard.decide(gpu.view(), tuple(others), now_ns, node.out)
    if again_ns is None and all(allotment.quantum_ns is None for allotment in plan.running):
        again_ns = now_ns + gpu.rules.quantum_ns  # no turn ends here, and what the gang waits for may have no time
    if again_ns is not None and again_ns > now_ns:
        asked_ns = plan.ask_again_ns
        plan = replace(plan, ask_again_ns=again_ns if asked_ns is None else min(asked_ns, again_ns))
    return plan


# --- slots --------------------------------------------------------------------------------------------------------


def _begin(node: Node, gang: Gang, quantum_ns: int, now_ns: int) -> None:
    gather_ns = min(quantum_ns, node.settings.leases.drain_deadline_ns)
    slot = gang.slot = Slot(gang, {}, quantum_ns, now_ns, now_ns + gather_ns)
    for gpu in _wanted(gang).values():
        _extend(node, slot, gpu)


def _extend(node: Node, slot: Slot, gpu: Gpu) -> None:
    slot.gpus[gpu.uuid] = gpu
    gpu.slot = slot
    _changed(node, gpu)


def _changed(node: Node, gpu: Gpu) -> None:
    gpu.schedule.stale = True
    node.changed_gpus[gpu.uuid] = gpu


def advance(node: Node, now_ns: int) -> None:
    """Level-triggered: begins, shrinks and ends slots.  Puts the GPUs that this concerns into `node.changed_gpus`."""
    for gang in list(node.gangs.values()):
        if gang.due_since_ns is not None and (gang.slot is not None or len(_wanted(gang)) < 2):
            gang.due_since_ns = None
        slot = gang.slot
        if slot is None:
            continue
        for gpu in [gpu for gpu in slot.gpus.values() if _member(gang, gpu) is None]:
            del slot.gpus[gpu.uuid]
            gpu.slot = None
            _changed(node, gpu)
        if len(slot.gpus) < 2 or (slot.ends_ns is not None and now_ns >= slot.ends_ns):
            _end(node, slot, now_ns)
        elif slot.ends_ns is None and (now_ns >= slot.gather_by_ns or all(is_ready(gpu) for gpu in slot.gpus.values())):
            _gathered(node, slot, now_ns)


def is_ready(gpu: Gpu) -> bool:
    """The member runs, or could be granted at once."""
    member = None if gpu.slot is None else _member(gpu.slot.gang, gpu)
    if member is None or member.phase is HOLDING:
        return True
    if member.phase is REVOKING:
        return False
    if any(seat.phase is not OVERDUE and seat.lease.ends_ns is not None for seat in gpu.leases.by_client.values()):
        return False
    switch = gpu.switching.switch
    if switch is not None:
        return switch.seat is member and switch.done
    return member.moves.order is None and orders.missing_bytes(member) == 0


def _gathered(node: Node, slot: Slot, now_ns: int) -> None:
    gang, gathered_ns = slot.gang, now_ns - slot.began_ns
    slot.ends_ns = now_ns + slot.quantum_ns
    gang.turns += 1
    gang.gathered_ns += gathered_ns
    node.gang_turns += 1
    node.gang_gathered_ns += gathered_ns
    ready = sum(is_ready(gpu) for gpu in slot.gpus.values())
    values: dict[str, int | str | bool | float | None] = {
        "gang": gang.name,
        "gpus": len(slot.gpus),
        "missing": len(slot.gpus) - ready,
        "quantum_ns": slot.quantum_ns,
        "gathered_ns": gathered_ns,
    }
    node.out.append(Notify("gang_gathered", values))
    for gpu in slot.gpus.values():
        _changed(node, gpu)


def _end(node: Node, slot: Slot, now_ns: int | None) -> None:
    slot.gang.slot = None
    for gpu in slot.gpus.values():
        gpu.slot = None
        if now_ns is not None:
            gpu.schedule.slot_again_ns = now_ns + gpu.rules.quantum_ns
            member = _member(slot.gang, gpu)
            if member is not None and member.phase is HOLDING:  # its turn is over, whenever it was granted
                member.lease.began_ns = min(member.lease.began_ns, now_ns - slot.quantum_ns)
                member.place.view = None
        _changed(node, gpu)


def wait_bound_ns(node: Node, quanta: int, longest_drain_ns: int, *, member: bool) -> int:
    """With gangs: the longest wait of a client whose policy alone bounds it by this many quanta."""
    longest_ns = max(longest_drain_ns, *(gpu.rules.quantum_ns for gpu in node.gpus.values()))
    return 3 * (quanta + 2 + (len(node.gangs) if member else 0)) * longest_ns
