"""Least attained service: jobs that have had little GPU time go first, so that short jobs end soon.

Source: Tiresias' discretised least attained service (Gu et al., NSDI 2019).
Rule: exclusive turns.  A job is in queue k once it has had `FIRST_NS` (2^k - 1) of GPU time.  The lowest queue goes
first and preempts; within a queue turns rotate (parts/turns.py).  A starved job has a turn before all
(parts/ageing.py).
Bound: with n clients a job waits at most 60 s, or 10 quanta if that is longer, and n quanta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import GpuView, Happened, JobView, Plan, PolicyBase
from nvshare.scheduler_policies.parts import ageing
from nvshare.scheduler_policies.parts.turns import OwnerTurns, going_on, one_turn, split

FIRST_NS: Final = 10_000_000_000
QUEUES: Final = 8
_ALL_NS: Final = 1 << 62


class LeastAttained(PolicyBase):
    """Keeps the last turn of each owner."""

    name = "least_attained"

    def __init__(self) -> None:
        self._turns = OwnerTurns()

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """A turn that goes on, unless a job of a lower queue has come; then a starved job; then the lowest queue."""
        active, waiting = split(jobs)
        used_ns = [job.turn.used_ns for job in waiting]
        lowest = _queue(min(used_ns, default=_ALL_NS))
        top, end_ns = waiting, _end_ns(lowest)
        if max(used_ns, default=0) >= end_ns:
            top = [job for job, used in zip(waiting, used_ns, strict=True) if used < end_ns]
        running = going_on(active, gpu.quantum_ns, now_ns)
        if running is not None and (mine := _queue(running.used_ns(now_ns))) > lowest:
            begins_ns = _end_ns(mine - 1)
            if ageing.is_preempted(gpu, running, waiting, lambda job: job.turn.used_ns < begins_ns, now_ns):
                running = None
        following = self._turns.following(top, running or next(iter(active), None))
        held = [job for job in active if _queue(job.used_ns(now_ns)) < lowest]
        job = running or ageing.starved(gpu, waiting, now_ns) or (held or following)[0]
        return one_turn(job, gpu.quantum_ns, following, len(waiting))

    def observe(self, happened: Happened) -> None:
        """Notes a turn of the job's owner."""
        self._turns.observe(happened)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of the module's docstring."""
        return ageing.wait_bound_ns(clients, gpu)


def _queue(used_ns: int) -> int:
    return min(QUEUES - 1, (used_ns // FIRST_NS + 1).bit_length() - 1)


def _end_ns(queue: int) -> int:
    """The GPU time at which a job leaves a queue."""
    return FIRST_NS * ((2 << queue) - 1) if queue < QUEUES - 1 else _ALL_NS
