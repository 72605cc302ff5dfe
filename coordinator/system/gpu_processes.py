"""What NVML says of processes on the GPUs: their memory, and which of them run without the hook.

Threads ask it, because a call takes milliseconds: rarely for programs without the hook, on demand for memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Final

from nvshare.coordinator.system.devices import memory_figures, nvml
from nvshare.coordinator.system.processes import ProcessFacts, read_process

log: Final = logging.getLogger("nvshare")

PERIOD_S: Final = 60.0
PAUSE_S: Final = 0.25
"""Between two readings of memory, which delay the programs' own calls to the driver."""
UNKNOWN: Final = 1 << 62
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
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
    """Logs each program once that runs without the hook although `NVSHARE_ENABLE` asks for it."""

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


def in_initial_pid_namespace() -> bool:
    """Whether NVML's process ids are those that this process knows."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE  # noqa: PTH116 (as lsns reads it)
    except OSError:
        return False


def read_memory(uuid: str, *, by_process: bool) -> tuple[dict[str, int], int]:
    """Memory by process id, and other used memory, `UNKNOWN` if NVML does not say.

    The latter is of processes that are not listed, and of an integrated GPU's machine.
    """
    import pynvml

    try:
        with nvml():
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            used, processes = memory_figures(pynvml, handle).used_bytes, []
            if by_process:
                with contextlib.suppress(pynvml.NVMLError_NotSupported):  # Jetson, as reported
                    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return {}, UNKNOWN
    listed = {str(each.pid): int(each.usedGpuMemory) for each in processes if each.usedGpuMemory is not None}
    return listed, max(0, used - sum(listed.values()))


class CardMemory:
    """Answers each `ask` by a call of `report(uuid, by_process, unlisted_bytes)` in its thread."""

    def __init__(self, report: Callable[[str, dict[str, int], int], None], *, by_process: bool) -> None:
        self._report = report
        self._by_process = by_process
        self._asked: SimpleQueue[str] = SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="card-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, uuid: str) -> None:
        """Has the figures of a GPU reported."""
        self._asked.put(uuid)

    def read(self, uuid: str) -> tuple[dict[str, int], int]:
        """The figures of now, as `read_memory` has them."""
        return read_memory(uuid, by_process=self._by_process)

    def close(self) -> None:
        """The thread ends by itself; NVML may block it."""
        self._ended.set()
        self._asked.put("")

    def _run(self) -> None:
        while (uuid := self._asked.get()) and not self._ended.is_set():
            self._report(uuid, *self.read(uuid))
            self._ended.wait(PAUSE_S)
