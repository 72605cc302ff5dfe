"""Least attained service: jobs that have had little GPU time go first, so that short jobs end soon.

Source: Tiresias' discretised least attained service (Gu et al., NSDI 2019).
Rule: exclusive turns.  An owner is in queue k once its programs have had `FIRST_NS` (2^k - 1) of GPU time, half of it
forgotten every `HALF_NS`; a job likewise among those of its owner, by the time of its connection.  The lowest queue
goes first and preempts; within a queue turns rotate (parts/levels.py).
Bound: with n clients a job waits at most 60 s, or 6 quanta if that is longer, and n quanta (parts/levels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import Happened, JobView
from nvshare.scheduler_policies.parts.levels import LevelPolicy
from nvshare.scheduler_policies.parts.service import OwnerService

FIRST_NS: Final = 10_000_000_000
QUEUES: Final = 8
HALF_NS: Final = 600_000_000_000


class LeastAttained(LevelPolicy):
    """The levels are queues."""

    def __init__(self) -> None:
        super().__init__()
        self._service = OwnerService(HALF_NS)

    def observe(self, happened: Happened) -> None:
        """Notes turns and their time."""
        super().observe(happened)
        self._service.observe(happened)

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The owner's queue; within it first the jobs of each owner that are in its lowest one."""
        used = [job.used_ns(now_ns) if job.state else job.turn.used_ns for job in jobs]
        least: dict[str, int] = {}
        for job, used_ns in zip(jobs, used, strict=True):
            least[job.owner] = min(used_ns, least.get(job.owner, used_ns))
        last = {owner: _last_ns(_queue(used_ns)) for owner, used_ns in least.items()}
        queues = dict.fromkeys(least, 0)
        if len(queues) > 1:  # the first job of an owner is the one that runs, if one does
            first = {job.owner: job for job in reversed(jobs)}
            queues = {owner: 2 * _queue(int(self._service.at_work(job, now_ns))) for owner, job in first.items()}
        return [queues[job.owner] + (used_ns > last[job.owner]) for job, used_ns in zip(jobs, used, strict=True)]


def _last_ns(queue: int) -> int:
    return FIRST_NS * ((2 << queue) - 1) - 1 if queue < QUEUES - 1 else 1 << 62


def _queue(used_ns: int) -> int:
    return min(QUEUES, (used_ns // FIRST_NS + 1).bit_length()) - 1
