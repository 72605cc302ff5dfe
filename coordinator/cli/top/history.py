"""How busy the GPUs were in the last minutes, from the replies that `top` has seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

KEPT_S: Final = 300
_LEVELS: Final = {True: " ▁▂▃▄▅▆▇█", False: " .:-=+*#@"}


def busy(gpu: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_ns: int) -> float | None:
    """The part of the time in which kernels ran; where the card does not say, in which a program had a lease."""
    measured: float | None = gpu["sensors"]["busy"]
    if measured is None and before is not None and elapsed_ns > 0:
        return min(1.0, max(0.0, float(gpu["held_ns"] - before["held_ns"]) / elapsed_ns))
    return measured


class History:
    """The last `KEPT_S` seconds of each GPU."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] | None = None
        self._samples: dict[str, deque[tuple[float, float]]] = {}

    def add(self, status: Mapping[str, Any]) -> None:
        before = {} if self._last is None else {gpu["uuid"]: gpu for gpu in self._last["gpus"]}
        elapsed_ns = 0 if self._last is None else status["now_ns"] - self._last["now_ns"]
        now_s = status["now_ns"] / 1e9
        for gpu in status["gpus"]:
            samples = self._samples.setdefault(gpu["uuid"], deque())
            part = busy(gpu, before.get(gpu["uuid"]), elapsed_ns)
            if part is not None:
                samples.append((now_s, part))
            while samples and samples[0][0] < now_s - KEPT_S:
                samples.popleft()
        self._last = status

    def graph(self, uuid: str, cells: int, *, unicode: bool) -> tuple[str, int]:
        """A character for each equal part of the time, and the seconds that they show: a minute, or more as it goes.

        A part without a sample is blank.
        """
        samples = self._samples.get(uuid)
        if not samples or self._last is None or cells <= 0:
            return "", 0
        now_s = self._last["now_ns"] / 1e9
        whole_s = next(s for s in (60, 120, KEPT_S, 2 * KEPT_S) if s >= now_s - samples[0][0])
        parts: list[list[float]] = [[] for _ in range(cells)]
        for at_s, part in samples:
            parts[min(cells - 1, max(0, int(cells * (1 - (now_s - at_s) / whole_s))))].append(part)
        levels = _LEVELS[unicode]
        top = len(levels) - 1
        return "".join(levels[max(1, round(top * sum(p) / len(p)))] if p else " " for p in parts), whole_s
