"""Whether a gang runs beside its rivals or in slots, where the policies leave that open: as measured, for all its GPUs.

`auto` runs members without a turn beside others.  It sees one GPU, and a gang is as fast as its slowest rank on any.

Rules:
- Programs that have run side by side for `SETTLE_NS` are measured for `WINDOW_NS`, then in slots for as long, from the
  beginning of a slot to that of another one.
- Speeds are parts of the speed that a program has in its own turns.  The gang's counts once for each of its GPUs, and
  is that of the member that gains least by slots.
- Slots must gain `MARGIN`, and leave everybody `FAIR` of what it has side by side, or of half of a GPU.
- The result holds until other programs want these GPUs, for `VOID_NS` at most, and longer after long slots.
- Not measured: a gang with two rivals on a GPU, of which slots would give it more than its part; programs with another
  class than batch, or with shares; gangs whose rivals are a gang in slots.  Interactive programs run beside either.

Non-goals: slots (slots.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nvshare.coordinator.model.gang import Gang, Mark, Trial
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol.kinds import Sharing
from nvshare.scheduler_policies.api import JobClass

SETTLE_NS: Final = SECOND_NS
WINDOW_NS: Final = 2 * SECOND_NS
VOID_NS: Final = 120 * SECOND_NS
MARGIN: Final = 0.01
FAIR: Final = 0.9


def prefers_slots(node: Node, gang: Gang, wanting: Sequence[Seat], now_ns: int) -> bool:
    """Whether the gang should have slots.  Called with each plan that runs a member without a turn, outside of slots.
    `wanting`: the members that want their GPUs."""
    trial, seats = gang.trial, _measurable(node, gang, wanting)
    if trial.until_ns:
        trial.in_slots = trial.slots_are_better
    known = trial.seats or frozenset()  # in slots an idle program gives its GPU back
    same = seats is not None and (seats <= known if trial.in_slots else seats == known)
    if not same or 0 < trial.until_ns <= now_ns:
        gang.trial = trial = Trial(seats, now_ns)
    if seats is None or trial.in_slots or trial.until_ns or now_ns < trial.since_ns + SETTLE_NS:
        return trial.in_slots
    if not trial.marks:
        trial.marks = _marks(seats, now_ns)
    elif now_ns >= trial.since_ns + SETTLE_NS + WINDOW_NS:
        rates = _rates(trial.marks)
        gang.trial = trial = Trial(seats, now_ns, side_by_side=rates, in_slots=all(rates.values()))
    return trial.in_slots


def slot_has_begun(gang: Gang, now_ns: int) -> None:
    """All members run in their slot, and their rivals have drained."""
    trial = gang.trial
    if not trial.in_slots or trial.until_ns or trial.seats is None:
        return
    if not trial.marks:
        trial.since_ns, trial.marks = now_ns, _marks(trial.seats, now_ns)
    elif now_ns >= trial.since_ns + WINDOW_NS:
        trial.until_ns = now_ns + max(VOID_NS, 50 * (now_ns - trial.since_ns))
        _judge(gang, trial, now_ns)


def _measurable(node: Node, gang: Gang, wanting: Sequence[Seat]) -> frozenset[Seat] | None:
    """The members and rivals on the gang's GPUs; None: they are not measured."""
    found: list[Seat] = []
    for gpu in {seat.gpu.uuid: seat.gpu for seat in wanting}.values():
        seats = (*gpu.leases.by_client.values(), *gpu.wait_queue.seats())
        here = [seat for seat in seats if seat.client.facts.rank.job_class is not JobClass.INTERACTIVE]
        rivals = [seat.client.facts for seat in here if seat.client.facts.gang != gang.name]
        in_turns = any(facts.gang in node.gangs and node.gangs[facts.gang].trial.in_slots for facts in rivals)
        if gpu.settings.sharing is not Sharing.AUTO or len(rivals) > 1 or in_turns:
            return None
        found += here
    ranks = [seat.client.facts.rank for seat in {*found, *wanting}]
    plain = all(r.job_class is JobClass.BATCH and not r.share_request and r.share_limit == 1.0 for r in ranks)
    return frozenset(found) if plain and len(found) > len(wanting) else None


def _marks(seats: Iterable[Seat], now_ns: int) -> dict[Seat, Mark]:
    return {seat: Mark(seat.progress.last.work, seat.progress.last.at_ns, seat.held_ns(now_ns)) for seat in seats}


def _rates(marks: Mapping[Seat, Mark]) -> dict[Seat, float]:
    """Work a second since then; 0: not known."""
    found = {}
    for seat, mark in marks.items():
        last = seat.progress.last
        found[seat] = max(0, last.work - mark.work) * SECOND_NS / max(1, last.at_ns - mark.at_ns)
    return found


def _judge(gang: Gang, trial: Trial, now_ns: int) -> None:
    """Compares the slots since the marks with what was measured before."""
    rates, before = _rates(trial.marks), trial.side_by_side
    if not all(rates.values()):
        return
    parts = {
        seat: (seat.held_ns(now_ns) - mark.held_ns) / (now_ns - trial.since_ns) for seat, mark in trial.marks.items()
    }
    gains = {seat: rates[seat] / before[seat] for seat in rates}
    members = [seat for seat in rates if seat.client.facts.gang == gang.name]
    rivals = [seat for seat in rates if seat not in members]
    gpus = len({seat.gpu.uuid for seat in members})
    part = min(parts[seat] for seat in members)
    turns = [part] * gpus + [parts[seat] for seat in rivals]
    beside = [part / min(gains[seat] for seat in members)] * gpus + [parts[seat] / gains[seat] for seat in rivals]
    fair = all(one >= FAIR * min(other, 0.5) for one, other in zip(turns, beside, strict=True))
    trial.slots_are_better = fair and sum(turns) > sum(beside) * (1.0 + MARGIN)
    trial.why = f"total speed {sum(turns) / gpus:.0%} in turns, {sum(beside) / gpus:.0%} side by side"
