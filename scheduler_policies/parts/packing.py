"""The arrangement that gives more, as measured: all programs side by side, or groups of them in turns.

An *arrangement* is a list of groups that take turns beside programs that always run.  A program's *normalised progress*
is its rate over its rate alone.  In turns it counts what the program achieves during its turn, times its group's part
of the time; a group's part is its part of the programs.  Arrangements, in the order in which they are considered:
- Each saturating program is a group; the others always run.
- Programs that leave the GPU idle are one more group.
Rules:
- A program whose busy share is not known counts as saturating once it has been measured beside interactive ones.
- Turns that could gain are tried until all rates are known; also where side by side seems to lose nothing, since a
  short probe may have seen less of a program alone than it does.
- Turns must gain `MARGIN`, and must leave no program with less than it has side by side, or than its equal part.
- Where a program has less than `STARVED` of its equal part side by side (under MPS, beside long kernels), they need not
  gain, and must leave everybody with that much.
- A program that is `UNLIKELY` times as fast beside others as alone was idle when it was measured alone, or does
  something else now: nothing follows from its figures.
- A member of a gang always runs: it computes only while its other GPUs do, so its progress here says nothing of this
  GPU.  The engine measures whether the gang has turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nvshare.scheduler_policies.api import GpuView, Happened, JobClass, JobLeft, JobView, Measured
from nvshare.scheduler_policies.parts.rates import Rates
from nvshare.scheduler_policies.parts.solo_probes import SoloProbes

SATURATING: Final = 0.95
"""Busy share from which a program gains by turns."""
MARGIN: Final = 0.01
TOLERANCE: Final = 0.03
STARVED: Final = 2 / 3
UNLIKELY: Final = 1.2
MOST_TOGETHER: Final = 8
"""Members of a group: its turn lasts so many quanta."""


class Verdict(NamedTuple):
    """An arrangement, with the sums of normalised progress; 0: not known.  No groups: all run side by side."""

    groups: tuple[tuple[JobView, ...], ...] = ()
    together_sum: float = 0.0
    turns_sum: float = 0.0
    considered: tuple[tuple[JobView, ...], ...] = ()
    starved: str = ""
    """The program that has too little side by side."""

    def why(self, quantum_ns: int) -> str:
        """A sentence for people."""
        shown = [" with ".join(_named(job) for job in group) for group in self.considered[:3]]
        more = f" and {len(self.considered) - 3} more" if len(self.considered) > 3 else ""
        names = " and ".join(shown) + more
        sums = {"in turns": self.turns_sum, "side by side": self.together_sum}
        told = ", ".join(f"{total:.0%} {how}" for how, total in sums.items() if total)
        speed = f"total speed {told}" if told else "not measured yet"
        speed += f" (too little of it for {self.starved})" if self.starved else ""
        how = f"take turns of {quantum_ns / 1e6:.0f} ms" if self.groups else "run side by side"
        return f"{names} {how}: {speed}"


def _named(job: JobView) -> str:
    busy = job.progress.busy_alone
    return f"{job.name} (alone {busy:.0%} busy)" if busy else job.name


class Packing:
    """The measurements on one GPU."""

    def __init__(self) -> None:
        self._rates = Rates()
        self.probes = SoloProbes()

    def observe(self, happened: Happened) -> None:
        """Notes a report, or forgets a client."""
        if isinstance(happened, JobLeft):
            self._rates.forget(happened.client)
            self.probes.left(happened.client)
        elif isinstance(happened, Measured):
            self._measured(happened.job, frozenset(happened.running), happened.span_ns, happened.now_ns)

    def _measured(self, job: JobView, running: frozenset[int], span_ns: int, now_ns: int) -> None:
        client, progress = job.client, job.progress
        if self.probes.report(job, running, span_ns, now_ns):
            self._rates.begin_anew(running)
        if progress.rate > 0.0:
            changed = self._rates.add(running, client, progress.rate, span_ns, now_ns)
            if changed and self.probes.new_phase(client, now_ns):
                self._rates.forget(client)

    def arrange(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Verdict:
        """The best arrangement of these jobs and those that drain: these soon want the GPU again."""
        verdict = self._best(gpu, (*jobs, *gpu.draining), now_ns)
        if not gpu.draining:
            return verdict
        gone = {job.client for job in gpu.draining}
        groups = [tuple(job for job in group if job.client not in gone) for group in verdict.groups]
        groups = [group for group in groups if group]
        return verdict._replace(groups=tuple(groups) if len(groups) > 1 else ())

    def _best(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Verdict:
        batch = [job for job in jobs if job.rank.job_class is JobClass.BATCH and not job.gang]
        batch.sort(key=lambda job: job.client)
        heavy = [job for job in batch if self._may_saturate(job)]
        light = tuple(job for job in batch if not self._may_saturate(job))
        each = tuple((job,) for job in heavy)
        verdict = self._judge(gpu, each, jobs, now_ns) if len(heavy) > 1 else Verdict()
        if verdict.groups or not heavy or not 1 <= len(light) <= MOST_TOGETHER:
            return verdict
        grouped = self._judge(gpu, (*each, light), jobs, now_ns)
        return grouped if grouped.groups or not verdict.considered else verdict

    def _may_saturate(self, job: JobView) -> bool:
        busy = job.progress.busy_alone
        return busy >= SATURATING or (busy == 0.0 and self.probes.known_beside(job.client))

    def _judge(
        self, gpu: GpuView, groups: tuple[tuple[JobView, ...], ...], jobs: Sequence[JobView], now_ns: int
    ) -> Verdict:
        """Whether the groups should take turns beside the other jobs."""
        everybody = frozenset(job.client for job in jobs)
        takers = [job for group in groups for job in group]
        beside = everybody.difference(job.client for job in takers)
        together = [self._progress(everybody, job, now_ns) for job in takers]
        if not all(together) or max(together) > UNLIKELY:
            return Verdict(considered=groups)
        equal = 1.0 / len(everybody)
        least = min(together)
        starved = takers[together.index(least)].name if least < STARVED * equal else ""
        could = sum(len(group) * _fitting(group) for group in groups) / len(takers)
        if sum(together) >= could * (1.0 + MARGIN) and not starved:
            return Verdict((), sum(together), 0.0, groups)
        turns: list[float] = []
        for group in groups:
            setting, length_ns = beside.union(job.client for job in group), len(group) * gpu.quantum_ns
            part = len(group) / len(takers) * length_ns / (length_ns + gpu.switch_cost_ns)
            turns += [part * self._progress(setting, job, now_ns) for job in group]
        if not all(turns):
            return Verdict(groups, sum(together), 0.0, groups, starved)
        floor = STARVED if starved else 1.0 - TOLERANCE
        fair = all(turn >= floor * min(now, equal) for turn, now in zip(turns, together, strict=True))
        better = starved or sum(turns) > sum(together) * (1.0 + MARGIN)
        return Verdict(groups if fair and better else (), sum(together), sum(turns), groups, starved)

    def _progress(self, setting: frozenset[int], job: JobView, now_ns: int) -> float:
        alone = job.progress.alone_rate or self.probes.rate(job.client, setting)
        return self._rates.mean(setting, job.client, now_ns) / alone if alone > 0.0 else 0.0


def takers_by_share(gpu: GpuView, jobs: Sequence[JobView]) -> list[JobView]:
    """The jobs that take turns by their shares: those that may want more.  None where fewer than two do."""
    heavy, gone = [job for job in jobs if may_want_more(job)], [job for job in gpu.draining if may_want_more(job)]
    return heavy if len(heavy) + len(gone) > 1 and any(map(has_shares, (*heavy, *gone))) else []


def may_want_more(job: JobView) -> bool:
    """Whether a batch job may want more than its limit, or all that there is."""
    busy, rank = job.progress.busy_alone, job.rank
    is_heavy = busy >= min(rank.share_limit, SATURATING) if busy else has_shares(job)
    return is_heavy and rank.job_class is JobClass.BATCH and not job.gang


def has_shares(job: JobView) -> bool:
    """Whether it has a guarantee or a limit."""
    return job.rank.share_request > 0.0 or job.rank.share_limit < 1.0


def _fitting(group: Sequence[JobView]) -> float:
    """The sum of normalised progress that a group could have, by its members' busy shares."""
    wanted = sum(job.progress.busy_alone for job in group)
    return len(group) * min(1.0, 1.0 / wanted) if len(group) > 1 and wanted > 0.0 else float(len(group))


def why_together(jobs: Sequence[JobView]) -> str:
    """A sentence for people: why these jobs run side by side unmeasured."""
    count, what = len(jobs), "programs run side by side"
    sliced = {job.rank.job_class: job.name for job in jobs if not job.spatial}
    if sliced.keys() >= {JobClass.INTERACTIVE, JobClass.BEST_EFFORT}:
        server, spare = sliced[JobClass.INTERACTIVE], sliced[JobClass.BEST_EFFORT]
        why = f"requests of {server} wait for slices of {spare} (about 2 ms)"
        return f"{count} {what}, as without a coordinator: {why}; `nvshare-coordinator --mps` prevents this"
    batch = [job for job in jobs if job.rank.job_class is JobClass.BATCH]
    gang = next((job for job in batch if job.gang), None)
    if gang is not None:
        return f"{count} {what}: {gang.name} is in gang {gang.gang}"
    if len(batch) < 2:
        return f"{count} {what}: turns need two programs of class batch, and there is {'one' if batch else 'none'}"
    unknown = [job.name for job in batch if not job.progress.busy_alone]
    if unknown:
        return f"{count} {what}, as without a coordinator: {unknown[0]} has not been measured alone yet"
    known = [job for job in jobs if job.progress.busy_alone]
    busy = ", ".join(f"{job.name} {job.progress.busy_alone:.0%}" for job in known[:4])
    return f"{count} {what}: fewer than two keep the GPU busy when they run alone ({busy})"
