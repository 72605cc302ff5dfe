"""A gang's turn begins: its GPUs are freed, kept, and granted in one moment.

Rules:
- Kept GPUs wait for each other as long as drains and moves of memory take, and never longer than a quantum (or the
  deadline of drains): then those that are ready are granted, and the others follow as they come.
- A GPU is let go as soon as no member waits for it any more; then it is anybody's.
- All leases of one turn end at one time (`Gang.ends_ns`); engine/leases.py revokes those for which others wait.

`advance` is level-triggered: it is called after each event, looks at the gangs that want something, and does what is
due.

May not go here: whether a gang may have a GPU (gangs/coscheduling.py), the life of a lease (engine/leases.py).
"""

from __future__ import annotations

import logging
from typing import Final

from nvshare.coordinator.engine import leases, sharing
from nvshare.coordinator.gangs import coscheduling
from nvshare.coordinator.gangs.coscheduling import Gang
from nvshare.coordinator.memory import switching
from nvshare.coordinator.model.commands import Log, Notify
from nvshare.coordinator.model.events import GangSet
from nvshare.coordinator.model.state import HOLDING, WAITING, Gpu, Node

WORTH_RESUMING: Final = 4
"""Who is interrupted with less than this part of the quantum left has had its turn."""
MOST_ROUNDS: Final = 1000


def settle(node: Node, now_ns: int) -> dict[str, Gpu]:
    """Do what is due for all gangs; the GPUs where that changed something."""
    seen: dict[str, Gpu] = {}
    for _ in range(MOST_ROUNDS):
        advance(node, now_ns)
        touched, node.touched = node.touched, {}
        if not touched:
            return seen
        seen.update(touched)
        for gpu in touched.values():
            leases.advance(node, gpu, now_ns)
    if node.settings.check_invariants:
        raise AssertionError("gangs do not settle")
    _disband(node)
    return seen


def _disband(node: Node) -> None:
    """A policy and the gangs contradict each other without end.  The node goes on without turns together for now."""
    for gang in node.gangs.values():
        for gpu in list(gang.kept.values()):
            coscheduling.let_go(node, gang, gpu)
        gang.due_since_ns = gang.gathering_since_ns = None
        gang.in_order.clear()
    node.touched.clear()
    names = ", ".join(sorted(node.gangs))
    node.out.append(Log(logging.ERROR, f"gangs {names}: no turn together could be agreed with the policies in force"))


def advance(node: Node, now_ns: int) -> None:
    """One step of each gang that is due or gathering, longest due first."""
    due = [gang for gang in node.gangs.values() if gang.due_since_ns is not None and not gang.kept]
    for gang in sorted(due, key=lambda gang: (gang.due_since_ns, gang.name)):
        _try(node, gang, now_ns)
    for gang in list(node.gangs.values()):
        if gang.kept:
            _step(node, gang, now_ns)


def _try(node: Node, gang: Gang, now_ns: int) -> None:
    """It is due: begin if it can, forget about it if it wants no turn together any more."""
    places = coscheduling.wanted(node, gang, now_ns)
    running = {seat.gpu.uuid for seat in coscheduling.at_work(gang)}
    gang.in_order = {uuid: chosen for uuid, chosen in gang.in_order.items() if uuid in places or uuid in running}
    if not places or len(places.keys() | running) < 2 or not gang.in_order:
        gang.due_since_ns = None
        coscheduling.keep_order(gang)
    elif coscheduling.ready(node, gang, places, now_ns):
        coscheduling.begin(node, gang, places, 0, now_ns)


def _step(node: Node, gang: Gang, now_ns: int) -> None:
    for gpu in list(gang.kept.values()):
        if not _still(node, gang, gpu, now_ns):
            coscheduling.let_go(node, gang, gpu)
        else:
            _free(node, gang, gpu, now_ns)
    here = [
        gpu for gpu in gang.kept.values() if coscheduling.holds_back(gpu) and gpu.switch is not None and gpu.switch.done
    ]
    gathering = gang.gathering_since_ns is not None
    if here and (not gathering or len(here) == len(gang.kept) or now_ns >= gang.deadline_ns):
        if gathering:
            _begin_turn(node, gang, here, now_ns)
        for gpu in here:
            _grant(node, gang, gpu, now_ns)
    if not gang.kept:
        if gang.gathering_since_ns is not None:
            _give_up(gang, now_ns)
        coscheduling.keep_order(gang)


def _give_up(gang: Gang, now_ns: int) -> None:
    """Nobody waits to begin a turn any more."""
    gang.gathering_since_ns = None
    for seat in coscheduling.at_work(gang):
        seat.quantum_ends_ns = min(seat.quantum_ends_ns, now_ns + seat.gpu.quantum_ns)


def _still(node: Node, gang: Gang, gpu: Gpu, now_ns: int) -> bool:
    """Whether the gang still wants this GPU, and has a turn to use it in."""
    if gang.gathering_since_ns is None and now_ns >= gang.ends_ns:
        return False
    if coscheduling.holds_back(gpu):
        return True
    if coscheduling.runs(gang, gpu):
        return False
    return any(s.gpu is gpu and coscheduling.waits(s) and coscheduling.can_have(node, s, now_ns) for s in gang.seats)


def _free(node: Node, gang: Gang, gpu: Gpu, now_ns: int) -> None:
    """Whoever has the GPU, or is about to, gives it up and keeps its place."""
    if gpu.switch is not None and not coscheduling.holds_back(gpu):
        sharing.cancel_switch(gpu, now_ns)
        node.touched[gpu.uuid] = gpu
    seat = gpu.holder
    if seat is not None and seat.phase is HOLDING:
        left_ns = seat.quantum_ends_ns - now_ns
        if left_ns * WORTH_RESUMING >= gpu.quantum_ns and not coscheduling.in_step(seat):
            seat.rest_ns = left_ns
        leases.revoke(node, gpu, seat, "gang", now_ns)
        node.touched[gpu.uuid] = gpu
    elif gpu.switch is None and not leases.blocked(gpu):
        node.touched[gpu.uuid] = gpu
    elif gpu.switch is not None and gpu.switch.done and gpu.switch.ready_ns is None:
        gpu.switch.ready_ns = now_ns


def _begin_turn(node: Node, gang: Gang, here: list[Gpu], now_ns: int) -> None:
    since_ns = gang.gathering_since_ns
    assert since_ns is not None
    running = coscheduling.at_work(gang)
    due_since_ns, gang.due_since_ns = gang.due_since_ns, None
    gang.gathering_since_ns = None
    gang.ends_ns = now_ns + gang.quantum_ns
    for seat in running:
        seat.quantum_ends_ns = gang.ends_ns
    gang.turns += 1
    gang.gathered_ns += now_ns - since_ns
    node.gang_turns += 1
    node.gang_gathered_ns += now_ns - since_ns
    values: dict[str, int | str | bool | float | None] = {
        "gang": gang.name,
        "gpus": len(here) + len(running),
        "missing": len(gang.kept) - len(here),
        "quantum_ns": gang.quantum_ns,
        "gathered_ns": now_ns - since_ns,
        "due_ns": 0 if due_since_ns is None else now_ns - due_since_ns,
    }
    node.out.append(Notify("gang_gathered", values))


def _grant(node: Node, gang: Gang, gpu: Gpu, now_ns: int) -> None:
    assert gpu.switch is not None
    seat = gpu.switch.seat
    called = coscheduling.is_call(seat)
    switching.close(node, gpu, now_ns)
    coscheduling.let_go(node, gang, gpu)
    leases.grant(node, gpu, seat, gang.ends_ns - now_ns, now_ns)
    assert coscheduling.in_step(seat), "its lease ends with the others'"
    seat.immune = False
    if called:
        seat.called_at_ns = now_ns
    leases.consider_preemption(node, gpu, now_ns)


def set_gang(node: Node, event: GangSet, now_ns: int) -> list[Gpu]:
    """An annotation changed."""
    client = node.clients.get(event.client)
    if client is None:
        return []
    for seat in client.seats.values():
        coscheduling.leave(node, seat)
    client.gang = event.gang
    for seat in client.seats.values():
        coscheduling.enter(node, seat)
        if seat.phase is WAITING:
            coscheduling.join(node, seat, now_ns)
    node.out.append(Notify("gang", {"client": event.client, "gang": event.gang}))
    return [seat.gpu for seat in client.seats.values()]
