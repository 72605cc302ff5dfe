"""Production jobs run as if they were alone; the others run in what is left.

Source: TGS (Wu et al., NSDI 2023), AntMan (Xiao et al., OSDI 2020), MuxFlow (Zhao et al., 2023).
Rule: the jobs of the highest priority that are not best-effort are production jobs: they always run.  The others run
beside them at a rate that leaves production jobs 99 % of their progress (parts/harvest.py), and at full rate while none
is active.  Where memory is short, each of the two groups takes turns, production first; one that has waited for the
limit of parts/levels.py has a turn.
- A gang that is not best-effort is production on each of its GPUs.  It is as fast as its slowest member: in what is
  left on one GPU it would keep its other GPUs for nothing.
- Where one job runs at a time, production jobs preempt the others (parts/levels.py).
Bound: that of parts/levels.py where one job runs at a time, else none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nvshare.scheduler_policies.api import GpuView, Happened, JobClass, JobLeft, JobView, Measured, Plan
from nvshare.scheduler_policies.parts.harvest import Harvest
from nvshare.scheduler_policies.parts.levels import LevelPolicy, waiting_limit_ns
from nvshare.scheduler_policies.parts.members import MOST, allot
from nvshare.scheduler_policies.parts.turns import has_waited, is_over, split

_BEST_EFFORT: Final = JobClass.BEST_EFFORT
_LOWER: Final = 1 << 40
"""More than any difference of priorities."""


class Opportunistic(LevelPolicy):
    """Keeps the rate, turns, and the key of each client."""

    name = "opportunistic"
    reads_progress = True

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}
        self._harvest = Harvest()

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The highest priority is first; best-effort jobs are last."""
        ranks = [job.rank for job in jobs]
        return [(_LOWER if rank.job_class is _BEST_EFFORT else 0) - rank.priority for rank in ranks]

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Production jobs, and the others beside them."""
        if gpu.exclusive:
            return super().decide(gpu, jobs, now_ns)
        keys = self.keys(jobs, now_ns)
        first = min(keys)
        production, others = list(jobs), list[JobView]()
        if max(keys) != first:
            production = [job for job, key in zip(jobs, keys, strict=True) if _is_production(job, key, first)]
            others = [job for job, key in zip(jobs, keys, strict=True) if not _is_production(job, key, first)]
        quanta: dict[int, int] = {}
        if gpu.memory_short or len(jobs) > MOST:
            production = self._ordered(gpu, production, now_ns)
            others = self._ordered(gpu, others, now_ns)
            limit_ns, quantum_ns = waiting_limit_ns(gpu), gpu.quantum_ns
            waited = [job for job in others if has_waited(job, limit_ns, now_ns)]
            starved = [job for job in waited if not is_over(job, quantum_ns, now_ns)]
            production = [*starved, *production]
            others = [job for job in others if job not in starved]
            quanta = {job.client: quantum_ns for job in (*production, *others)}
        plan = allot(production, others[: max(0, MOST - len(production))], quanta, self._harvest, now_ns)
        why = f"{production[0].name} comes first, of {len(production)} production programs"
        if others:
            why += f"; best-effort programs run for {plan.running[-1].rate:.0%} of the time"
        return replace(plan, why=why)

    def observe(self, happened: Happened) -> None:
        """Notes turns, reports and keys."""
        super().observe(happened)
        known = self._known
        if isinstance(happened, JobLeft):
            known.pop(happened.client, None)
        elif isinstance(happened, Measured):
            (known[happened.job.client],) = self.keys([happened.job], happened.now_ns)
        self._harvest.observe(happened, lambda job: not _is_production(job, known[job.client], min(known.values())))

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """The bound of the module's docstring."""
        return super().wait_bound_ns(clients, gpu) if gpu.exclusive else None

    def _ordered(self, gpu: GpuView, jobs: list[JobView], now_ns: int) -> list[JobView]:
        """Jobs whose turn goes on, then those that wait, then those whose turn is over."""
        active, waiting = split(jobs)
        here = [job for job in active if not is_over(job, gpu.quantum_ns, now_ns)]
        following = self.turns.following(waiting, next(iter((*active, *gpu.draining)), None))
        return list({job.client: job for job in (*here, *following, *active)}.values())[:MOST]


def _is_production(job: JobView, key: int, first: int) -> bool:
    return key == first or (bool(job.gang) and key < _LOWER // 2)
