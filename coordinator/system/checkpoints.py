"""The driver's checkpoints of other processes, which park programs (engine/parking/parking.py).

The driver wants the user of the process, or root, and its calls take up to seconds.  So one helper process for each
user makes them: `python -m nvshare.coordinator.system.checkpoints`.  It starts before the first program's memory leaves
and is kept, because a program that wakes should not wait for Python.  It reads lines
`{"process_id": P, "do": "save" | "restore"}`, for a restoration on another GPU with `"home": UUID, "target": UUID`, and
answers each by `{"process_id": P, "error": "...", "gpu": "...", "lost": false}` (`Outcome`).  It looks at the state of
the process first, so each request may be repeated, also after the death of a helper or a coordinator in the middle.

The driver exchanges GPUs: a restoration on another one names all that the kernel module has, each once as the old and
once as the new one.

The calls are `cuda.core.checkpoint`'s, which the extra `park` brings.

Non-goals: when a program is parked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nvshare.coordinator.system.devices import nvml, text_of
from nvshare.coordinator.system.extras import install_command
from nvshare.coordinator.units import format_size

log: Final = logging.getLogger("nvshare")

DRIVER: Final = 570
"""NVIDIA's first one with checkpoints."""
LOCK_MS: Final = 2000
"""The program is idle, so the driver gets its lock at once."""
DEADLINE_S: Final = 120.0
"""For one checkpoint or restoration: some GiB of contexts and pinned memory."""
ROOM_S: Final = 2.0
ROOM_LOOK_S: Final = 0.01
SPARE_BYTES: Final = 64 << 20
UNKNOWN_BYTES: Final = 1 << 30
"""Of a process that another helper has saved, or that NVML does not list: it moves only where there is plenty."""
EXTRA: Final = f"parking needs more packages where the coordinator runs; install them: {install_command('park')}"


def cannot_park() -> str:
    """Why no program of this machine can be parked; "": some may be."""
    import pynvml

    if any(importlib.util.find_spec(name) is None for name in ("cuda", "cuda.core", "cuda.bindings")):
        return EXTRA
    try:
        with nvml():
            version = text_of(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""
    if int(version.partition(".")[0]) < DRIVER:
        return f"NVIDIA's driver is {version}; checkpoints need {DRIVER} or newer"
    return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request.  No error is success."""

    error: str = ""
    gpu: str = ""
    """Where a restored process is, if it is not where it was."""
    lost: bool = False
    """The process cannot be parked or brought back any more; its calls fail."""
    unsure: bool = False
    """Nobody knows what the driver has done, or still does."""


class LostError(Exception):
    """The driver has failed in the midst of a process's memory."""

    def __init__(self) -> None:
        super().__init__("the driver has failed in its midst, and cannot repeat it")


# --- in the coordinator -----------------------------------------------------------------------------------------------


class Checkpoints:
    """The helpers, by user.  `report(process_id, outcome)` is called in a thread of this object."""

    def __init__(self, environment: Mapping[str, str], report: Callable[[int, Outcome], None]) -> None:
        self._environment = dict(environment)
        self._report = report
        self._lock = threading.Lock()
        self._helpers: dict[int, subprocess.Popen[str]] = {}
        self._pending: dict[int, tuple[int, threading.Timer]] = {}  # process id -> its user

    def expect(self, user_id: int) -> None:
        """Starts this user's helper, if there is none: a request will follow."""
        with self._lock, contextlib.suppress(OSError, subprocess.SubprocessError):  # else the request says so
            self._helper(user_id)

    def ask(self, do: str, process_id: int, user_id: int, home: str = "", target: str = "") -> None:
        """Has the process saved, or restored on `target`.  The result comes by `report`, within `DEADLINE_S`."""
        request = {"process_id": process_id, "do": do, "home": home, "target": target}
        timer = threading.Timer(DEADLINE_S, self._too_long, (process_id, user_id))
        timer.daemon = True
        with self._lock:
            self._pending[process_id] = (user_id, timer)
            try:
                helper = self._helper(user_id)
                assert helper.stdin is not None
                helper.stdin.write(json.dumps(request) + "\n")
                helper.stdin.flush()
            except (OSError, subprocess.SubprocessError) as error:
                del self._pending[process_id]
                failed = process_id, Outcome(f"no helper: {error}")
                threading.Thread(target=self._report, args=failed, daemon=True).start()
                return
        timer.start()

    def close(self) -> None:
        """Ends the helpers.  What they have parked stays parked, until a coordinator wakes it."""
        with self._lock:
            helpers, self._helpers = list(self._helpers.values()), {}
        for helper in helpers:
            helper.kill()
            helper.wait()

    def _helper(self, user_id: int) -> subprocess.Popen[str]:
        """Under the lock.  Raises OSError and SubprocessError."""
        helper = self._helpers.get(user_id)
        if helper is None or helper.poll() is not None:
            helper = self._helpers[user_id] = self._start(user_id)
        return helper

    def _start(self, user_id: int) -> subprocess.Popen[str]:
        other: dict[str, Any] = {}
        if os.geteuid() == 0 and user_id != 0:
            import pwd

            try:
                other = {"user": user_id, "group": pwd.getpwuid(user_id).pw_gid, "extra_groups": []}
            except KeyError:
                other = {"user": user_id, "group": user_id, "extra_groups": []}
        command = [sys.executable, "-m", "nvshare.coordinator.system.checkpoints"]
        helper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=self._environment,
            start_new_session=True,
            **other,
        )
        threading.Thread(target=self._read, args=(helper, user_id), name="checkpoints", daemon=True).start()
        return helper

    def _read(self, helper: subprocess.Popen[str], user_id: int) -> None:
        assert helper.stdout is not None
        for line in helper.stdout:
            answer = json.loads(line)
            self._answered(answer.pop("process_id"), Outcome(**answer))
        helper.wait()
        with self._lock:
            lost = [process_id for process_id, (user, _) in self._pending.items() if user == user_id]
        for process_id in lost:
            self._answered(process_id, Outcome(f"its helper ended with code {helper.returncode}", unsure=True))

    def _answered(self, process_id: int, outcome: Outcome) -> None:
        with self._lock:
            pending = self._pending.pop(process_id, None)
        if pending is not None:
            pending[1].cancel()
            self._report(process_id, outcome)

    def _too_long(self, process_id: int, user_id: int) -> None:
        log.warning("process %d: the driver's checkpoint took longer than %g s", process_id, DEADLINE_S)
        with self._lock:
            helper = self._helpers.get(user_id)
        if helper is not None:
            helper.kill()  # `_read` reports what is pending
        why = f"its helper waited longer than {DEADLINE_S:g} s for the driver"
        self._answered(process_id, Outcome(why, unsure=True))


# --- in the helper ----------------------------------------------------------------------------------------------------


def card_memory(process_id: int) -> dict[str, int]:
    """Memory that a process has on each card where it has a context, by UUID, as far as NVML says."""
    import pynvml

    found = {}
    with contextlib.suppress(pynvml.NVMLError), nvml():
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if each.pid == process_id:
                    found[str(pynvml.nvmlDeviceGetUUID(handle))] = int(each.usedGpuMemory or 0)
    return found


def await_room(had: Mapping[str, int]) -> None:
    """Waits until the cards have room for what the process had: drivers do not repeat a restoration that lacked it.

    Raises MemoryError after `ROOM_S`.
    """
    import pynvml

    end_s = time.monotonic() + ROOM_S
    while True:
        lacking = {}
        with contextlib.suppress(pynvml.NVMLError), nvml():
            for uuid, size in had.items():
                free = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free
                if free < size + SPARE_BYTES:
                    lacking[uuid] = size + SPARE_BYTES - free
        if not lacking:
            return
        if time.monotonic() >= end_s:
            raise MemoryError(", ".join(f"{uuid} lacks {format_size(size)}" for uuid, size in lacking.items()))
        time.sleep(ROOM_LOOK_S)


def exchange(home: str, target: str) -> dict[str, str]:
    """All GPUs by the UUIDs that the driver takes; these two change places.  Raises NVMLError."""
    import pynvml

    with nvml():
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        pairs = {str(pynvml.nvmlDeviceGetUUID(handle)): "" for handle in handles}
    for uuid in pairs:
        pairs[uuid] = {home: target, target: home}.get(uuid, uuid)
    return {old.removeprefix("GPU-"): new.removeprefix("GPU-") for old, new in pairs.items()}


def restore(process: Any, memory: Mapping[str, int], home: str, target: str) -> str:
    """Brings the process back, on `target` if there is one.  Returns where it is, "" for where it was.

    `memory`: what it had, as far as is known.  Raises what cuda.core does, MemoryError and NVMLError.
    """
    if process.state == "running":  # perhaps a helper has died: the lock waits for the step that it has begun
        with contextlib.suppress(Exception):
            process.lock(LOCK_MS)
    if process.state == "checkpointed":
        if target:
            await_room({target: memory.get(home) or UNKNOWN_BYTES})
            process.restore(gpu_mapping=exchange(home, target))
        else:
            await_room(memory)
            process.restore()
        found = {target}
    elif process.state == "failed":
        raise LostError
    else:  # a helper or a coordinator has died: it may have been moved before
        found = set(card_memory(process.pid))
    if process.state == "locked":
        process.unlock()
    return found.pop() if len(found) == 1 else ""


def perform(process: Any, request: Mapping[str, Any], had: dict[int, dict[str, int]]) -> str:
    """One request, from whatever state the process is in.  After a failure to save it runs.

    `had`: by process id, the memory that saved processes had.  Returns and raises as `restore`.
    """
    if request["do"] == "restore":
        return restore(process, had.get(process.pid, {}), request["home"], request["target"])
    had[process.pid] = card_memory(process.pid)
    try:
        if process.state == "running":
            process.lock(LOCK_MS)
        if process.state == "locked":
            process.checkpoint()
    except Exception as error:
        if process.state == "failed":
            raise LostError from error
        if process.state == "locked":
            process.unlock()
        raise
    return ""


def calls() -> Any:
    """The module of the calls, ready for use.  Raises ImportError."""
    from cuda.bindings import driver
    from cuda.core import checkpoint

    driver.cuInit(0)  # a restoration wants it in the caller
    return checkpoint


def main() -> None:
    """Serves requests until standard input ends."""
    with contextlib.suppress(ImportError):
        calls()  # the first request need not wait for it
    printing = threading.Lock()
    had: dict[int, dict[str, int]] = {}

    def serve(request: dict[str, Any]) -> None:
        gpu, lost = "", False
        try:
            gpu = perform(calls().Process(request["process_id"]), request, had)
            error = ""
        except ImportError:
            error = EXTRA
        except Exception as failure:  # the driver's, of many types
            error, lost = str(failure) or repr(failure), isinstance(failure, LostError)
        with printing:
            answer = {"process_id": request["process_id"], "error": error[:200], "gpu": gpu, "lost": lost}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    threads: list[threading.Thread] = []
    for line in sys.stdin:
        thread = threading.Thread(target=serve, args=(json.loads(line),))
        thread.start()
        threads = [each for each in threads if each.is_alive()] + [thread]


if __name__ == "__main__":
    main()
