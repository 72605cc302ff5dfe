"""Earliest deadline first: of the jobs that can still meet their deadline, the one with the earliest runs.

Source: Liu, Layland: "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973.
Rule: exclusive turns.  The earliest deadline goes first and preempts.  Jobs without a deadline, or with one that
has passed, come after them and take turns (parts/levels.py).
Bound: with n clients a job waits at most 60 s, or 6 quanta if that is longer, and n quanta (parts/levels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import JobView
from nvshare.scheduler_policies.parts.levels import LevelPolicy

_NEVER: Final = 1 << 62


class Edf(LevelPolicy):
    """The levels are deadlines."""

    name = "edf"

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The deadline, if it has not passed."""
        return [due if (due := job.rank.deadline_ns or _NEVER) > now_ns else _NEVER for job in jobs]
