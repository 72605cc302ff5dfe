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
from dataclasses import dataclass, field
from typing import Final

from nvshare.coordinator.memory import switching
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.state import HOLDING, IDLE, MILLISECOND_NS, WAITING, Gpu, Node, Seat
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


@dataclass(frozen=True, slots=True)
class Chosen:
    """A member whose turn has come, and when that was on its GPU's turn clock."""

    seat: Seat
    waiting_since_ns: int | None
    clock_ns: int

    @property
    def waits(self) -> bool:
        """Still, and for the same turn."""
        return waits(self.seat) and self.seat.waiting_since_ns == self.waiting_since_ns


@dataclass(slots=True, eq=False)
class Gang:
    """All seats of clients that name it."""

    name: str
    seats: list[Seat] = field(default_factory=list)
    due_since_ns: int | None = None
    in_order: dict[str, Chosen] = field(default_factory=dict)
    """By GPU: whom the policy there has chosen since the last turn."""
    sheltered: set[str] = field(default_factory=set)
    """Where it was chosen and had to wait for the others: it is not preempted there in the turn that follows."""
    kept: dict[str, Gpu] = field(default_factory=dict)
    """GPUs that are being freed for it, or are free and wait for the others."""
    gathering_since_ns: int | None = None
    """The kept ones wait for each other.  Otherwise each is granted as soon as it can be."""
    deadline_ns: int = 0
    """How long they wait."""
    quantum_ns: int = 0
    ends_ns: int = 0
    """Of the turn at hand, or of the last one."""
    turns: int = 0
    gathered_ns: int = 0
    """Time for which its GPUs were kept, in all."""


class Turn(enum.Enum):
    """What becomes of a member that a policy has chosen."""

    ALONE = "alone"
    TOGETHER = "together"
    LATER = "later"


def enter(node: Node, seat: Seat) -> None:
    """The seat's client names a gang, or none."""
    name = seat.client.gang
    if name:
        seat.gang = node.gangs.setdefault(name, Gang(name))
        seat.gang.seats.append(seat)
        _changed(seat.gang)


def leave(node: Node, seat: Seat) -> None:
    """It is a member no more."""
    gang, seat.gang = seat.gang, None
    if gang is None:
        return
    gang.seats.remove(seat)
    _changed(gang)
    if not gang.seats:
        for gpu in list(gang.kept.values()):
            let_go(node, gang, gpu)
        del node.gangs[gang.name]


def _changed(gang: Gang) -> None:
    """Who has mates may be idle longer; see memory/client_settings.py."""
    for seat in gang.seats:
        seat.gpu.settings_changed()


def waits(seat: Seat) -> bool:
    """It may be granted."""
    return seat.phase is WAITING and not (seat.client.paused or seat.demoted or seat.fit.shut_out)


def runs(gang: Gang, gpu: Gpu) -> bool:
    """A member is at work there, or about to be."""
    holder, switch = gpu.holder, gpu.switch
    if switch is not None:
        return switch.seat.gang is gang
    return holder is not None and holder.gang is gang and holder.phase is HOLDING


def at_work(gang: Gang) -> list[Seat]:
    """Its exclusive holders."""
    return [seat for seat in gang.seats if seat is seat.gpu.holder and seat.phase is HOLDING]


def in_step(seat: Seat) -> bool:
    """Its lease belongs to a turn of its gang, which may be over."""
    return seat.gang is not None and seat.phase is HOLDING and seat.quantum_ends_ns == seat.gang.ends_ns


def keep_order(gang: Gang) -> None:
    """The turn together has begun, or there is none.  Whom a policy has chosen and who still waits keeps his place."""
    gang.in_order = {uuid: chosen for uuid, chosen in gang.in_order.items() if chosen.waits}


def in_turn(gang: Gang, now_ns: int) -> list[Seat]:
    """Who has a lease in its turn at hand; empty when there is none."""
    return [seat for seat in at_work(gang) if in_step(seat)] if now_ns < gang.ends_ns else []


def companions(seat: Seat, now_ns: int) -> list[Seat]:
    """The others at work in the same turn of its gang."""
    gang = seat.gang
    return [] if gang is None or not in_step(seat) else [mate for mate in in_turn(gang, now_ns) if mate is not seat]


def others_wait(gpu: Gpu, gang: Gang) -> bool:
    """Somebody who is no member."""
    return any(seat.gang is not gang for seat in gpu.line.seats())


def wanted(node: Node, gang: Gang, now_ns: int) -> dict[str, Seat]:
    """The members that count, one for each GPU on which none runs: the first in turn order."""
    found: dict[str, Seat] = {}
    for seat in gang.seats:
        gpu = seat.gpu
        if not waits(seat) or runs(gang, gpu):
            continue
        best = found.get(gpu.uuid)
        if (best is None or _rank(seat) < _rank(best)) and can_have(node, seat, now_ns):
            found[gpu.uuid] = seat
    return found


def _rank(seat: Seat) -> tuple[bool, int]:
    """Of members on one GPU: whom the policy has chosen, then in turn order."""
    chosen = None if seat.gang is None else seat.gang.in_order.get(seat.gpu.uuid)
    return chosen is None or chosen.seat is not seat, seat.turn


def can_have(node: Node, seat: Seat, now_ns: int) -> bool:
    """Whether it could run on its GPU at all."""
    gpu = seat.gpu
    if gpu.sharing is not Sharing.EXCLUSIVE or gpu.recovering:
        return False
    if gpu.leases and not switching.fits_beside_overdue(gpu, seat):
        return False
    if seat.gang is None or gpu.uuid in seat.gang.in_order:
        return True  # the policy has chosen it already
    rivals = tuple(view for view in gpu.line.views() if gpu.seats[view.client].gang is not seat.gang)
    if not rivals:
        return True
    return not gpu.umpire.preempt(lambda: seat.look(now_ns), rivals, gpu.look(), now_ns, node.out)


def available(gpu: Gpu, gang: Gang, now_ns: int) -> bool:
    """Whether the gang may have this GPU now, be it that somebody is interrupted.  What is not available will be, after
    a turn or two."""
    if gpu.kept_for is not None:
        return gpu.kept_for is gang
    holder = gpu.holder
    if gpu.switch is not None or holder is None or holder.phase is not HOLDING:
        if gpu.owed_ns == 0 or gpu.switch is not None:
            return gpu.owed_ns == 0
        chosen = gang.in_order.get(gpu.uuid)
        return (chosen is not None and chosen.waits) or not others_wait(gpu, gang)
    if now_ns >= holder.quantum_ends_ns:
        return True
    return not holder.immune and not in_step(holder)


def missed(seat: Seat, now_ns: int) -> bool:
    """It has just given back a lease that it had without its mates, and one of them has been granted since it was asked
    to: what kept it may have waited for that.  A moment later it would be called; who comes at once is called too."""
    gang = seat.gang
    if gang is None or seat.last_released_ns != now_ns or seat.quantum_ends_ns == gang.ends_ns:
        return False
    asked_ns = seat.revoked_at_ns
    came = (mate.granted_at_ns is not None and mate.granted_at_ns > asked_ns for mate in at_work(gang))
    return asked_ns != 0 and any(came)


def ready(node: Node, gang: Gang, places: dict[str, Seat], now_ns: int) -> bool:
    """Whether all of its places are available, and no gang that is due longer wants one of them."""
    if not all(available(seat.gpu, gang, now_ns) for seat in places.values()):
        return False
    if not all(_may_go_on(seat) for seat in at_work(gang)):
        return False
    mine = (now_ns if gang.due_since_ns is None else gang.due_since_ns, gang.name)
    for other in node.gangs.values():
        if other is gang or other.due_since_ns is None or (other.due_since_ns, other.name) > mine:
            continue
        if not places.keys().isdisjoint(wanted(node, other, now_ns)):
            return False
    return True


def choose(node: Node, gpu: Gpu, waiting: tuple[ClientView, ...], now_ns: int) -> Choice | None:
    """Whom the policy chooses.  Gangs that cannot have their GPUs yet are passed over, as long as there is anybody
    else; afterwards the GPU may be kept for one that can."""
    patient = _out_of_patience(node, gpu, waiting, now_ns)
    if patient is not None:
        gpu.wake_at_ns = None
        patient.sheltered = True
        return Choice(patient.client.client)
    first: Choice | None = None
    while waiting:
        choice, gpu.wake_at_ns = gpu.umpire.choose(waiting, gpu.look(), now_ns, node.out)
        if choice is None:
            break
        seat = gpu.seats[choice.client]
        if seat.gang is None:
            return choice
        if decide(node, seat, choice.quantum_ns or gpu.quantum_ns, now_ns) is not Turn.LATER:
            return choice
        first = first or choice
        waiting = tuple(view for view in waiting if gpu.seats[view.client].gang is not seat.gang)
    if first is not None:
        gpu.wake_at_ns = _others_back_ns(gpu, gpu.seats[first.client].gang, now_ns)
        return first if gpu.wake_at_ns is None else None
    return None


def _others_back_ns(gpu: Gpu, gang: Gang | None, now_ns: int) -> int | None:
    """Until when the last holder may come back.  A member without its mates is of less use than it."""
    last = gpu.seats.get(gpu.last_holder)
    if last is None or last.gang is gang or last.phase is not IDLE or last.last_released_ns is None:
        return None
    if last.client.paused or last.demoted or last.fit.shut_out:
        return None
    back_ns = last.last_released_ns + RETURN_NS
    return back_ns if back_ns > now_ns else None


def decide(node: Node, seat: Seat, quantum_ns: int, now_ns: int) -> Turn:
    """A policy has chosen this member."""
    gang, gpu = seat.gang, seat.gpu
    assert gang is not None
    if not waits(seat):
        return Turn.ALONE  # demoted, and nobody else is there
    places = wanted(node, gang, now_ns)
    places.pop(gpu.uuid, None)
    elsewhere = any(other.gpu is not gpu for other in at_work(gang))
    if (not places and not elsewhere) or in_turn(gang, now_ns):
        return Turn.ALONE
    before = gang.in_order.get(gpu.uuid)
    if before is None or not before.waits:
        gang.in_order[gpu.uuid] = Chosen(seat, seat.waiting_since_ns, gpu.turn_clock_ns(now_ns))
    if gang.gathering_since_ns is not None:
        keep(node, gang, gpu)
        return Turn.TOGETHER
    places[gpu.uuid] = seat
    if ready(node, gang, places, now_ns):
        begin(node, gang, places, quantum_ns, now_ns)
        return Turn.TOGETHER
    if gang.due_since_ns is None:
        gang.due_since_ns = now_ns
        node.out.append(Notify("gang_due", {"gang": gang.name, "gpus": len(places)}))
    return Turn.LATER


def begin(node: Node, gang: Gang, places: dict[str, Seat], quantum_ns: int, now_ns: int) -> None:
    """From now on these GPUs are kept for it.  Its turn lasts as long as the longest quantum there."""
    running = at_work(gang)
    gang.quantum_ns = max(quantum_ns, *(seat.gpu.quantum_ns for seat in (*places.values(), *running)))
    gang.sheltered = set() if gang.due_since_ns is None else set(gang.in_order)
    gang.gathering_since_ns = now_ns
    gang.deadline_ns = now_ns + min(gang.quantum_ns, node.settings.drain_deadline_ns)
    for seat in running:  # they shall not end while the others come
        seat.quantum_ends_ns = gang.deadline_ns + gang.quantum_ns
        if seat.called_at_ns is None:
            account(seat, now_ns)
            seat.called_at_ns = now_ns
    for seat in places.values():
        keep(node, gang, seat.gpu)


def keep(node: Node, gang: Gang, gpu: Gpu) -> None:
    """This GPU's next lease is the gang's."""
    gpu.kept_for = gang
    gang.kept[gpu.uuid] = gpu
    node.touched[gpu.uuid] = gpu


def let_go(node: Node, gang: Gang, gpu: Gpu) -> None:
    """It is kept no more."""
    gpu.kept_for = None
    del gang.kept[gpu.uuid]
    node.touched[gpu.uuid] = gpu


def join(node: Node, seat: Seat, now_ns: int) -> None:
    """A member comes and wants to work.  If others of its gang are at work, or about to be, it is called too."""
    gang, gpu = seat.gang, seat.gpu
    if gang is None or gpu.kept_for is not None or runs(gang, gpu) or not waits(seat):
        return
    if not can_have(node, seat, now_ns) or not available(gpu, gang, now_ns):
        return
    if gang.gathering_since_ns is not None:
        keep(node, gang, gpu)
    elif in_turn(gang, now_ns):
        if _worth(gang, now_ns):
            keep(node, gang, gpu)
    elif at_work(gang) and ready(node, gang, {gpu.uuid: seat}, now_ns):
        begin(node, gang, {gpu.uuid: seat}, 0, now_ns)


def next_member(node: Node, gpu: Gpu, now_ns: int) -> Seat | None:
    """Who gets the GPU that is kept; None: nobody any more."""
    for seat in sorted((seat for seat in gpu.line.seats() if seat.gang is gpu.kept_for), key=_rank):
        if waits(seat) and can_have(node, seat, now_ns):
            return seat
    return None


def time_for(seat: Seat, quantum_ns: int | None, now_ns: int) -> int | None:
    """The quantum of a turn that a policy gave: what is left of one that was interrupted, or of the gang's turn."""
    if seat.rest_ns:
        return min(quantum_ns or seat.gpu.quantum_ns, seat.rest_ns)
    gang = seat.gang
    if gang is not None and in_turn(gang, now_ns) and _worth(gang, now_ns):
        return gang.ends_ns - now_ns
    return quantum_ns


def _worth(gang: Gang, now_ns: int) -> bool:
    return (gang.ends_ns - now_ns) * WORTH_JOINING >= gang.quantum_ns


def _may_go_on(seat: Seat) -> bool:
    """Whether a member at work may have a turn of its gang behind its own, which the others count as a call."""
    gpu = seat.gpu
    return not len(gpu.line) or (seat.called_at_ns is None and gpu.owed_ns == 0)


def patience_ns(node: Node) -> int:
    """For so long of its GPU's turns a member whose turn has come waits for its gang."""
    return PATIENCE * len(node.gangs) * max(gpu.quantum_ns for gpu in node.gpus.values())


def wait_bound_ns(node: Node, quanta: int) -> int:
    """The longest wait, while there are gangs, of a client whom its policy alone would let wait for so many quanta."""
    return 2 * (quanta + 2) * _longest_ns(node)


def deferred_bound_ns(node: Node) -> int:
    """How much longer a member may wait."""
    return patience_ns(node) + 2 * (len(node.gangs) + 1) * _longest_ns(node)


def _longest_ns(node: Node) -> int:
    """Of all quanta in force, those of turns under way included."""
    quanta_ns = [gpu.quantum_ns for gpu in node.gpus.values()]
    return max(*quanta_ns, *(gang.quantum_ns for gang in node.gangs.values()))


def _out_of_patience(node: Node, gpu: Gpu, waiting: tuple[ClientView, ...], now_ns: int) -> Seat | None:
    """Whom the policy has chosen so long ago that it goes without its gang."""
    clock_ns = gpu.turn_clock_ns(now_ns)
    for gang in node.gangs.values():
        chosen = gang.in_order.get(gpu.uuid)
        if chosen is None or clock_ns - chosen.clock_ns < patience_ns(node) or not chosen.waits:
            continue
        if any(view.client == chosen.seat.client.client for view in waiting):
            return chosen.seat
    return None


def account(seat: Seat, now_ns: int) -> None:
    """Set the turn of an exclusive holder, as far as it has gone, against what gangs owe on its GPU."""
    gpu, gang, called_at_ns = seat.gpu, seat.gang, seat.called_at_ns
    given_ns = (now_ns if called_at_ns is None else called_at_ns) - seat.counted_ns
    gpu.owed_ns = max(0, gpu.owed_ns - max(0, given_ns))
    if called_at_ns is not None:
        longest_ns = LONGEST_CALL * max(gpu.quantum_ns, 0 if gang is None else gang.quantum_ns)
        gpu.owed_ns = max(1, min(longest_ns, gpu.owed_ns + now_ns - max(called_at_ns, seat.counted_ns)))
    seat.counted_ns = now_ns


def renewed(seat: Seat, now_ns: int) -> None:
    """Its policy lets it go on, however it came to its turn."""
    account(seat, now_ns)
    seat.called_at_ns = None
    seat.immune = seat.gpu.owed_ns > 0
    seat.alerted = False


def is_call(seat: Seat) -> bool:
    """Its gang's turn, with which it is about to run, was not given by the policy of its own GPU."""
    chosen = None if seat.gang is None else seat.gang.in_order.get(seat.gpu.uuid)
    return chosen is None or chosen.seat is not seat


def was_called(seat: Seat) -> bool:
    """Its lease has been a call from the beginning: no policy of its GPU has chosen it."""
    return seat.called_at_ns is not None and seat.called_at_ns == seat.granted_at_ns


def turn_over(seat: Seat) -> None:
    """It has no lease any more."""
    seat.sheltered = False
    seat.called_at_ns = None
    gang = seat.gang
    if gang is not None:
        chosen = gang.in_order.get(seat.gpu.uuid)
        if chosen is not None and chosen.seat is seat:
            del gang.in_order[seat.gpu.uuid]


def sheltered(seat: Seat) -> bool:
    """The policy gave it this turn earlier and may have forgotten why."""
    return seat.sheltered or (seat.gang is not None and in_step(seat) and seat.gpu.uuid in seat.gang.sheltered)


def holds_back(gpu: Gpu) -> bool:
    """The next lease is ready, and waits for those on other GPUs."""
    return gpu.switch is not None and gpu.kept_for is not None and gpu.switch.seat.gang is gpu.kept_for


def deadline_ns(gpu: Gpu) -> int | None:
    """When `gathering.advance` must look at this GPU again though nothing happens."""
    gang = gpu.kept_for
    if gang is None:
        return None
    return gang.deadline_ns if gang.gathering_since_ns is not None else gang.ends_ns
