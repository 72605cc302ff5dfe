"""Whether a gang runs beside its rivals or in slots, where the policies leave that open: as measured, for all its GPUs.

`auto` runs members without a turn beside others.  It sees one GPU, and a gang is as fast as its slowest rank on any.

Rules:
- Programs that have run side by side for `SETTLE_NS` are measured for `WINDOW_NS`, then in slots for as long, from the
  beginning of a slot to that of another one.
- In slots each program has half of a GPU, so `0.5 / gain` is its normalised progress side by side, where `gain` is its
  speed in slots by that side by side.  The gain of each member is that of the one that gains least.
- Slots must gain `MARGIN` in all.
- The result holds until other programs want these GPUs, for `VOID_NS` at most, and longer after long slots.
- Not measured: a gang with two rivals on a GPU, of which slots would give it more than its part; programs with another
  class than batch, or with shares; rivals of a gang while it is in slots.  Interactive programs run beside either.

Non-goals: slots (slots.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Final

from nvshare.coordinator.model.gang import Gang, Trial
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.model.settings import SECOND_NS, Sharing
from nvshare.scheduler_policies.api import Allotment, JobClass

SETTLE_NS: Final = SECOND_NS
WINDOW_NS: Final = 2 * SECOND_NS
VOID_NS: Final = 120 * SECOND_NS
MARGIN: Final = 0.01


def has_slots(node: Node, gang: Gang, wanting: Sequence[Seat], allotment: Allotment, now_ns: int) -> bool:
    """Whether a member that a policy names needs a slot of its gang.  `wanting`: the members that want their GPUs."""
    trial, seats = gang.trial, _measurable(gang, wanting) if allotment.quantum_ns is None else frozenset[Seat]()
    if trial.until_ns:
        trial.in_slots = trial.slots_are_better
    may_lack = bool(seats) if trial.in_slots else trial.until_ns > 0  # idle programs give their GPUs back
    if not (seats == trial.seats or (may_lack and seats < trial.seats)) or 0 < trial.until_ns <= now_ns:
        gang.trial = trial = Trial(seats, now_ns)
    if not seats or trial.in_slots or trial.until_ns:
        return trial.in_slots or allotment.quantum_ns is not None
    if any(other.trial.in_slots and not seats.isdisjoint(other.seats) for other in node.gangs.values()):
        trial.since_ns = now_ns
    if not trial.marks or now_ns < trial.since_ns + SETTLE_NS:
        trial.marks = {seat: seat.progress.last for seat in seats}
    elif now_ns >= trial.since_ns + SETTLE_NS + WINDOW_NS:
        rates = _rates(trial)
        gang.trial = trial = Trial(seats, now_ns, side_by_side=rates, in_slots=all(rates.values()))
    return trial.in_slots


def slot_has_begun(gang: Gang, now_ns: int) -> None:
    """All members run in their slot, and their rivals have drained."""
    trial = gang.trial
    if trial.in_slots and not trial.marks:
        trial.since_ns, trial.marks = now_ns, {seat: seat.progress.last for seat in trial.seats}
    elif trial.in_slots and not trial.until_ns and now_ns >= trial.since_ns + WINDOW_NS:
        trial.until_ns = now_ns + max(VOID_NS, 50 * (now_ns - trial.since_ns))
        gains = {seat: rate / trial.side_by_side[seat] for seat, rate in _rates(trial).items()}
        slowest = min((gains[seat] for seat in gang.seats if seat in gains), default=1.0)
        if all(gains.values()):
            beside = mean(1.0 / (slowest if seat in gang.seats else gain) for seat, gain in gains.items())
            trial.slots_are_better = beside * (1.0 + MARGIN) < 1.0
            trial.why = f"; side by side, all have {beside:.0%} of their speed in turns"


def _measurable(gang: Gang, wanting: Sequence[Seat]) -> frozenset[Seat]:
    """The members and rivals on the gang's GPUs; empty: they are not measured."""
    gpus = {seat.gpu.uuid: seat.gpu for seat in wanting}.values()
    here = [seat for gpu in gpus for seat in (*gpu.leases.by_client.values(), *gpu.wait_queue.seats())]
    found = frozenset(seat for seat in here if seat.client.facts.rank.job_class is not JobClass.INTERACTIVE)
    rivals = found.difference(gang.seats)
    ranks = [seat.client.facts.rank for seat in found.union(wanting)]
    plain = all((one.job_class, one.share_request, one.share_limit) == (JobClass.BATCH, 0.0, 1.0) for one in ranks)
    free = all(gpu.settings.sharing is Sharing.AUTO for gpu in gpus)
    fair = 0 < len(rivals) == len({seat.gpu.uuid for seat in rivals})
    return found if plain and free and fair else frozenset()


def _rates(trial: Trial) -> dict[Seat, float]:
    """Work a second since the marks; 0: not known."""
    counts = [(seat, last, seat.progress.last) for seat, last in trial.marks.items()]
    return {s: max(0, now.work - last.work) * SECOND_NS / max(1, now.at_ns - last.at_ns) for s, last, now in counts}
