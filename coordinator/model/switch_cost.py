"""The time that past switches of a GPU's lease waited for memory, and a forecast of the next ones.

A measured wait is exact, and of other times: of programs that have ended, or of a first eviction, whose host memory had
to be made.  What must move next is known beforehand, but not how long it takes.  So the quantum follows measured waits,
within bounds that the next moves set (memory/quantum.py).  All figures are 0 while nothing waits or would have to.

Non-goals: which bytes move (memory/forecast.py), the quantum (memory/quantum.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

WAITS: Final = 16
"""Switches whose waits are averaged with equal weight: all of them together should cost their share."""
RATES: Final = 5
TURNS: Final = 32
ASSUMED_RATE: Final = 40.0
"""Bytes a nanosecond that a switch moves each way, while fewer than `ENOUGH_RATES` are measured."""
ENOUGH_RATES: Final = 3
SLOWER_AT_FIRST: Final = 4.0
"""First moves, for which host memory must be made, are at most this much slower than the link."""
SAMPLE_BYTES: Final = 16 << 20
"""The smallest move that measures the speed of the link."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that the next client lacks at the end of one turn, and those that cannot come during the turn."""

    lease_id: int
    missing_bytes: int
    exposed_bytes: int


@dataclass(slots=True, eq=False)
class SwitchCost:
    """Costs on one GPU.  Changed by memory/switching.py and memory/forecast.py."""

    waits_ns: deque[int] = field(default_factory=lambda: deque(maxlen=WAITS))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES))
    forecasts: deque[Forecast] = field(default_factory=lambda: deque(maxlen=TURNS))

    def add_wait(self, wait_ns: int, moved_bytes: int) -> None:
        """A switch is over that moved this much in the busier direction.  O(1) while no switch ever waits."""
        if wait_ns == 0 and not any(self.waits_ns):
            self.waits_ns.clear()
            return
        self.waits_ns.append(wait_ns)
        if moved_bytes >= SAMPLE_BYTES and wait_ns > 0:
            self.rates.append(moved_bytes / wait_ns)

    @property
    def average_ns(self) -> float:
        """Average wait of a switch for memory."""
        return sum(self.waits_ns) / len(self.waits_ns) if self.waits_ns else 0.0

    @property
    def rate(self) -> float:
        """Bytes a nanosecond in a switch that nothing slows down: the best of the last ones."""
        if not self.rates:
            return ASSUMED_RATE
        best = max(self.rates)
        return best if len(self.rates) >= ENOUGH_RATES else max(best, min(ASSUMED_RATE, SLOWER_AT_FIRST * best))

    def forecast(self, lease_id: int, missing_bytes: int, exposed_bytes: int) -> None:
        """Sets the forecast of the switch at the end of this lease; replaces an earlier one."""
        if self.forecasts and self.forecasts[-1].lease_id == lease_id:
            self.forecasts.pop()
        self.forecasts.append(Forecast(lease_id, missing_bytes, exposed_bytes))

    def clear_forecasts(self) -> None:
        """Everything fits."""
        self.forecasts.clear()

    def bounds_ns(self, turns: int) -> tuple[float, float]:
        """The average cost of this many switches: if everything that can be hidden is, and if nothing is."""
        if not self.forecasts:
            return 0.0, 0.0
        last = list(self.forecasts)[-max(1, turns) :]
        each = len(last) * self.rate
        return sum(f.exposed_bytes for f in last) / each, sum(f.missing_bytes for f in last) / each

    def hidden_bytes(self) -> int:
        """Bytes that must move during the present turn, if no grant is to wait for them."""
        return self.forecasts[-1].missing_bytes - self.forecasts[-1].exposed_bytes if self.forecasts else 0
