"""Gangs: programs that should compute at the same time, each on its GPU of this node.

A gang's members depend on each other (they exchange what they computed), so a turn of one alone is lost.  Therefore
their leases are granted together and end together: coscheduling (Ousterhout: "Scheduling Techniques for Concurrent
Systems", ICDCS 1982), of GPUs as in Gandiva (Xiao et al., OSDI 2018).

Rules:
- The members that count are those that wait now and can have their GPU.  Who is idle, paused, demoted, dead, still
  draining, or would be preempted at once by the policy there, is not waited for.
- A gang has its turn when the policy of any of its GPUs chooses one of its members: there it is *in order*, on the
  others it is *called*.  It gets all of its GPUs in the same moment or none (so no two gangs wait for each other), and
  whoever is at work there is interrupted: he keeps his place, and has the rest of his quantum next, undisturbed.
- While a GPU is not available the gang is *due*, and others have its turn; where nobody else waits, nor comes back in a
  moment (`RETURN_NS`), its member runs.  A GPU is not available during another gang's turn, nor to be called to while
  gangs *owe* there: for one turn after a call at least (`Seat.immune`), and until the policy's turns have had as much
  time as it (`Gpu.owed_ns`).
- A member that is at work when its gang's turn begins goes on with the others.  From then on that is a call too.
- Who was alone until a mate came (`missed`: a drain may wait for the mate's half of a collective) is called to it.
- Of two due gangs that want the same GPU the one that is due longer goes first.
- Who has been passed over for `patience_ns` goes without its gang, whatever keeps the others.
- Members of one gang on one GPU take turns there like anybody.

How long a client waits, on its GPU's turn clock (not while somebody drains, memory moves or the GPU is kept).  Be Q the
longest quantum of the node, G its gangs, and k quanta what the policy alone would let the client wait.
1. The clock runs in turns that the policy gave (P) and in calls (C).  A turn of P takes at most Q: what a gang adds to
   it is C.  Interrupted ones are resumed, and one that is given later than chosen is still one.  So P <= (k + 1) Q.
2. A call takes at most 2 Q: one while others come, if it was at work, and one with them.  While the client waits there
   is a call only when nothing is owed, and it owes what it takes.  So C <= P + 2 Q, and all is <= 2 (k + 2) Q.
3. A member waits so long until its policy has chosen it, then for its patience, then for the turn at hand and those
   for which other gangs were chosen before, at most G turns of P: <= 2 (G + 1) Q with the calls between them.
Where a policy counts time and not turns (`priority`: k = 20 + 21 n) G turns may come before each of its n favours, and
with them as much of calls; 2 holds while 2 G <= 19 for the gangs of that GPU.

Invariants: pure; nothing here grants or revokes.

May not go here: what a gang's turn does to leases (engine/assembly.py), who is next (the policy).
"""

from __future__ import annotations

import enum
from typing import Final

from nvshare.coordinator.memory import switching
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.gang import Chosen, Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, IDLE, WAITING, Seat
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.scheduler_policies.api import Choice, ClientView

PATIENCE: Final = 4
"""Times the longest quantum and the number of gangs: see `patience_ns`."""
LONGEST_CALL: Final = 2
"""Quanta: a member that is at work when its gang is called has one while the others come, and one with them."""
RETURN_NS: Final = 2 * MILLISECOND_NS
"""Who has just given a GPU back and means to go on asks for it again within this time: its next launch does."""
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
    """It is a member no more."""
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
    """Who has mates may be idle longer; see memory/client_settings.py."""
    for seat in gang.seats:
        seat.gpu.settings_changed()


def can_be_granted(seat: Seat) -> bool:
    """It may be granted."""
    return seat.phase is WAITING and not (seat.client.paused or seat.place.demoted or seat.room.unschedulable)


def _still_waits(chosen: Chosen) -> bool:
    """The chosen member waits, for the same turn."""
    seat = chosen.seat
    return can_be_granted(seat) and seat.place.waiting_since_ns == chosen.waiting_since_ns


def is_running(gang: Gang, gpu: Gpu) -> bool:
    """A member is at work there, or about to be."""
    holder, switch = gpu.leases.holder, gpu.switching.switch
    if switch is not None:
        return switch.seat.gang_turn.gang is gang
    return holder is not None and holder.gang_turn.gang is gang and holder.phase is HOLDING


def running_members(gang: Gang) -> list[Seat]:
    """Its exclusive holders."""
    return [seat for seat in gang.seats if seat is seat.gpu.leases.holder and seat.phase is HOLDING]


def in_gang_turn(seat: Seat) -> bool:
    """Its lease belongs to a turn of its gang, which may be over."""
    return (
        seat.gang_turn.gang is not None
        and seat.phase is HOLDING
        and seat.lease.quantum_ends_ns == seat.gang_turn.gang.ends_ns
    )


def keep_chosen(gang: Gang) -> None:
    """The turn together has begun, or there is none.  Whom a policy has chosen and who still waits keeps his place."""
    gang.chosen = {uuid: chosen for uuid, chosen in gang.chosen.items() if _still_waits(chosen)}


def members_in_turn(gang: Gang, now_ns: int) -> list[Seat]:
    """Who has a lease in its turn at hand; empty when there is none."""
    return [seat for seat in running_members(gang) if in_gang_turn(seat)] if now_ns < gang.ends_ns else []


def mates_in_turn(seat: Seat, now_ns: int) -> list[Seat]:
    """The others at work in the same turn of its gang."""
    gang = seat.gang_turn.gang
    return (
        []
        if gang is None or not in_gang_turn(seat)
        else [mate for mate in members_in_turn(gang, now_ns) if mate is not seat]
    )


def others_wait(gpu: Gpu, gang: Gang) -> bool:
    """Somebody who is no member."""
    return any(seat.gang_turn.gang is not gang for seat in gpu.wait_queue.seats())


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
    """Of members on one GPU: whom the policy has chosen, then in turn order."""
    chosen = None if seat.gang_turn.gang is None else seat.gang_turn.gang.chosen.get(seat.gpu.uuid)
    return chosen is None or chosen.seat is not seat, seat.place.turn


def could_run(node: Node, seat: Seat, now_ns: int) -> bool:
    """Whether it could run on its GPU at all."""
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
    """Whether the gang may have this GPU now, be it that somebody is interrupted.  What is not available will be, after
    a turn or two."""
    if gpu.gangs.reserved_for is not None:
        return gpu.gangs.reserved_for is gang
    holder = gpu.leases.holder
    if gpu.switching.switch is not None or holder is None or holder.phase is not HOLDING:
        if gpu.gangs.debt_ns == 0 or gpu.switching.switch is not None:
            return gpu.gangs.debt_ns == 0
        chosen = gang.chosen.get(gpu.uuid)
        return (chosen is not None and _still_waits(chosen)) or not others_wait(gpu, gang)
    if now_ns >= holder.lease.quantum_ends_ns:
        return True
    return not holder.gang_turn.protected_from_gangs and not in_gang_turn(holder)


def missed_turn(seat: Seat, now_ns: int) -> bool:
    """It has just given back a lease that it had without its mates, and one of them has been granted since it was asked
    to: what kept it may have waited for that.  A moment later it would be called; who comes at once is called too."""
    gang = seat.gang_turn.gang
    if gang is None or seat.place.last_released_ns != now_ns or seat.lease.quantum_ends_ns == gang.ends_ns:
        return False
    asked_ns = seat.lease.revoked_at_ns
    came = (
        mate.lease.granted_at_ns is not None and mate.lease.granted_at_ns > asked_ns for mate in running_members(gang)
    )
    return asked_ns != 0 and any(came)


def all_available(node: Node, gang: Gang, places: dict[str, Seat], now_ns: int) -> bool:
    """Whether all of its places are available, and no gang that is due longer wants one of them."""
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
    """Whom the policy chooses.  Gangs that cannot have their GPUs yet are passed over, as long as there is anybody
    else; afterwards the GPU may be kept for one that can."""
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
        return Turn.ALONE  # demoted, and nobody else is there
    places = places_for(node, gang, now_ns)
    places.pop(gpu.uuid, None)
    elsewhere = any(other.gpu is not gpu for other in running_members(gang))
    if (not places and not elsewhere) or members_in_turn(gang, now_ns):
        return Turn.ALONE
    before = gang.chosen.get(gpu.uuid)
    if before is None or not _still_waits(before):
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
    """From now on these GPUs are kept for it.  Its turn lasts as long as the longest quantum there."""
    running = running_members(gang)
    gang.quantum_ns = max(quantum_ns, *(seat.gpu.rules.quantum_ns for seat in (*places.values(), *running)))
    gang.protected = set() if gang.pending_since_ns is None else set(gang.chosen)
    gang.gathering_since_ns = now_ns
    gang.deadline_ns = now_ns + min(gang.quantum_ns, node.settings.leases.drain_deadline_ns)
    for seat in running:  # they shall not end while the others come
        seat.lease.quantum_ends_ns = gang.deadline_ns + gang.quantum_ns
        if seat.gang_turn.co_scheduled_at_ns is None:
            account_turn(seat, now_ns)
            seat.gang_turn.co_scheduled_at_ns = now_ns
    for seat in places.values():
        reserve(node, gang, seat.gpu)


def reserve(node: Node, gang: Gang, gpu: Gpu) -> None:
    """This GPU's next lease is the gang's."""
    gpu.gangs.reserved_for = gang
    gang.reserved[gpu.uuid] = gpu
    node.changed_gpus[gpu.uuid] = gpu


def unreserve(node: Node, gang: Gang, gpu: Gpu) -> None:
    """It is kept no more."""
    gpu.gangs.reserved_for = None
    del gang.reserved[gpu.uuid]
    node.changed_gpus[gpu.uuid] = gpu


def member_waits(node: Node, seat: Seat, now_ns: int) -> None:
    """A member comes and wants to work.  If others of its gang are at work, or about to be, it is called too."""
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
    """Who gets the GPU that is kept; None: nobody any more."""
    for seat in sorted(
        (seat for seat in gpu.wait_queue.seats() if seat.gang_turn.gang is gpu.gangs.reserved_for), key=_rank
    ):
        if can_be_granted(seat) and could_run(node, seat, now_ns):
            return seat
    return None


def quantum_for(seat: Seat, quantum_ns: int | None, now_ns: int) -> int | None:
    """The quantum of a turn that a policy gave: what is left of one that was interrupted, or of the gang's turn."""
    if seat.gang_turn.remaining_ns:
        return min(quantum_ns or seat.gpu.rules.quantum_ns, seat.gang_turn.remaining_ns)
    gang = seat.gang_turn.gang
    if gang is not None and members_in_turn(gang, now_ns) and _worth_joining(gang, now_ns):
        return gang.ends_ns - now_ns
    return quantum_ns


def _worth_joining(gang: Gang, now_ns: int) -> bool:
    return (gang.ends_ns - now_ns) * WORTH_JOINING >= gang.quantum_ns


def _may_continue(seat: Seat) -> bool:
    """Whether a member at work may have a turn of its gang behind its own, which the others count as a call."""
    gpu = seat.gpu
    return not len(gpu.wait_queue) or (seat.gang_turn.co_scheduled_at_ns is None and gpu.gangs.debt_ns == 0)


def patience_ns(node: Node) -> int:
    """For so long of its GPU's turns a member whose turn has come waits for its gang."""
    return PATIENCE * len(node.gangs) * max(gpu.rules.quantum_ns for gpu in node.gpus.values())


def wait_bound_ns(node: Node, quanta: int) -> int:
    """The longest wait, while there are gangs, of a client whom its policy alone would let wait for so many quanta."""
    return 2 * (quanta + 2) * _longest_ns(node)


def deferred_bound_ns(node: Node) -> int:
    """How much longer a member may wait."""
    return patience_ns(node) + 2 * (len(node.gangs) + 1) * _longest_ns(node)


def _longest_ns(node: Node) -> int:
    """Of all quanta in force, those of turns under way included."""
    quanta_ns = [gpu.rules.quantum_ns for gpu in node.gpus.values()]
    return max(*quanta_ns, *(gang.quantum_ns for gang in node.gangs.values()))


def _out_of_patience(node: Node, gpu: Gpu, waiting: tuple[ClientView, ...], now_ns: int) -> Seat | None:
    """Whom the policy has chosen so long ago that it goes without its gang."""
    clock_ns = gpu.turn_clock_ns(now_ns)
    for gang in node.gangs.values():
        chosen = gang.chosen.get(gpu.uuid)
        if chosen is None or clock_ns - chosen.clock_ns < patience_ns(node) or not _still_waits(chosen):
            continue
        if any(view.client == chosen.seat.client.client_id for view in waiting):
            return chosen.seat
    return None


def account_turn(seat: Seat, now_ns: int) -> None:
    """Set the turn of an exclusive holder, as far as it has gone, against what gangs owe on its GPU."""
    gpu, gang, called_at_ns = seat.gpu, seat.gang_turn.gang, seat.gang_turn.co_scheduled_at_ns
    given_ns = (now_ns if called_at_ns is None else called_at_ns) - seat.gang_turn.accounted_until_ns
    gpu.gangs.debt_ns = max(0, gpu.gangs.debt_ns - max(0, given_ns))
    if called_at_ns is not None:
        longest_ns = LONGEST_CALL * max(gpu.rules.quantum_ns, 0 if gang is None else gang.quantum_ns)
        gpu.gangs.debt_ns = max(
            1, min(longest_ns, gpu.gangs.debt_ns + now_ns - max(called_at_ns, seat.gang_turn.accounted_until_ns))
        )
    seat.gang_turn.accounted_until_ns = now_ns


def turn_renewed(seat: Seat, now_ns: int) -> None:
    """Its policy lets it go on, however it came to its turn."""
    account_turn(seat, now_ns)
    seat.gang_turn.co_scheduled_at_ns = None
    seat.gang_turn.protected_from_gangs = seat.gpu.gangs.debt_ns > 0
    seat.lease.alerted = False


def will_be_co_scheduled(seat: Seat) -> bool:
    """The turn that the seat is about to have comes from its gang, not from the policy of its own GPU."""
    gang = seat.gang_turn.gang
    chosen = None if gang is None else gang.chosen.get(seat.gpu.uuid)
    return chosen is None or chosen.seat is not seat


def was_co_scheduled(seat: Seat) -> bool:
    """The lease was co-scheduled from its beginning: no policy of its GPU chose it."""
    at_ns = seat.gang_turn.co_scheduled_at_ns
    return at_ns is not None and at_ns == seat.lease.granted_at_ns


def lease_ended(seat: Seat) -> None:
    """It has no lease any more."""
    seat.gang_turn.protected_from_policy = False
    seat.gang_turn.co_scheduled_at_ns = None
    gang = seat.gang_turn.gang
    if gang is not None:
        chosen = gang.chosen.get(seat.gpu.uuid)
        if chosen is not None and chosen.seat is seat:
            del gang.chosen[seat.gpu.uuid]


def protected_from_policy(seat: Seat) -> bool:
    """The policy gave it this turn earlier and may have forgotten why."""
    return seat.gang_turn.protected_from_policy or (
        seat.gang_turn.gang is not None and in_gang_turn(seat) and seat.gpu.uuid in seat.gang_turn.gang.protected
    )


def waits_for_mates(gpu: Gpu) -> bool:
    """The next lease is ready, and waits for those on other GPUs."""
    return (
        gpu.switching.switch is not None
        and gpu.gangs.reserved_for is not None
        and gpu.switching.switch.seat.gang_turn.gang is gpu.gangs.reserved_for
    )


def deadline_ns(gpu: Gpu) -> int | None:
    """When `gathering.advance` must look at this GPU again though nothing happens."""
    gang = gpu.gangs.reserved_for
    if gang is None:
        return None
    return gang.deadline_ns if gang.gathering_since_ns is not None else gang.ends_ns
