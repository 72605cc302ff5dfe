"""The rate of work that runs in what production jobs leave, such that they keep `KEPT` of what they have without it.

Source: the feedback of TGS (Wu et al., NSDI 2023) and AntMan (Xiao et al., OSDI 2020).
Rule: additive increase, multiplicative decrease.  A production job's rate beside harvesting jobs is compared with its
rate in the same company without them, which is measured for `BARE_NS` now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nvshare.scheduler_policies.api import Happened, JobLeft, JobView, Measured

KEPT: Final = 0.99
LEAST: Final = 0.01
FIRST: Final = 0.1
BARE_NS: Final = 300_000_000
REFRESH_NS: Final = 30_000_000_000
_STEP_NS: Final = 250_000_000
_MORE: Final = 0.02
_LESS: Final = 0.8
_SETTINGS: Final = 256


class Harvest:
    """The controller of one GPU."""

    def __init__(self) -> None:
        self._harvesting: set[int] = set()
        self._base: dict[tuple[int, frozenset[int]], tuple[float, int]] = {}  # rate without, measured at
        self._now: dict[int, float] = {}
        self._bare_until_ns = 0
        self._stepped_at_ns = 0
        self.rate = FIRST

    def bare_until_ns(self, now_ns: int) -> int | None:
        """While production jobs are measured without the others: until when."""
        return self._bare_until_ns if now_ns < self._bare_until_ns else None

    def observe(self, happened: Happened, harvests: Callable[[JobView], bool]) -> None:
        """Adapts the rate.  `harvests` says whether a job runs in what others leave."""
        if isinstance(happened, JobLeft):
            self._harvesting.discard(happened.client)
            self._now.pop(happened.client, None)
            for key in [key for key in self._base if happened.client in key[1]]:
                del self._base[key]
        elif isinstance(happened, Measured):
            job = happened.job
            if harvests(job):
                self._harvesting.add(job.client)
            elif job.progress.rate > 0.0 and job.progress.measured_for_ns > 0:
                self._harvesting.discard(job.client)
                self._production(job, frozenset(happened.running), happened.now_ns)

    def _production(self, job: JobView, running: frozenset[int], now_ns: int) -> None:
        key, rate = (job.client, running - self._harvesting), job.progress.rate
        known = self._base.get(key)
        if not running & self._harvesting:
            base = rate if known is None else known[0] + 0.3 * (rate - known[0])
            self._base[key] = (base, now_ns)
            while len(self._base) > _SETTINGS:
                del self._base[next(iter(self._base))]
            self._now.pop(job.client, None)
            return
        if known is None or now_ns - known[1] > REFRESH_NS:
            if now_ns >= self._bare_until_ns + 10 * BARE_NS or self._bare_until_ns == 0:
                self._bare_until_ns = now_ns + BARE_NS
            return
        before = self._now.get(job.client, rate / known[0])
        self._now[job.client] = before + 0.3 * (rate / known[0] - before)
        if now_ns - self._stepped_at_ns >= _STEP_NS:
            self._stepped_at_ns = now_ns
            kept = min(self._now.values()) >= KEPT
            self.rate = min(1.0, self.rate + _MORE) if kept else max(LEAST, self.rate * _LESS)
