"""Notices programs that compute on the cards without the hook although `NVSHARE_ENABLE` asks for it.

NVML lists the computing processes.  A thread asks it rarely, because a call takes milliseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from nvshare.coordinator.system.devices import nvml
from nvshare.coordinator.system.processes import ProcessFacts, read_process

log: Final = logging.getLogger("nvshare")

PERIOD_S: Final = 60.0
REMEDY: Final = "install nvshare in the environment of its Python, or start it with nvshare-run"


def computing_processes() -> list[tuple[int, int]]:
    """(GPU index, process id) of the processes with a compute context, by NVML; empty without a driver."""
    import pynvml

    try:
        with nvml():
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            found = [(index, pynvml.nvmlDeviceGetComputeRunningProcesses(each)) for index, each in enumerate(handles)]
    except pynvml.NVMLError:
        return []
    return [(index, process.pid) for index, processes in found for process in processes]


def unhooked_processes(computing: Iterable[tuple[int, int]]) -> list[tuple[int, ProcessFacts]]:
    """Computing processes that run without the hook, as far as this user may know."""
    known = ((gpu, read_process(process_id)) for gpu, process_id in computing)
    return [(gpu, facts) for gpu, facts in known if facts is not None and facts.readable and not facts.hooked]


class UnhookedWatch:
    """Logs each such program once."""

    def __init__(self, look: Callable[[], list[tuple[int, ProcessFacts]]]) -> None:
        self._look = look
        self._known: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unhooked", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The thread ends by itself; NVML may block it."""
        self._ended.set()

    def turn(self) -> None:
        """One look."""
        found = {facts.process_id: (gpu, facts) for gpu, facts in self._look()}
        for process_id in found.keys() - self._known:
            gpu, facts = found[process_id]
            if facts.has_set("NVSHARE_ENABLE") and not facts.has_set("NVSHARE_DISABLE"):
                text = "%s uses GPU %d without the hook although NVSHARE_ENABLE is set; %s"
                log.warning(text, facts, gpu, REMEDY)
        self._known = set(found)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.turn()
