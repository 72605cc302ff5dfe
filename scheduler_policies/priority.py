"""Strict priorities with ageing: a higher priority runs first and preempts at once, without starvation.

Source: multilevel priority scheduling with ageing (Silberschatz, Galvin, Gagne: "Operating System Concepts").
Rule: exclusive turns rotate within the highest priority (parts/levels.py).
Bound: with n clients a job waits at most 60 s, or 6 quanta if that is longer, and n quanta (parts/levels.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.scheduler_policies.api import JobView
from nvshare.scheduler_policies.parts.levels import LevelPolicy


class Priority(LevelPolicy):
    """The levels are priorities."""

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The highest priority is first."""
        return [-job.rank.priority for job in jobs]
