"""Least attained service: jobs that have had little GPU time go first, so that short jobs end soon.

Source: Tiresias' discretised least attained service (Gu et al., NSDI 2019).
Rule: exclusive turns.  A job is in queue k once it has had `FIRST_NS` (2^k - 1) of GPU time before its present turn.
The lowest queue goes first and preempts; within a queue turns rotate (parts/levels.py).
Bound: 20 quanta and 21 n units (parts/levels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import JobView
from nvshare.scheduler_policies.parts.levels import LevelPolicy

FIRST_NS: Final = 10_000_000_000
QUEUES: Final = 8
_ALL_NS: Final = 1 << 62


class LeastAttained(LevelPolicy):
    """The levels are queues."""

    name = "least_attained"

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The GPU time before the present turn."""
        return [job.used_ns(job.turn.began_ns) if job.turn.granted_at_ns else job.turn.used_ns for job in jobs]

    def last_key(self, key: int) -> int:
        """The GPU time at which a job leaves the queue."""
        queue = (key // FIRST_NS + 1).bit_length() - 1
        return FIRST_NS * ((2 << queue) - 1) - 1 if queue < QUEUES - 1 else _ALL_NS
