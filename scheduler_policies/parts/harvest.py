"""The rate of work that runs in what production jobs leave, such that they keep `KEPT` of what they have without it.

Source: the feedback of TGS (Wu et al., NSDI 2023) and AntMan (Xiao et al., OSDI 2020); slow start, additive
increase and multiplicative decrease as in TCP (RFC 5681).
Rules:
- A production job's rate beside harvesting jobs is compared with its rate in the same company without them, which is
  measured for `BARE_NS` now and then, at first longer where reports differ.
- A loss counts only beyond the standard error of both: reports of a server or of a loop of long steps are noisy.
- The rate grows while no job loses: by a quarter until the first loss, then by `_MORE`.  After a loss it falls, and
  stays for `_HOLD_NS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Final

from nvshare.scheduler_policies.api import Happened, JobLeft, JobView, Measured

KEPT: Final = 0.99
LEAST: Final = 0.01
FIRST: Final = 0.1
BARE_NS: Final = 300_000_000
REFRESH_NS: Final = 30_000_000_000
_HOLD_NS: Final = 5_000_000_000
_MORE: Final = 0.02
_FASTER: Final = 1.25
_LESS: Final = 0.9
_SLACK: Final = 0.01
_FEW, _SOME, _MANY = 3, 5, 40
"""Reports that can show a loss, that allow a faster start, and that decide in any case."""
_SETTINGS: Final = 256


@dataclass(slots=True)
class _Mean:
    """Mean and variance of the last `_MANY` reports or so (Welford)."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    at_ns: int = 0

    def add(self, value: float, now_ns: int) -> None:
        self.at_ns = now_ns
        self.count = min(self.count + 1, _MANY)
        off = value - self.mean
        self.mean += off / self.count
        self.variance += (off * (value - self.mean) - self.variance) / self.count

    def error(self) -> float:
        """Standard error of the mean, as a part of it."""
        return sqrt(self.variance / self.count) / self.mean if self.count and self.mean > 0.0 else 0.0


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
            elif job.progress.rate > 0.0 and job.progress.measured_for_ns > 0:
                self._harvesting.discard(job.client)
                self._production(job, frozenset(happened.running), happened.now_ns)

    def _production(self, job: JobView, running: frozenset[int], now_ns: int) -> None:
        key, rate = (job.client, running - self._harvesting), job.progress.rate
        base = self._base.get(key)
        if not running & self._harvesting:
            base = self._base.setdefault(key, _Mean())
            base.add(rate, now_ns)
            if self._harvesting and base.count < _MANY // 2 and base.error() > _SLACK:
                self._bare_until_ns = now_ns + BARE_NS
            while len(self._base) > _SETTINGS:
                del self._base[next(iter(self._base))]
            self._beside.pop(job.client, None)
            return
        if base is None or now_ns - base.at_ns > REFRESH_NS:
            if now_ns >= self._bare_until_ns + 10 * BARE_NS or self._bare_until_ns == 0:
                self._bare_until_ns = now_ns + BARE_NS
            return
        known, beside = self._beside.get(job.client, (None, _Mean()))
        beside = beside if known is base else _Mean()
        self._beside[job.client] = (base, beside)
        beside.add(rate, now_ns)
        self._step(now_ns)

    def _step(self, now_ns: int) -> None:
        """Changes the rate once the reports at the present one suffice."""
        verdicts = [_loses(base, beside, self._starting) for base, beside in self._beside.values()]
        if any(verdicts):
            self.rate = max(LEAST, self.rate * (1.0 / _FASTER if self._starting else _LESS))
            self._hold_until_ns = now_ns + _HOLD_NS
            self._starting = False
        elif None in verdicts or now_ns < self._hold_until_ns:
            return
        else:
            self.rate = min(1.0, self.rate * _FASTER if self._starting else self.rate + _MORE)
        self._beside.clear()


def _loses(base: _Mean, beside: _Mean, starting: bool) -> bool | None:
    """Whether a job has lost more than it may.  None: not known yet."""
    kept, error = beside.mean / base.mean, base.error() + beside.error()
    if beside.count < _FEW:
        return None
    if kept + 3.0 * error < KEPT:
        return True
    if kept - error >= KEPT - _SLACK or (starting and beside.count >= _SOME):
        return False
    return kept + error < KEPT if beside.count >= _MANY else None
