"""Production jobs run as if they were alone; the others run in what is left.

Source: TGS (Wu et al., NSDI 2023), AntMan (Xiao et al., OSDI 2020), MuxFlow (Zhao et al., 2023).
Rule: the jobs of the highest priority that are not best-effort are production jobs: they always run.  The others run
beside them at a rate that leaves production jobs 99 % of their progress (parts/harvest.py), and at full rate while none
is active.  Where memory is short, each of the two groups takes turns, production first.
Bound: none; where one job runs at a time, another job has a turn once it has waited for `PATIENCE_NS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nvshare.scheduler_policies.api import GpuView, Happened, JobClass, JobLeft, JobView, Measured, Plan, PolicyBase
from nvshare.scheduler_policies.parts.harvest import Harvest
from nvshare.scheduler_policies.parts.members import MOST, allot
from nvshare.scheduler_policies.parts.turns import OwnerTurns, split

PATIENCE_NS: Final = 60_000_000_000
_BEST_EFFORT: Final = JobClass.BEST_EFFORT
_LOWER: Final = 1 << 40
"""More than any difference of priorities."""


class Opportunistic(PolicyBase):
    """Keeps the rate, turns, and the standing of each client."""

    name = "opportunistic"
    reads_progress = True

    def __init__(self) -> None:
        self._turns = OwnerTurns()
        self._known: dict[int, int] = {}
        self._harvest = Harvest()

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Production jobs, and the others beside them."""
        ranks = [job.rank for job in jobs]
        standings = [rank.priority - _LOWER * (rank.job_class is _BEST_EFFORT) for rank in ranks]
        top = max(standings)
        crowded = gpu.exclusive or gpu.memory_short or len(jobs) > MOST
        higher, lower = list(jobs), list[JobView]()
        if min(standings) != top:
            higher = [job for job, standing in zip(jobs, standings, strict=True) if standing == top]
            lower = [job for job, standing in zip(jobs, standings, strict=True) if standing != top]
        production = self._ordered(gpu, higher, crowded, now_ns)
        others = self._ordered(gpu, lower, crowded, now_ns)
        quanta = {job.client: gpu.quantum_ns for job in (*production, *others)} if crowded else {}
        patient = [job for job in others if now_ns - (job.turn.waiting_since_ns or now_ns) > PATIENCE_NS]
        if gpu.exclusive:
            production, others = [*patient, *production][:1] or others[:1], []
        plan = allot(production, others[: max(0, MOST - len(production))], quanta, self._harvest, now_ns)
        why = f"{production[0].name} and {len(production) - 1} other production jobs run"
        if others:
            why += f"; {len(others)} others run at a rate of {plan.running[-1].rate:.2f}"
        return replace(plan, why=why)

    def observe(self, happened: Happened) -> None:
        """Notes turns, reports and standings."""
        self._turns.observe(happened)
        if isinstance(happened, JobLeft):
            self._known.pop(happened.client, None)
        elif isinstance(happened, Measured):
            self._known[happened.job.client] = _standing(happened.job)
        self._harvest.observe(happened, lambda job: _standing(job) < max(self._known.values()))

    def _ordered(self, gpu: GpuView, jobs: list[JobView], crowded: bool, now_ns: int) -> list[JobView]:
        """Jobs whose turn goes on, then those that wait, then those whose turn is over."""
        if not crowded:
            return jobs
        active, waiting = split(jobs)
        here = [job for job in active if not job.turn.granted_at_ns or now_ns < job.turn.began_ns + gpu.quantum_ns]
        following = self._turns.following(waiting, next(iter(active), None))
        known = {job.client for job in here}
        return [*here, *following, *(job for job in active if job.client not in known)][:MOST]


def _standing(job: JobView) -> int:
    """Best-effort jobs are below all others."""
    return job.rank.priority - _LOWER * (job.rank.job_class is _BEST_EFFORT)
