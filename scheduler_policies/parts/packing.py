"""What programs achieve side by side and in turns, as measured, and which of the two gives more.

A *setting* is the set of clients that hold the GPU together.  The table holds the mean rate of each client in each
setting.  A client's *normalised progress* is its rate over its rate alone.  Turns count what a client achieves during
its turn, divided by the number of those that take turns.
Rules:
- Turns must gain `MARGIN`, and must leave no client with less than it has side by side, or than its equal part.
- A client whose rate changes by more than `CHANGE` in one setting has a new phase: its figures are forgotten, and it is
  measured alone again; at the earliest after 10 s, then 20 s, up to 2 minutes.  So is one measured 2 minutes ago.
- A client is measured alone until a report has come, for `SOLO_NS` at most: in all at most a tenth of the time while
  new ones come, else a hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from nvshare.scheduler_policies.api import Happened, JobClass, JobLeft, JobView, Measured

SOLO_NS: Final = 250_000_000
"""Long enough for a whole report."""
_SOLO_REPORT_NS: Final = 80_000_000
SATURATING: Final = 0.95
"""Busy share from which a program gains by turns."""
MARGIN: Final = 0.02
TOLERANCE: Final = 0.03
CHANGE: Final = 0.25
ENOUGH_NS: Final = 500_000_000
"""A mean over this time counts."""
_MEMORY_NS: Final = 10_000_000_000
_RECENT_NS: Final = 1_000_000_000
_SOONEST_NS: Final = 10_000_000_000
_LATEST_NS: Final = 120_000_000_000
_SETTINGS: Final = 128


class Verdict(NamedTuple):
    """Whether turns are better, by the sums of normalised progress; 0: not known."""

    turns: bool
    together_sum: float = 0.0
    turns_sum: float = 0.0

    def why(self, takers: Sequence[JobView], quantum_ns: int) -> str:
        """For people."""
        names = " and ".join(f"{job.name} (busy {job.progress.busy_alone:.2f})" for job in takers[:3])
        names += f" and {len(takers) - 3} more" if len(takers) > 3 else ""
        together = f"{self.together_sum:.2f} side by side" if self.together_sum else "not measured side by side"
        turns = f"{self.turns_sum:.2f} in turns" if self.turns_sum else "not measured in turns"
        if self.turns:
            return f"{names} take turns of {quantum_ns / 1e6:g} ms: {turns}, {together}"
        return f"{names} run side by side: {together}, {turns}"


@dataclass(slots=True)
class _Mean:
    rate: float = 0.0
    recent: float = 0.0
    span_ns: int = 0

    def add(self, rate: float, span_ns: int) -> None:
        """A report.  `rate` forgets after about 10 s, `recent` after 1 s."""
        self.span_ns += span_ns
        self.rate += (rate - self.rate) * span_ns / min(self.span_ns, _MEMORY_NS)
        self.recent += (rate - self.recent) * min(1.0, span_ns / min(self.span_ns, _RECENT_NS))

    def has_changed(self) -> bool:
        """Whether the last second differs from the mean."""
        return self.span_ns > 2 * _RECENT_NS and abs(self.recent - self.rate) > CHANGE * self.rate


@dataclass(slots=True)
class _Client:
    interactive: bool
    best_effort: bool
    measured_at_ns: int = 0
    busy_alone: float = 0.0
    looked_at_ns: int = -1
    """When it was measured alone; -1: not since its phase began."""
    solo_again_ns: int = 0
    backoff_ns: int = _SOONEST_NS // 2


def is_saturating(job: JobView) -> bool:
    """Whether it keeps the GPU busy alone.  All members of a gang wait for the slowest: each counts."""
    return job.progress.busy_alone >= SATURATING or bool(job.gang)


class Packing:
    """The measurements on one GPU."""

    def __init__(self) -> None:
        self._settings: dict[frozenset[int], dict[int, _Mean]] = {}
        self._clients: dict[int, _Client] = {}
        self._solo = (0, 0, 0)
        """The last client that was measured alone, from when, until when."""

    def solo(self, now_ns: int) -> tuple[int, int] | None:
        """The client that runs alone now to be measured, and until when."""
        client, _, until_ns = self._solo
        return (client, until_ns) if now_ns < until_ns else None

    def judge(self, takers: Sequence[JobView], others: Sequence[JobView], gained: float) -> Verdict:
        """Whether the takers should take turns beside the others.  `gained`: the part of a turn that is no switch."""
        beside = frozenset(job.client for job in others)
        everybody = beside.union(job.client for job in takers)
        together = [self._progress(everybody, job) for job in takers]
        if not all(together) or sum(together) >= 1.0:
            return Verdict(False, sum(together) if all(together) else 0.0)
        part = gained / len(takers)
        turns = [self._progress(beside | {job.client}, job) * part for job in takers]
        if not all(turns):
            return Verdict(True, sum(together))
        equal = 1.0 / len(everybody)
        fair = all(turn >= (1.0 - TOLERANCE) * min(now, equal) for turn, now in zip(turns, together, strict=True))
        better = sum(turns) > sum(together) * (1.0 + MARGIN)
        return Verdict(fair and better, sum(together), sum(turns))

    def observe(self, happened: Happened) -> None:
        """Notes a report, or forgets a client."""
        if isinstance(happened, JobLeft):
            self._clients.pop(happened.client, None)
            self._forget(happened.client)
        elif isinstance(happened, Measured):
            self._measured(happened.job, frozenset(happened.running), happened.now_ns)

    def _measured(self, job: JobView, running: frozenset[int], now_ns: int) -> None:
        job_class, progress = job.rank.job_class, job.progress
        client = self._clients.setdefault(job.client, _Client(False, False))
        client.interactive = job_class is JobClass.INTERACTIVE
        client.best_effort = job_class is JobClass.BEST_EFFORT
        span_ns = min(progress.measured_for_ns, progress.measured_at_ns - client.measured_at_ns)
        client.measured_at_ns = progress.measured_at_ns
        if progress.rate > 0.0 and span_ns > 0:
            means = self._settings.setdefault(running, {})
            mean = means.setdefault(job.client, _Mean())
            mean.add(progress.rate, span_ns)
            if mean.has_changed() and now_ns >= client.solo_again_ns:
                self._forget(job.client)
                client.looked_at_ns = -1
            while len(self._settings) > _SETTINGS:
                del self._settings[next(iter(self._settings))]
        if progress.busy_alone != client.busy_alone:
            if (progress.busy_alone >= SATURATING) != (client.busy_alone >= SATURATING):
                client.backoff_ns = _SOONEST_NS // 2
            client.busy_alone, client.looked_at_ns = progress.busy_alone, now_ns
        solo, since_ns, until_ns = self._solo
        if job.client == solo and now_ns < until_ns and len(running) == 1 and span_ns >= _SOLO_REPORT_NS:
            self._solo, client.looked_at_ns = (solo, since_ns, now_ns), now_ns
        elif not client.best_effort and not job.gang:  # a gang cannot run without its other GPUs
            self._look_alone(job.client, client, now_ns)

    def _look_alone(self, number: int, client: _Client, now_ns: int) -> None:
        """Begins a measurement alone, if others are there and none of them is interactive."""
        if client.looked_at_ns >= 0 and now_ns - client.looked_at_ns < _LATEST_NS:
            return
        others = [
            one for one in self._clients.values() if one is not client and now_ns - one.measured_at_ns < _SOONEST_NS
        ]
        _, since_ns, until_ns = self._solo
        gap_ns = (until_ns - since_ns) * (99 if client.solo_again_ns else 9)
        due_ns = max(client.solo_again_ns, until_ns + gap_ns)
        if not others or now_ns < due_ns or any(one.interactive for one in (client, *others)):
            return
        self._solo = (number, now_ns, now_ns + SOLO_NS)
        client.backoff_ns = min(2 * client.backoff_ns, _LATEST_NS)
        client.solo_again_ns = now_ns + client.backoff_ns

    def _forget(self, client: int) -> None:
        for setting in [setting for setting in self._settings if client in setting]:
            del self._settings[setting]

    def _progress(self, setting: frozenset[int], job: JobView) -> float:
        mean = self._settings.get(setting, {}).get(job.client)
        if mean is None or mean.span_ns < ENOUGH_NS or job.progress.alone_rate <= 0.0:
            return 0.0
        return mean.rate / job.progress.alone_rate
