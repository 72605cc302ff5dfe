"""Least attained service: jobs that have had little GPU time go first, so that short jobs end soon.

Source: Tiresias' discretised least attained service (Gu et al., NSDI 2019).
Rule: exclusive turns.  A job is in queue k once it has had `FIRST_NS` (2^k - 1) of GPU time.
The lowest queue goes first and preempts; within a queue turns rotate (parts/levels.py).
Bound: with n clients a job waits at most 60 s, or 6 quanta if that is longer, and n quanta (parts/levels.py).
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
        """The GPU time."""
        return [job.used_ns(now_ns) if job.state else job.turn.used_ns for job in jobs]

    def last_key(self, key: int) -> int:
        """The GPU time at which a job leaves the queue."""
        queue = (key // FIRST_NS + 1).bit_length() - 1
        return FIRST_NS * ((2 << queue) - 1) - 1 if queue < QUEUES - 1 else _ALL_NS
