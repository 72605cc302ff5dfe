"""What a card measures of itself: how busy it is, its temperature, its power and its memory.

A thread asks NVML, whose calls take milliseconds and may block for long, and only while somebody looks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from nvshare.coordinator.system.devices import memory_figures, nvml

PERIOD_S: Final = 0.5
WANTED_S: Final = 5.0
"""After so long without a look the thread rests, and figures of so long ago are not shown."""


@dataclass(frozen=True, slots=True)
class CardSensors:
    """Figures of one GPU; None: it does not tell."""

    busy: float | None = None
    """Part of the last moments in which a kernel ran."""
    temperature_c: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    used_bytes: int | None = None
    """Memory in use, contexts and programs without the hook included; of an integrated GPU, by the whole machine."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


_READS: Final[dict[str, Callable[[Any, Any], float]]] = {
    "busy": lambda n, card: n.nvmlDeviceGetUtilizationRates(card).gpu / 100,
    "temperature_c": lambda n, card: n.nvmlDeviceGetTemperature(card, n.NVML_TEMPERATURE_GPU),
    "power_watts": lambda n, card: n.nvmlDeviceGetPowerUsage(card) / 1000,
    "power_limit_watts": lambda n, card: n.nvmlDeviceGetEnforcedPowerLimit(card) / 1000,
    "used_bytes": lambda n, card: memory_figures(n, card).used_bytes,
}


def read_sensors(uuid: str) -> CardSensors:
    """The figures of one GPU now; within `nvml()`."""
    import pynvml

    found: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError):
        card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for name, read in _READS.items():
            with contextlib.suppress(pynvml.NVMLError):  # a MIG instance, or a board without this sensor
                found[name] = read(pynvml, card)
    return CardSensors(**found)


class Sensors:
    """The newest figures of the node's GPUs."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._latest: dict[str, CardSensors] = {}
        self._latest_s = self._wanted_s = float("-inf")
        self._look = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self, uuid: str) -> CardSensors:
        """The newest figures of a GPU, at once; empty ones until the thread has some."""
        self._wanted_s = time.monotonic()
        self._look.set()
        fresh = self._wanted_s - self._latest_s < WANTED_S
        return self._latest.get(uuid, CardSensors()) if fresh else CardSensors()

    def close(self) -> None:
        """The thread ends by itself; NVML may block it."""
        self._ended.set()
        self._look.set()

    def _run(self) -> None:
        import pynvml

        while self._look.wait() and not self._ended.is_set():
            with contextlib.suppress(pynvml.NVMLError), nvml():
                while time.monotonic() - self._wanted_s < WANTED_S and not self._ended.is_set():
                    self._latest = {uuid: read_sensors(uuid) for uuid in self._uuids}
                    self._latest_s = time.monotonic()
                    self._ended.wait(PERIOD_S)
            self._look.clear()
