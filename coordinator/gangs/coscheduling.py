"""Gangs: programs that should compute at the same time, each on its GPU of this node.

A gang's members exchange what they compute, so a turn of one alone is lost.  Therefore their leases are granted and end
together: coscheduling (Ousterhout, ICDCS 1982), of GPUs as in Gandiva (Xiao et al., OSDI 2018).

Rules:
- The members that count wait now and can have their GPU.  A gang does not wait for members that are idle, paused,
  demoted, dead, draining, or that the policy there would preempt at once.
- A gang has its turn when the policy of any of its GPUs chooses one of its members: this member is *chosen*, the others
  are *co-scheduled*.  It gets all of its GPUs in the same moment or none, so no two gangs wait for each other.
- A client that is interrupted for this keeps its place, and has the rest of its quantum next, undisturbed.
- While a GPU is not available the gang is *pending*, and others have its turn.  Where no client waits, nor comes back
  within `RETURN_NS`, its member runs.
- A GPU is not available during another gang's turn.  A member is not co-scheduled there while gangs have *debt*: for
  one turn after a co-scheduled one, and until turns of the policy have made up for it (`GpuGangs.debt_ns`).
- A member that runs when its gang's turn begins goes on with the others; from then on its turn is co-scheduled.
- A member that ran alone until a mate came (`missed_turn`) is co-scheduled with it.
- Of two pending gangs that want the same GPU, the one that is pending longer goes first.
- Members of one gang on one GPU take turns there like other clients.
- A member that has been passed over for `patience_ns` goes without its gang.

Bounds of a wait, on the GPU's turn clock, with Q the longest quantum of the node, G its gangs, and k quanta the bound
of the policy alone: 2 (k + 2) Q for any client (`wait_bound_ns`), because each co-scheduled turn is at most 2 Q long
and needs the debt to be paid first.  A member may wait for its patience and 2 (G + 1) Q more (`deferred_bound_ns`).

Non-goals: what a gang's turn does to leases (engine/assembly.py), which client is next (the policy).
"""

from __future__ import annotations

import enum
from typing import Final

from nvshare.coordinator.gangs.members import (
    account_turn,
    can_be_granted,
    in_gang_turn,
    is_running,
    members_in_turn,
    others_wait,
    running_members,
    still_waits,
)
from nvshare.coordinator.memory import switching
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.gang import Chosen, Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, IDLE, Seat
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.scheduler_policies.api import Choice, ClientView

PATIENCE: Final = 4
"""Times the longest quantum and the number of gangs: see `patience_ns`."""
RETURN_NS: Final = 2 * MILLISECOND_NS
"""A client that has just released and means to go on asks again within this time: its next launch does."""
WORTH_JOINING: Final = 4
"""A member that comes when less than this part of the quantum is left waits for the next turn."""


class Turn(enum.Enum):
    """What becomes of a member that a policy has chosen."""

    ALONE = "alone"
    TOGETHER = "together"
    LATER = "later"


def add_member(node: Node, seat: Seat) -> None:
    """The seat's client names a gang, or none."""
    name = seat.client.gang
    if name:
        seat.gang_turn.gang = node.gangs.setdefault(name, Gang(name))
        seat.gang_turn.gang.seats.append(seat)
        _changed(seat.gang_turn.gang)


def remove_member(node: Node, seat: Seat) -> None:
    """The seat is no member any more."""
    gang, seat.gang_turn.gang = seat.gang_turn.gang, None
    if gang is None:
        return
    gang.seats.remove(seat)
    _changed(gang)
    if not gang.seats:
        for gpu in list(gang.reserved.values()):
            unreserve(node, gang, gpu)
        del node.gangs[gang.name]


def _changed(gang: Gang) -> None:
    """Gang members get a longer idle timeout."""
    for seat in gang.seats:
        seat.gpu.settings_changed()


def places_for(node: Node, gang: Gang, now_ns: int) -> dict[str, Seat]:
    """The members that count, one for each GPU on which none runs: the first in turn order."""
    found: dict[str, Seat] = {}
    for seat in gang.seats:
        gpu = seat.gpu
        if not can_be_granted(seat) or is_running(gang, gpu):
            continue
        best = found.get(gpu.uuid)
        if (best is None or _rank(seat) < _rank(best)) and could_run(node, seat, now_ns):
            found[gpu.uuid] = seat
    return found


def _rank(seat: Seat) -> tuple[bool, int]:
    """Of members on one GPU: the chosen one first, then in turn order."""
    chosen = None if seat.gang_turn.gang is None else seat.gang_turn.gang.chosen.get(seat.gpu.uuid)
    return chosen is None or chosen.seat is not seat, seat.place.turn


def could_run(node: Node, seat: Seat, now_ns: int) -> bool:
    """Whether the member could run on its GPU at all."""
    gpu = seat.gpu
    if gpu.rules.sharing is not Sharing.EXCLUSIVE or gpu.recovering:
        return False
    if gpu.leases.by_client and not switching.fits_beside_overdue(gpu, seat):
        return False
    if seat.gang_turn.gang is None or gpu.uuid in seat.gang_turn.gang.chosen:
        return True  # the policy has chosen it already
    rivals = tuple(
        view for view in gpu.wait_queue.views() if gpu.seats[view.client].gang_turn.gang is not seat.gang_turn.gang
    )
    if not rivals:
        return True
    return not gpu.policy_guard.preempt(lambda: seat.view(now_ns), rivals, gpu.view(), now_ns, node.out)


def available(gpu: Gpu, gang: Gang, now_ns: int) -> bool:
    """Whether the gang may have this GPU now, by an interruption if need be.  Otherwise it may after a turn or two."""
    if gpu.gangs.reserved_for is not None:
        return gpu.gangs.reserved_for is gang
    holder = gpu.leases.holder
    if gpu.switching.switch is not None or holder is None or holder.phase is not HOLDING:
        if gpu.gangs.debt_ns == 0 or gpu.switching.switch is not None:
            return gpu.gangs.debt_ns == 0
        chosen = gang.chosen.get(gpu.uuid)
        return (chosen is not None and still_waits(chosen)) or not others_wait(gpu, gang)
    if now_ns >= holder.lease.quantum_ends_ns:
        return True
    return not holder.gang_turn.protected_from_gangs and not in_gang_turn(holder)


def missed_turn(seat: Seat, now_ns: int) -> bool:
    """The member has just given back a lease that it had without its mates, and one of them was granted meanwhile.

    What delayed its drain may have waited for that mate.  It would be co-scheduled a moment later, so it is at once.
    """
    gang = seat.gang_turn.gang
    if gang is None or seat.place.last_released_ns != now_ns or seat.lease.quantum_ends_ns == gang.ends_ns:
        return False
    asked_ns = seat.lease.revoked_at_ns
    came = (
        mate.lease.granted_at_ns is not None and mate.lease.granted_at_ns > asked_ns for mate in running_members(gang)
    )
    return asked_ns != 0 and any(came)


def all_available(node: Node, gang: Gang, places: dict[str, Seat], now_ns: int) -> bool:
    """Whether all of its places are available, and no gang that is pending longer wants one of them."""
    if not all(available(seat.gpu, gang, now_ns) for seat in places.values()):
        return False
    if not all(_may_continue(seat) for seat in running_members(gang)):
        return False
    mine = (now_ns if gang.pending_since_ns is None else gang.pending_since_ns, gang.name)
    for other in node.gangs.values():
        if other is gang or other.pending_since_ns is None or (other.pending_since_ns, other.name) > mine:
            continue
        if not places.keys().isdisjoint(places_for(node, other, now_ns)):
            return False
    return True


def choose(node: Node, gpu: Gpu, waiting: tuple[ClientView, ...], now_ns: int) -> Choice | None:
    """The client that the policy chooses.

    Gangs that cannot have their GPUs yet are passed over while other clients wait.  Afterwards the GPU may be reserved
    for a gang that can.
    """
    patient = _out_of_patience(node, gpu, waiting, now_ns)
    if patient is not None:
        gpu.leases.policy_wakes_at_ns = None
        patient.gang_turn.protected_from_policy = True
        return Choice(patient.client.client_id)
    first: Choice | None = None
    while waiting:
        choice, gpu.leases.policy_wakes_at_ns = gpu.policy_guard.choose(waiting, gpu.view(), now_ns, node.out)
        if choice is None:
            break
        seat = gpu.seats[choice.client]
        if seat.gang_turn.gang is None:
            return choice
        if decide(node, seat, choice.quantum_ns or gpu.rules.quantum_ns, now_ns) is not Turn.LATER:
            return choice
        first = first or choice
        waiting = tuple(view for view in waiting if gpu.seats[view.client].gang_turn.gang is not seat.gang_turn.gang)
    if first is not None:
        gpu.leases.policy_wakes_at_ns = _others_back_ns(gpu, gpu.seats[first.client].gang_turn.gang, now_ns)
        return first if gpu.leases.policy_wakes_at_ns is None else None
    return None


def _others_back_ns(gpu: Gpu, gang: Gang | None, now_ns: int) -> int | None:
    """Until when the last holder may come back.  A member without its mates is of less use than it."""
    last = gpu.seats.get(gpu.leases.last_holder)
    if last is None or last.gang_turn.gang is gang or last.phase is not IDLE or last.place.last_released_ns is None:
        return None
    if last.client.paused or last.place.demoted or last.room.unschedulable:
        return None
    back_ns = last.place.last_released_ns + RETURN_NS
    return back_ns if back_ns > now_ns else None


def decide(node: Node, seat: Seat, quantum_ns: int, now_ns: int) -> Turn:
    """A policy has chosen this member."""
    gang, gpu = seat.gang_turn.gang, seat.gpu
    assert gang is not None
    if not can_be_granted(seat):
        return Turn.ALONE  # demoted, and no other client waits
    places = places_for(node, gang, now_ns)
    places.pop(gpu.uuid, None)
    elsewhere = any(other.gpu is not gpu for other in running_members(gang))
    if (not places and not elsewhere) or members_in_turn(gang, now_ns):
        return Turn.ALONE
    before = gang.chosen.get(gpu.uuid)
    if before is None or not still_waits(before):
        gang.chosen[gpu.uuid] = Chosen(seat, seat.place.waiting_since_ns, gpu.turn_clock_ns(now_ns))
    if gang.gathering_since_ns is not None:
        reserve(node, gang, gpu)
        return Turn.TOGETHER
    places[gpu.uuid] = seat
    if all_available(node, gang, places, now_ns):
        start_gathering(node, gang, places, quantum_ns, now_ns)
        return Turn.TOGETHER
    if gang.pending_since_ns is None:
        gang.pending_since_ns = now_ns
        node.out.append(Notify("gang_due", {"gang": gang.name, "gpus": len(places)}))
    return Turn.LATER


def start_gathering(node: Node, gang: Gang, places: dict[str, Seat], quantum_ns: int, now_ns: int) -> None:
    """Reserves these GPUs for the gang.  Its turn lasts as long as the longest quantum there."""
    running = running_members(gang)
    gang.quantum_ns = max(quantum_ns, *(seat.gpu.rules.quantum_ns for seat in (*places.values(), *running)))
    gang.protected = set() if gang.pending_since_ns is None else set(gang.chosen)
    gang.gathering_since_ns = now_ns
    gang.deadline_ns = now_ns + min(gang.quantum_ns, node.settings.leases.drain_deadline_ns)
    for seat in running:  # their leases last until the others come
        seat.lease.quantum_ends_ns = gang.deadline_ns + gang.quantum_ns
        if seat.gang_turn.co_scheduled_at_ns is None:
            account_turn(seat, now_ns)
            seat.gang_turn.co_scheduled_at_ns = now_ns
    for seat in places.values():
        reserve(node, gang, seat.gpu)


def reserve(node: Node, gang: Gang, gpu: Gpu) -> None:
    """The GPU's next lease is the gang's."""
    gpu.gangs.reserved_for = gang
    gang.reserved[gpu.uuid] = gpu
    node.changed_gpus[gpu.uuid] = gpu


def unreserve(node: Node, gang: Gang, gpu: Gpu) -> None:
    """The GPU is not reserved any more."""
    gpu.gangs.reserved_for = None
    del gang.reserved[gpu.uuid]
    node.changed_gpus[gpu.uuid] = gpu


def member_waits(node: Node, seat: Seat, now_ns: int) -> None:
    """A member begins to wait.  If others of its gang run, or are about to, it is co-scheduled."""
    gang, gpu = seat.gang_turn.gang, seat.gpu
    if gang is None or gpu.gangs.reserved_for is not None or is_running(gang, gpu) or not can_be_granted(seat):
        return
    if not could_run(node, seat, now_ns) or not available(gpu, gang, now_ns):
        return
    if gang.gathering_since_ns is not None:
        reserve(node, gang, gpu)
    elif members_in_turn(gang, now_ns):
        if _worth_joining(gang, now_ns):
            reserve(node, gang, gpu)
    elif running_members(gang) and all_available(node, gang, {gpu.uuid: seat}, now_ns):
        start_gathering(node, gang, {gpu.uuid: seat}, 0, now_ns)


def next_member(node: Node, gpu: Gpu, now_ns: int) -> Seat | None:
    """The member that gets the reserved GPU; None: none waits any more."""
    for seat in sorted(
        (seat for seat in gpu.wait_queue.seats() if seat.gang_turn.gang is gpu.gangs.reserved_for), key=_rank
    ):
        if can_be_granted(seat) and could_run(node, seat, now_ns):
            return seat
    return None


def quantum_for(seat: Seat, quantum_ns: int | None, now_ns: int) -> int | None:
    """The quantum of a turn that a policy gave: the rest of an interrupted turn, or of the gang's turn."""
    if seat.gang_turn.remaining_ns:
        return min(quantum_ns or seat.gpu.rules.quantum_ns, seat.gang_turn.remaining_ns)
    gang = seat.gang_turn.gang
    if gang is not None and members_in_turn(gang, now_ns) and _worth_joining(gang, now_ns):
        return gang.ends_ns - now_ns
    return quantum_ns


def _worth_joining(gang: Gang, now_ns: int) -> bool:
    return (gang.ends_ns - now_ns) * WORTH_JOINING >= gang.quantum_ns


def _may_continue(seat: Seat) -> bool:
    """Whether a running member may have a turn of its gang behind its own, which counts as co-scheduled."""
    gpu = seat.gpu
    return not len(gpu.wait_queue) or (seat.gang_turn.co_scheduled_at_ns is None and gpu.gangs.debt_ns == 0)


def patience_ns(node: Node) -> int:
    """A member whose turn has come waits this long for its gang, on its GPU's turn clock."""
    return PATIENCE * len(node.gangs) * max(gpu.rules.quantum_ns for gpu in node.gpus.values())


def wait_bound_ns(node: Node, quanta: int) -> int:
    """With gangs: the longest wait of a client whose policy alone bounds it by this many quanta."""
    return 2 * (quanta + 2) * _longest_ns(node)


def deferred_bound_ns(node: Node) -> int:
    """How much longer a member may wait."""
    return patience_ns(node) + 2 * (len(node.gangs) + 1) * _longest_ns(node)


def _longest_ns(node: Node) -> int:
    """The longest quantum in force, those of present turns included."""
    quanta_ns = [gpu.rules.quantum_ns for gpu in node.gpus.values()]
    return max(*quanta_ns, *(gang.quantum_ns for gang in node.gangs.values()))


def _out_of_patience(node: Node, gpu: Gpu, waiting: tuple[ClientView, ...], now_ns: int) -> Seat | None:
    """The member that the policy chose so long ago that it goes without its gang."""
    clock_ns = gpu.turn_clock_ns(now_ns)
    for gang in node.gangs.values():
        chosen = gang.chosen.get(gpu.uuid)
        if chosen is None or clock_ns - chosen.clock_ns < patience_ns(node) or not still_waits(chosen):
            continue
        if any(view.client == chosen.seat.client.client_id for view in waiting):
            return chosen.seat
    return None
