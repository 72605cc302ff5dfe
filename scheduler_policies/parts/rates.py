"""Mean rates of programs by *setting*: the set of clients that hold the GPU together.

Rules:
- A mean forgets after about 10 s in its setting, and is void 2 minutes after its last report.
- A program whose rate changes by more than `CHANGE` in one setting has a new phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHANGE: Final = 0.25
ENOUGH_NS: Final = 500_000_000
"""A mean over this time counts."""
VOID_NS: Final = 120_000_000_000
_MEMORY_NS: Final = 10_000_000_000
_RECENT_NS: Final = 1_000_000_000
_SETTINGS: Final = 128


@dataclass(slots=True)
class _Mean:
    rate: float = 0.0
    recent: float = 0.0
    span_ns: int = 0
    at_ns: int = 0

    def add(self, rate: float, span_ns: int, now_ns: int) -> None:
        """A report.  `recent` forgets after 1 s."""
        if now_ns - self.at_ns > VOID_NS:
            self.span_ns = 0
        self.at_ns = now_ns
        self.span_ns += span_ns
        self.rate += (rate - self.rate) * span_ns / min(self.span_ns, _MEMORY_NS)
        self.recent += (rate - self.recent) * min(1.0, span_ns / min(self.span_ns, _RECENT_NS))

    def has_changed(self) -> bool:
        """Whether the last second differs from the mean."""
        return self.span_ns > 2 * _RECENT_NS and abs(self.recent - self.rate) > CHANGE * self.rate


class Rates:
    """The means on one GPU."""

    def __init__(self) -> None:
        self._settings: dict[frozenset[int], dict[int, _Mean]] = {}

    def add(self, setting: frozenset[int], client: int, rate: float, span_ns: int, now_ns: int) -> bool:
        """Notes a report.  Returns whether the program has a new phase."""
        mean = self._settings.setdefault(setting, {}).setdefault(client, _Mean())
        mean.add(rate, span_ns, now_ns)
        while len(self._settings) > _SETTINGS:
            del self._settings[next(iter(self._settings))]
        return mean.has_changed()

    def mean(self, setting: frozenset[int], client: int, now_ns: int) -> float:
        """A program's rate in a setting; 0: not known (any more)."""
        mean = self._settings.get(setting, {}).get(client)
        known = mean is not None and mean.span_ns >= ENOUGH_NS and now_ns - mean.at_ns <= VOID_NS
        return mean.rate if mean is not None and known else 0.0

    def begin_anew(self, setting: frozenset[int]) -> None:
        """Drops the means of one setting."""
        self._settings.pop(setting, None)

    def forget(self, client: int) -> None:
        """Drops all settings with the client: the others' rates beside it are void too."""
        for setting in [setting for setting in self._settings if client in setting]:
            del self._settings[setting]
