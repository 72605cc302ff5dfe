"""The rate of work that runs in what production jobs leave, such that they keep `KEPT` of what they have without it.

Source: the feedback of TGS (Wu et al., NSDI 2023) and AntMan (Xiao et al., OSDI 2020); slow start as in TCP (RFC 5681);
batch means (Law, Kelton: "Simulation Modeling and Analysis").
Rules:
- A production job's rate beside harvesting jobs is compared with its rate in the same company without them, which is
  measured for `BARE_NS` now and then, at first until it is known well or for half of `_MANY` blocks.
- Reports are joined to *blocks* of `_BLOCK_NS`.  Steps straddle reports, so that single ones differ by more than a job
  can lose, in both directions.  A loss counts only beyond two standard errors.
- The rate doubles until the first loss.  A loss cuts it by a tenth to a third, the more the larger the loss, and it
  stays for `_HOLD_NS`.  Otherwise it grows by `_MORE` once the reports show that no job loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Final, NamedTuple

from nvshare.scheduler_policies.api import Happened, JobLeft, JobView, Measured

KEPT: Final = 0.99
LEAST: Final = 0.01
FIRST: Final = 0.1
BARE_NS: Final = 300_000_000
REFRESH_NS: Final = 30_000_000_000
_BLOCK_NS: Final = 500_000_000
_HOLD_NS: Final = 3_000_000_000
_MORE: Final = 1.1
_FASTER: Final = 2.0
_LEAST_CUT, _MOST_CUT = 0.9, 0.7
_SLACK: Final = 0.005
"""Standard error of a rate that is known well; a job that keeps `KEPT` less this is not known to lose."""
_MANY: Final = 16
"""Blocks that decide in any case."""
_LEAST_DEVIATION: Final = 0.005
"""A block that differs by so little tells nothing: it may have one request of a server more, or one less."""
_SETTINGS: Final = 256


@dataclass(slots=True)
class _Mean:
    """Mean and variance of the last `_MANY` blocks or so (Welford)."""

    blocks: int = 0
    mean: float = 0.0
    variance: float = 0.0
    at_ns: int = 0
    work: float = 0.0
    span_ns: int = 0
    """The unfinished block."""

    def add(self, rate: float, span_ns: int, now_ns: int) -> bool:
        """A report.  Whether it ends a block."""
        self.at_ns = now_ns
        self.work += rate * span_ns
        self.span_ns += span_ns
        if self.span_ns < _BLOCK_NS:
            return False
        self.blocks = min(self.blocks + 1, _MANY)
        off = self.work / self.span_ns - self.mean
        self.mean += off / self.blocks
        self.variance += (off * (self.work / self.span_ns - self.mean) - self.variance) / self.blocks
        self.work, self.span_ns = 0.0, 0
        return True

    def deviation(self) -> float:
        """Standard deviation of a block, as a part of the mean."""
        if self.blocks < 2 or self.mean <= 0.0:
            return _LEAST_DEVIATION
        return max(_LEAST_DEVIATION, sqrt(self.variance * self.blocks / (self.blocks - 1)) / self.mean)

    @property
    def known_well(self) -> bool:
        """Whether another mean can be compared with it."""
        return self.blocks >= _MANY // 2 or (self.blocks >= 2 and self.deviation() <= _SLACK * sqrt(self.blocks))


class _Kept(NamedTuple):
    """What a job keeps beside harvesting jobs, and its bounds by the standard error."""

    least: float
    mean: float
    most: float
    decides: bool
    """There are so many blocks that the bounds do not matter."""


class Harvest:
    """The controller of one GPU."""

    def __init__(self) -> None:
        self._harvesting: set[int] = set()
        self._base: dict[tuple[int, frozenset[int]], _Mean] = {}
        self._beside: dict[int, tuple[_Mean, _Mean]] = {}
        """At the present rate: without harvesting jobs, and beside them."""
        self._bare_until_ns = 0
        self._hold_until_ns = 0
        self._starting = True
        self.rate = FIRST

    def bare_until_ns(self, now_ns: int) -> int | None:
        """While production jobs are measured without the others: until when."""
        return self._bare_until_ns if now_ns < self._bare_until_ns else None

    def observe(self, happened: Happened, harvests: Callable[[JobView], bool]) -> None:
        """Adapts the rate.  `harvests` says whether a job runs in what others leave."""
        if isinstance(happened, JobLeft):
            self._harvesting.discard(happened.client)
            self._beside.pop(happened.client, None)
            for key in [key for key in self._base if happened.client in key[1]]:
                del self._base[key]
        elif isinstance(happened, Measured):
            job = happened.job
            if harvests(job):
                self._harvesting.add(job.client)
            elif job.progress.rate > 0.0:
                self._harvesting.discard(job.client)
                self._production(job, frozenset(happened.running), happened.span_ns, happened.now_ns)

    def _production(self, job: JobView, running: frozenset[int], span_ns: int, now_ns: int) -> None:
        key, progress = (job.client, running - self._harvesting), job.progress
        base = self._base.get(key)
        if not running & self._harvesting:
            base = self._base.setdefault(key, _Mean())
            base.add(progress.rate, span_ns, now_ns)
            if now_ns < self._bare_until_ns and not base.known_well:
                self._bare_until_ns = now_ns + max(BARE_NS, 4 * span_ns)  # so that the next report comes in time
            while len(self._base) > _SETTINGS:
                del self._base[next(iter(self._base))]
            self._beside.pop(job.client, None)
            return
        if base is None or not base.known_well or now_ns - base.at_ns > REFRESH_NS:
            if now_ns >= self._bare_until_ns + 10 * BARE_NS or self._bare_until_ns == 0:
                self._bare_until_ns = now_ns + BARE_NS
                if base is not None and not base.known_well:
                    del self._base[key]
            return
        known, beside = self._beside.get(job.client, (None, _Mean()))
        beside = beside if known is base else _Mean()
        self._beside[job.client] = (base, beside)
        if beside.add(progress.rate, span_ns, now_ns):
            self._step(now_ns)

    def _step(self, now_ns: int) -> None:
        """Changes the rate once the blocks at the present one suffice."""
        jobs = [_kept(base, beside) for base, beside in self._beside.values() if beside.blocks]
        losses = [1.0 - kept.mean for kept in jobs if (kept.mean if kept.decides else kept.most) < KEPT]
        if losses:
            cut = (1.0 - KEPT) / max(losses)
            self.rate = max(LEAST, self.rate * min(_LEAST_CUT, max(_MOST_CUT, cut)))
            self._hold_until_ns = now_ns + _HOLD_NS
            self._starting = False
        elif self._starting:
            self.rate = min(1.0, self.rate * _FASTER)
        elif now_ns >= self._hold_until_ns and all(kept.least >= KEPT - _SLACK or kept.decides for kept in jobs):
            self.rate = min(1.0, self.rate * _MORE)
        else:
            return
        self._beside.clear()


def _kept(base: _Mean, beside: _Mean) -> _Kept:
    """Two standard errors, four where there is only one block, tell that a job loses."""
    kept = beside.mean / base.mean if base.mean > 0.0 else 1.0
    error = max(base.deviation(), beside.deviation()) * sqrt(1.0 / base.blocks + 1.0 / beside.blocks)
    return _Kept(kept - error, kept, kept + (2.0 if beside.blocks > 1 else 4.0) * error, beside.blocks >= _MANY)
