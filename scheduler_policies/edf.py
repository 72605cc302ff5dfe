"""Earliest deadline first: of the jobs that can still meet their deadline, the one with the earliest runs.

Source: Liu, Layland: "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973.
Rule: exclusive turns.  The earliest deadline goes first and preempts.  Jobs without a deadline, or with one that
has passed, come after them and take turns (parts/levels.py).  A job of an owner whose jobs with deadlines have had half
of the GPU's time over the last minutes counts as one without: else an owner could have all of it by new deadlines.
Bound: with n clients a job waits at most 60 s, or 6 quanta if that is longer, and n quanta (parts/levels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import Happened, JobView, TurnEnded
from nvshare.scheduler_policies.parts.levels import LevelPolicy
from nvshare.scheduler_policies.parts.service import OwnerService

HALF_NS: Final = 60_000_000_000
"""From rest an owner has the GPU for this time by its deadlines alone."""
_NEVER: Final = 1 << 62


class Edf(LevelPolicy):
    """The levels are deadlines."""

    def __init__(self) -> None:
        super().__init__()
        self._service = OwnerService(HALF_NS)

    def observe(self, happened: Happened) -> None:
        """Notes turns, and charges those with a deadline."""
        super().observe(happened)
        counts = isinstance(happened, TurnEnded) and (happened.job.rank.deadline_ns or 0) > happened.now_ns
        self._service.observe(happened, counts=counts)

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The deadline, if it has not passed."""
        keys = [due if (due := job.rank.deadline_ns or _NEVER) > now_ns else _NEVER for job in jobs]
        if any(job.owner != jobs[0].owner for job in jobs):
            ahead = self._service.is_ahead
            keys = [
                _NEVER if key != _NEVER and ahead(job, now_ns) else key for job, key in zip(jobs, keys, strict=True)
            ]
        return keys
