"""GPU time that each owner has had, with the past fading: a rank that programs give themselves has a bound by it.

An owner that uses the GPU all of the time has had `HALVES * half_ns`.  Time counts for the owner, so a new connection
or program begins with it.
"""

from __future__ import annotations

import math
from typing import Final

from nvshare.scheduler_policies.api import Happened, JobView, TurnEnded

HALVES: Final = 1 / math.log(2)
REMEMBERED: Final = 1024
"""Number of remembered owners; beyond it the owner with the oldest turn is forgotten."""


class OwnerService:
    """The time of the owners on one GPU.  Half of it is forgotten after `half_ns`."""

    def __init__(self, half_ns: int) -> None:
        self._half_ns = half_ns
        self._had: dict[str, tuple[float, int]] = {}  # time, as of when

    def observe(self, happened: Happened, *, counts: bool = True, quiet_is_free: bool = False) -> None:
        """Charges a lease.  `counts`: it is one to charge.  `quiet_is_free`: only for the time in which others
        waited."""
        if isinstance(happened, TurnEnded) and counts:
            job, now_ns = happened.job, happened.now_ns
            lease_ns = job.uncharged_ns(now_ns)
            if quiet_is_free:
                lease_ns = max(0, lease_ns - happened.quiet_ns)
            had_ns = self.of(job.owner, now_ns - lease_ns)
            self._had.pop(job.owner, None)
            self._had[job.owner] = self._faded(had_ns, lease_ns) + self._use(lease_ns), now_ns
            if len(self._had) > REMEMBERED:
                del self._had[next(iter(self._had))]

    def of(self, owner: str, now_ns: int) -> float:
        """The owner's time, present leases not counted."""
        had_ns, at_ns = self._had.get(owner, (0.0, now_ns))
        return self._faded(had_ns, now_ns - at_ns)

    def at_work(self, job: JobView, now_ns: int) -> float:
        """The owner's time, the job's present lease counted."""
        since_ns = now_ns if job.turn.granted_at_ns is None else job.turn.granted_at_ns
        return self._faded(self.of(job.owner, since_ns), now_ns - since_ns) + self._use(now_ns - since_ns)

    def is_ahead(self, job: JobView, now_ns: int) -> bool:
        """Whether the owner has had more than by using half of the GPU's time."""
        return self.at_work(job, now_ns) > HALVES * self._half_ns / 2

    def _faded(self, had_ns: float, after_ns: int) -> float:
        return float(had_ns * 0.5 ** (max(0, after_ns) / self._half_ns))

    def _use(self, lease_ns: int) -> float:
        """A lease that ends now, its beginning faded."""
        return float(HALVES * self._half_ns * (1.0 - 0.5 ** (lease_ns / self._half_ns)))
