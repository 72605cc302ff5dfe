"""Token buckets over GPU time: how much of its share a job has not used yet.

Rule: credit grows by `share` of the time, up to the share of `DEPTH_NS`, and falls by the time in leases.  So in any
span of s seconds a job that stops at 0 uses at most share (s + DEPTH).  What it overruns is taken from what comes next.
A lease at a rate counts for that part of it.
A job that has waited long begins with a full bucket.
"""

from __future__ import annotations

from typing import Final

from nvshare.scheduler_policies.api import Happened, JobLeft, JobView, TurnEnded

DEPTH_NS: Final = 200_000_000
ENOUGH_NS: Final = 50_000_000
"""A job may begin a turn with the share of this, so that turns are not too short."""
MOST_DEBT_NS: Final = 2_000_000_000


class Buckets:
    """The credit of each client, at the end of its last lease.  A subclass says which share a job has."""

    def __init__(self) -> None:
        self._credit: dict[int, tuple[float, int, int]] = {}  # credit, time, used so far

    def credit_ns(self, job: JobView, now_ns: int) -> float:
        """The credit now, the present lease charged."""
        granted_at_ns = job.turn.granted_at_ns
        if granted_at_ns is None:
            return self._at(job, now_ns)
        return self._at(job, granted_at_ns) - (now_ns - granted_at_ns) * (1.0 - self._share(job))

    def may_begin(self, job: JobView, now_ns: int) -> bool:
        """Whether there is enough for a turn."""
        return self.credit_ns(job, now_ns) >= self._share(job) * ENOUGH_NS

    def ready_at_ns(self, job: JobView, now_ns: int) -> int:
        """When there is."""
        share = self._share(job)
        return now_ns + 1 + max(0, int((share * ENOUGH_NS - self.credit_ns(job, now_ns)) / share))

    def turn_ns(self, job: JobView, now_ns: int) -> int:
        """The length of a turn that ends at 0; the same during the whole turn."""
        began_ns = now_ns if job.turn.granted_at_ns is None else job.turn.began_ns
        return max(0, int(self.credit_ns(job, began_ns) / (1.0 - self._share(job))))

    def observe(self, happened: Happened) -> None:
        """Charges a lease, or forgets a client."""
        if isinstance(happened, JobLeft):
            self._credit.pop(happened.client, None)
        elif isinstance(happened, TurnEnded):
            job, now_ns = happened.job, happened.now_ns
            used_ns = job.used_ns(now_ns)
            known = self._credit.get(job.client)
            lease_ns = used_ns - (0 if known is None else known[2])
            credit = self._at(job, now_ns - lease_ns) - lease_ns * (happened.rate - self._share(job))
            self._credit[job.client] = (max(credit, -MOST_DEBT_NS), now_ns, used_ns)

    def _share(self, job: JobView) -> float:
        raise NotImplementedError

    def _at(self, job: JobView, at_ns: int) -> float:
        share, known = self._share(job), self._credit.get(job.client)
        if known is None:
            return share * DEPTH_NS
        return min(share * DEPTH_NS, known[0] + share * max(0, at_ns - known[1]))
