"""Solo probes: short windows in which a batch program runs without other batch programs, to be measured.

Rules:
- A program is probed when it is new beside others, when it has a new phase, and 2 minutes after the last probe.  What
  it did alone before others came does not count: that was often its start-up.  For the same reason the first one waits
  until it has worked for a second without a pause of a second.
- A probe lasts until a report of a time has come in which the program's queue was full, `LONGEST_NS` at most.
- The first probe of a program waits for as long as the probe before it lasted.  First probes take `BURST_NS` at once,
  and a tenth of the time after that.
- Later probes take a hundredth of the time.  Those of one program are 10 s apart, then 20 s, up to 2 minutes.  A probe
  that brought nothing is repeated after half a second, then 1 s, and so on.
  A program that has paused begins anew.
- Active interactive programs run during a probe.  The rate beside them stands for the rate alone as long as they run,
  and the probe is repeated.
- Interactive and best-effort programs are not probed.  Nor are members of gangs: alone on one GPU such a program waits
  for its other GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nvshare.scheduler_policies.api import JobClass, JobView
from nvshare.scheduler_policies.parts.rates import CHANGE

LONGEST_NS: Final = 350_000_000
"""Long enough for a drain, `_REFILL_NS` and a whole report."""
BURST_NS: Final = 1_000_000_000
_REPORT_NS: Final = 80_000_000
_REFILL_NS: Final = 50_000_000
"""From its beginning alone a program fills its queue, and its rate is not what it keeps up."""
_RETRY_NS: Final = 500_000_000
_PAUSED_NS: Final = 1_000_000_000
_STEADY_NS: Final = 1_000_000_000
_SOONEST_NS: Final = 10_000_000_000
_LATEST_NS: Final = 120_000_000_000
_UNKNOWN: Final = -1


@dataclass(slots=True)
class _Client:
    job_class: JobClass = JobClass.BATCH
    gang: str = ""
    reported_at_ns: int = 0
    working_since_ns: int = 0
    """Since then it has reported without a pause."""
    probed_at_ns: int = _UNKNOWN
    """When a probe has measured it; -1: not since its phase began."""
    is_new: bool = True
    """No probe has measured it."""
    busy_alone: float = 0.0
    busy_rate: float = 0.0
    """Its rate when `busy_alone` was measured; 0: not since its phase began."""
    beside: frozenset[int] = frozenset()
    beside_rate: float = 0.0
    """Its rate at the last probe beside interactive programs, and which."""
    again_ns: int = 0
    """When it may be probed again."""
    pause_ns: int = _RETRY_NS

    @property
    def left_out(self) -> bool:
        """It does not run during a probe of another one, so that the probe can tell something."""
        return self.job_class is not JobClass.INTERACTIVE and not self.gang


class SoloProbes:
    """The probes on one GPU."""

    def __init__(self) -> None:
        self._clients: dict[int, _Client] = {}
        self._window = (0, 0, 0)
        """The client of the last probe, from when, until when."""
        self._first_ns = self._first_at_ns = 0
        """Time of first probes, less a tenth of the time since; computed when."""

    def window(self, now_ns: int) -> tuple[int, int] | None:
        """The client that is probed now, and until when."""
        client, _, until_ns = self._window
        return (client, until_ns) if now_ns < until_ns else None

    def wants(self, client: int) -> bool:
        """Whether the busy share should be measured as soon as the program runs alone."""
        known = self._clients.get(client)
        return known is None or known.busy_rate == 0.0

    def rate(self, client: int, setting: frozenset[int]) -> float:
        """The stand-in for the rate alone in a setting, beside its interactive programs; 0: not known."""
        known = self._clients.get(client)
        here = {other for other in setting if other != client and self._is_interactive(other)}
        return known.beside_rate if known is not None and here and known.beside == here else 0.0

    def known_beside(self, client: int) -> bool:
        """Whether it has been probed beside interactive programs."""
        return client in self._clients and self._clients[client].beside_rate > 0.0

    def left(self, client: int) -> None:
        """Forgets a client."""
        self._clients.pop(client, None)

    def new_phase(self, client: int, now_ns: int) -> bool:
        """The program does something else now.  False: it says so too often."""
        known = self._clients[client]
        if now_ns < known.again_ns:
            return False
        known.probed_at_ns, known.busy_rate = _UNKNOWN, 0.0
        return True

    def report(self, job: JobView, running: frozenset[int], span_ns: int, now_ns: int) -> bool:
        """Ends a probe, or begins one.  Returns whether a probe has measured the program alone."""
        client = self._clients.setdefault(job.client, _Client())
        if now_ns - client.reported_at_ns > _PAUSED_NS:
            client.working_since_ns = now_ns
            if client.probed_at_ns == _UNKNOWN:
                client.again_ns, client.pause_ns = now_ns, _RETRY_NS
        client.job_class, client.gang, client.reported_at_ns = job.rank.job_class, job.gang, now_ns
        rate, busy = job.progress.rate, job.progress.busy_alone
        beside = running - {job.client}
        if busy != client.busy_alone:
            client.busy_alone, client.busy_rate = busy, rate if busy else 0.0
            client.probed_at_ns = client.probed_at_ns if busy else _UNKNOWN
        is_whole = span_ns >= _REPORT_NS and job.progress.measured_for_ns - span_ns >= _REFILL_NS
        if is_whole and all(self._is_interactive(other) for other in beside) and (beside or busy):
            return self._alone(job.client, client, beside, rate, now_ns)
        if job.rank.job_class is JobClass.BATCH and not job.gang:
            self._begin(job.client, client, now_ns)
        return False

    def _is_interactive(self, client: int) -> bool:
        return client in self._clients and self._clients[client].job_class is JobClass.INTERACTIVE

    def _alone(self, number: int, client: _Client, beside: frozenset[int], rate: float, now_ns: int) -> bool:
        """A whole report without other batch programs.  Ends the client's probe."""
        seen, since_ns, until_ns = self._window
        probing = seen == number and now_ns < until_ns
        if probing:
            self._window = (seen, since_ns, now_ns)
            self._first_ns -= (until_ns - now_ns) if client.is_new else 0
        if beside:
            client.beside, client.beside_rate = beside, rate
            return False
        if probing:
            client.again_ns = max(client.again_ns, now_ns + _SOONEST_NS)
            client.pause_ns = max(client.pause_ns, 2 * _SOONEST_NS)
            client.probed_at_ns, client.is_new = now_ns, False
        if probing or client.busy_rate == 0.0:
            client.busy_rate = rate
        elif abs(rate - client.busy_rate) > CHANGE * client.busy_rate:
            client.busy_rate = 0.0
        return probing

    def _begin(self, number: int, client: _Client, now_ns: int) -> None:
        """Begins a probe if one is due and other programs are there that it leaves out."""
        if client.probed_at_ns >= 0 and now_ns - client.probed_at_ns < _LATEST_NS:
            return
        since_ns = now_ns - _SOONEST_NS
        if not any(
            other is not client and other.left_out and other.reported_at_ns > since_ns
            for other in self._clients.values()
        ):
            return
        _, since_ns, until_ns = self._window
        first = client.is_new
        if first and now_ns - client.working_since_ns < _STEADY_NS:
            return
        self._first_ns = max(0, self._first_ns - (now_ns - self._first_at_ns) // 10)
        self._first_at_ns = now_ns
        pause_ns = (until_ns - since_ns) * (1 if first else 99)
        if now_ns < max(client.again_ns, until_ns + pause_ns) or (first and self._first_ns >= BURST_NS):
            return
        if first:
            self._first_ns += LONGEST_NS
        self._window = (number, now_ns, now_ns + LONGEST_NS)
        client.again_ns = now_ns + client.pause_ns
        client.pause_ns = min(2 * client.pause_ns, _LATEST_NS)
