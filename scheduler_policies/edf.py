"""Earliest deadline first: of the jobs that can still meet their deadline, the one with the earliest runs.

Source: Liu, Layland: "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973.
Rule: exclusive turns.  The earliest deadline goes first and preempts.  Jobs without a deadline, or with one that
has passed, come after them and take turns (parts/turns.py).  A starved job has a turn before all (parts/ageing.py).
Bound: with n clients a job waits at most 60 s, or 10 quanta if that is longer, and n quanta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import GpuView, Happened, JobView, Plan, PolicyBase
from nvshare.scheduler_policies.parts import ageing
from nvshare.scheduler_policies.parts.turns import AHEAD, OwnerTurns, going_on, one_turn, split

_NEVER: Final = 1 << 62


class Edf(PolicyBase):
    """Keeps the last turn of each owner."""

    name = "edf"

    def __init__(self) -> None:
        self._turns = OwnerTurns()

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """A turn that goes on, unless an earlier deadline has come; then a starved job; then the earliest deadline."""
        active, waiting = split(jobs)
        due = [job for job in waiting if now_ns < (job.rank.deadline_ns or 0)]
        due.sort(key=_deadline)  # equal deadlines in turn order
        running = going_on(active, gpu.quantum_ns, now_ns)
        if running is not None and due and _deadline(due[0]) < _left(running, now_ns):
            mine = _left(running, now_ns)
            if ageing.is_preempted(gpu, running, due, lambda job: _deadline(job) < mine, now_ns):
                running = None
        following = due[:AHEAD] or self._turns.following(waiting, running or next(iter(active), None))
        held = [job for job in active if _left(job, now_ns) < _NEVER]
        first = min([*held, *following[:1]], key=lambda job: _left(job, now_ns), default=active[0] if active else None)
        job = running or ageing.starved(gpu, waiting, now_ns) or first
        assert job is not None, "decide is called with a job"
        return one_turn(job, gpu.quantum_ns, following, len(waiting))

    def observe(self, happened: Happened) -> None:
        """Notes a turn of the job's owner."""
        self._turns.observe(happened)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of the module's docstring."""
        return ageing.wait_bound_ns(clients, gpu)


def _deadline(job: JobView) -> int:
    return job.rank.deadline_ns or _NEVER


def _left(job: JobView, now_ns: int) -> int:
    """The deadline, if it has not passed."""
    deadline_ns = _deadline(job)
    return deadline_ns if deadline_ns > now_ns else _NEVER
