"""A gang's turn begins: its GPUs are freed, reserved, and granted in one moment.

Rules:
- Reserved GPUs wait for each other as long as drains and moves take, and at most one quantum or the drain deadline.
  Then those that are ready are granted, and the others follow as they become ready.
- A GPU is released from the reservation as soon as no member waits for it.
- All leases of one turn end at one time (`Gang.ends_ns`); turns.py revokes those for which others wait.
- `advance_all` is level-triggered: it runs after each event and does what is due for the gangs that want a turn.

Non-goals: whether a gang may have a GPU (gangs/coscheduling.py), the life of a lease (leases.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine import leases, sharing, turns
from nvshare.coordinator.gangs import coscheduling, members
from nvshare.coordinator.memory import switching
from nvshare.coordinator.model.commands import Log, Notify
from nvshare.coordinator.model.events import GangSet
from nvshare.coordinator.model.gang import Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, WAITING

WORTH_RESUMING: Final = 4
"""An interrupted turn with less than this part of the quantum left is not resumed."""
MOST_ROUNDS: Final = 1000


def advance_all(node: Node, now_ns: int) -> dict[str, Gpu]:
    """Does what is due for all gangs; returns the GPUs where that changed something."""
    seen: dict[str, Gpu] = {}
    for _ in range(MOST_ROUNDS):
        _advance_once(node, now_ns)
        touched, node.changed_gpus = node.changed_gpus, {}
        if not touched:
            return seen
        seen.update(touched)
        for gpu in touched.values():
            turns.advance(node, gpu, now_ns)
    if node.settings.check_invariants:
        raise AssertionError("gangs do not settle")
    _disband(node)
    return seen


def _disband(node: Node) -> None:
    """A policy and the gangs contradict each other without end.  The node goes on without gang turns for now."""
    for gang in node.gangs.values():
        for gpu in list(gang.reserved.values()):
            coscheduling.unreserve(node, gang, gpu)
        gang.pending_since_ns = gang.gathering_since_ns = None
        gang.chosen.clear()
    node.changed_gpus.clear()
    names = ", ".join(sorted(node.gangs))
    node.out.append(Log(logging.ERROR, f"gangs {names}: no turn together could be agreed with the policies in force"))


def _advance_once(node: Node, now_ns: int) -> None:
    """One step of each gang that is pending or gathering, longest pending first."""
    due = [gang for gang in node.gangs.values() if gang.pending_since_ns is not None and not gang.reserved]
    for gang in sorted(due, key=lambda gang: (gang.pending_since_ns, gang.name)):
        _begin_if_possible(node, gang, now_ns)
    for gang in list(node.gangs.values()):
        if gang.reserved:
            _advance_reserved(node, gang, now_ns)


def _begin_if_possible(node: Node, gang: Gang, now_ns: int) -> None:
    """A pending gang begins its turn if it can, and stops pending if it wants no common turn any more."""
    places = coscheduling.places_for(node, gang, now_ns)
    running = {seat.gpu.uuid for seat in members.running_members(gang)}
    gang.chosen = {uuid: chosen for uuid, chosen in gang.chosen.items() if uuid in places or uuid in running}
    if not places or len(places.keys() | running) < 2 or not gang.chosen:
        gang.pending_since_ns = None
        members.keep_chosen(gang)
    elif coscheduling.all_available(node, gang, places, now_ns):
        coscheduling.start_gathering(node, gang, places, 0, now_ns)


def _advance_reserved(node: Node, gang: Gang, now_ns: int) -> None:
    for gpu in list(gang.reserved.values()):
        if not _still_wants(node, gang, gpu, now_ns):
            coscheduling.unreserve(node, gang, gpu)
        else:
            _free_gpu(node, gang, gpu, now_ns)
    here = [
        gpu
        for gpu in gang.reserved.values()
        if members.waits_for_mates(gpu) and gpu.switching.switch is not None and gpu.switching.switch.done
    ]
    gathering = gang.gathering_since_ns is not None
    if here and (not gathering or len(here) == len(gang.reserved) or now_ns >= gang.deadline_ns):
        if gathering:
            _begin_turn(node, gang, here, now_ns)
        for gpu in here:
            _grant(node, gang, gpu, now_ns)
    if not gang.reserved:
        if gang.gathering_since_ns is not None:
            _stop_gathering(gang, now_ns)
        members.keep_chosen(gang)


def _stop_gathering(gang: Gang, now_ns: int) -> None:
    """No member waits for a common turn any more."""
    gang.gathering_since_ns = None
    for seat in members.running_members(gang):
        seat.lease.quantum_ends_ns = min(seat.lease.quantum_ends_ns, now_ns + seat.gpu.rules.quantum_ns)


def _still_wants(node: Node, gang: Gang, gpu: Gpu, now_ns: int) -> bool:
    """Whether the gang still wants this GPU, and has a turn to use it in."""
    if gang.gathering_since_ns is None and now_ns >= gang.ends_ns:
        return False
    if members.waits_for_mates(gpu):
        return True
    if members.is_running(gang, gpu):
        return False
    return any(
        s.gpu is gpu and members.can_be_granted(s) and coscheduling.could_run(node, s, now_ns) for s in gang.seats
    )


def _free_gpu(node: Node, gang: Gang, gpu: Gpu, now_ns: int) -> None:
    """The client that has the GPU, or is about to, gives it up and keeps its place."""
    if gpu.switching.switch is not None and not members.waits_for_mates(gpu):
        sharing.cancel_switch(gpu, now_ns)
        node.changed_gpus[gpu.uuid] = gpu
    seat = gpu.leases.holder
    if seat is not None and seat.phase is HOLDING:
        left_ns = seat.lease.quantum_ends_ns - now_ns
        if left_ns * WORTH_RESUMING >= gpu.rules.quantum_ns and not members.in_gang_turn(seat):
            seat.gang_turn.remaining_ns = left_ns
        leases.revoke(node, gpu, seat, "gang", now_ns)
        node.changed_gpus[gpu.uuid] = gpu
    elif gpu.switching.switch is None and not leases.blocked(gpu):
        node.changed_gpus[gpu.uuid] = gpu
    elif gpu.switching.switch is not None and gpu.switching.switch.done and gpu.switching.switch.ready_ns is None:
        gpu.switching.switch.ready_ns = now_ns


def _begin_turn(node: Node, gang: Gang, here: list[Gpu], now_ns: int) -> None:
    since_ns = gang.gathering_since_ns
    assert since_ns is not None
    running = members.running_members(gang)
    due_since_ns, gang.pending_since_ns = gang.pending_since_ns, None
    gang.gathering_since_ns = None
    gang.ends_ns = now_ns + gang.quantum_ns
    for seat in running:
        seat.lease.quantum_ends_ns = gang.ends_ns
    gang.turns += 1
    gang.gathered_ns += now_ns - since_ns
    node.gang_turns += 1
    node.gang_gathered_ns += now_ns - since_ns
    values: dict[str, int | str | bool | float | None] = {
        "gang": gang.name,
        "gpus": len(here) + len(running),
        "missing": len(gang.reserved) - len(here),
        "quantum_ns": gang.quantum_ns,
        "gathered_ns": now_ns - since_ns,
        "due_ns": 0 if due_since_ns is None else now_ns - due_since_ns,
    }
    node.out.append(Notify("gang_gathered", values))


def _grant(node: Node, gang: Gang, gpu: Gpu, now_ns: int) -> None:
    assert gpu.switching.switch is not None
    seat = gpu.switching.switch.seat
    co_scheduled = members.will_be_co_scheduled(seat)
    switching.close(node, gpu, now_ns)
    coscheduling.unreserve(node, gang, gpu)
    leases.grant(node, gpu, seat, gang.ends_ns - now_ns, now_ns)
    assert members.in_gang_turn(seat), "its lease ends with the others'"
    seat.gang_turn.protected_from_gangs = False
    if co_scheduled:
        seat.gang_turn.co_scheduled_at_ns = now_ns
    leases.consider_preemption(node, gpu, now_ns)


def set_gang(node: Node, event: GangSet, now_ns: int) -> list[Gpu]:
    """An annotation changed."""
    client = node.clients.get(event.client)
    if client is None:
        return []
    for seat in client.seats.values():
        coscheduling.remove_member(node, seat)
    client.gang = event.gang
    for seat in client.seats.values():
        coscheduling.add_member(node, seat)
        if seat.phase is WAITING:
            coscheduling.member_waits(node, seat, now_ns)
    node.out.append(Notify("gang", {"client": event.client, "gang": event.gang}))
    return [seat.gpu for seat in client.seats.values()]
