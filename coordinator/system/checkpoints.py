"""The driver's checkpoint of one other process, which parks a program (engine/parking/parking.py).

The driver wants the user of the process, or root, and its calls take up to seconds.  So a helper process of that user
makes them: `python -m nvshare.coordinator.system.checkpoints PROCESS_ID USER_ID`.  Started by root it becomes that
user, with the groups that the kernel shows of the program: a directory service may block, and knows none of a pod.
It says `ready`.  Each line of its standard input is a request, which it answers by one line; it ends with its input.

    save                    ->  done                 or  failed TEXT: the process runs
    restore [HOME TARGET]   ->  done [GPU]           or  failed TEXT: the process is still off the GPUs
                                                     or  lost TEXT: it cannot be parked or brought back any more

GPU is where the process is, if it is not where it was.  The helper looks at the state of the process first, so each
request may be repeated, also after the death of a helper or a coordinator in the middle.

The driver exchanges GPUs: a restoration on another one names all that the kernel module has, each once as the old and
once as the new one.

It uses few modules: each parked program has a helper (docs/decisions/parking.md).

Non-goals: when a program is parked; what of the answers is believed (daemon/checkpoint_processes.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pynvml

from nvshare.coordinator.system.devices import nvml
from nvshare.coordinator.units import format_size

DRIVER: Final = 570
"""NVIDIA's first one with checkpoints."""
LOCK_MS: Final = 2000
"""The program is idle, so the driver gets its lock at once."""
ROOM_S: Final = 2.0
ROOM_LOOK_S: Final = 0.01
SPARE_BYTES: Final = 64 << 20
UNKNOWN_BYTES: Final = 1 << 30
"""Of a process that another helper has saved, or that NVML does not list: it moves only where there is plenty."""
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
"""CUprocessState"""
NOT_SUPPORTED: Final = 801
REFUSED: Final = "the driver refuses it: it has managed memory or memory of another process, or is a client of MPS"
_PR_SET_DUMPABLE: Final = 4


def cannot_park() -> str:
    """Why no program of this machine can be parked; "": some may be."""
    try:
        with nvml():
            version: str = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return ""
    if int(version.partition(".")[0]) < DRIVER:
        return f"NVIDIA's driver is {version}; checkpoints need {DRIVER} or newer"
    return ""


# --- the driver's calls -----------------------------------------------------------------------------------------------


class DriverError(Exception):
    """A call of the driver has failed."""


class LostError(Exception):
    """The driver has failed in the midst of a process's memory."""


class _LockArgs(ctypes.Structure):
    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_uint * 15)]


class _GpuPair(ctypes.Structure):
    _fields_ = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [("pairs", ctypes.POINTER(_GpuPair)), ("count", ctypes.c_uint), ("reserved", ctypes.c_uint * 13)]


class Process:
    """Another process, as the driver sees it.  Its methods raise DriverError."""

    def __init__(self, process_id: int) -> None:
        """Raises OSError without a driver."""
        self.process_id = process_id
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)  # a restoration wants it in the caller

    @property
    def state(self) -> int:
        found = ctypes.c_int()
        self.step("GetState", ctypes.byref(found))
        return found.value

    def lock(self) -> None:
        self.step("Lock", ctypes.byref(_LockArgs(LOCK_MS)))

    def restore(self, gpus: Mapping[bytes, bytes]) -> None:
        """`gpus`: the UUID of each old one, and of the new one in its place; empty: all stay."""
        uuid = ctypes.c_ubyte * 16
        pairs = (_GpuPair * len(gpus))(*(_GpuPair(uuid(*old), uuid(*new)) for old, new in gpus.items()))
        self.step("Restore", ctypes.byref(_RestoreArgs(pairs, len(gpus))) if gpus else None)

    def step(self, name: str, argument: object = None) -> None:
        """One of the driver's functions for checkpoints."""
        self._call(f"cuCheckpointProcess{name}", self.process_id, argument)

    def _call(self, name: str, *arguments: object) -> None:
        code: int = self._cuda[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            said = REFUSED if code == NOT_SUPPORTED else (text.value or b"unknown").decode()
            raise DriverError(f"{name}: error {code}, {said}")


# --- requests ---------------------------------------------------------------------------------------------------------


def card_memory(process_id: int) -> dict[str, int]:
    """Memory that a process has on each card where it has a context, by UUID, as far as NVML says."""
    found = {}
    with contextlib.suppress(pynvml.NVMLError), nvml():
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if each.pid == process_id:
                    found[pynvml.nvmlDeviceGetUUID(handle)] = int(each.usedGpuMemory or 0)
    return found


def await_room(had: Mapping[str, int]) -> None:
    """Waits until the cards have room for what the process had: drivers do not repeat a restoration that lacked it.

    Raises MemoryError after `ROOM_S`.
    """
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


def exchange(home: str, target: str) -> dict[bytes, bytes]:
    """All GPUs by the UUIDs that the driver takes; these two change places.  Raises NVMLError."""
    with nvml():
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    places = {uuid: {home: target, target: home}.get(uuid, uuid) for uuid in uuids}
    return {_driver_uuid(old): _driver_uuid(new) for old, new in places.items()}


def _driver_uuid(uuid: str) -> bytes:
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))


def restore(process: Process, memory: Mapping[str, int], home: str = "", target: str = "") -> str:
    """Brings the process back, on `target` if there is one.  Returns where it is, "" for where it was.

    `memory`: what it had, as far as is known.  Raises DriverError, LostError, MemoryError and NVMLError.
    """
    if process.state == RUNNING:  # perhaps a helper has died: the lock waits for the step that it has begun
        with contextlib.suppress(DriverError):
            process.lock()
    if process.state == CHECKPOINTED:
        await_room({target: memory.get(home) or UNKNOWN_BYTES} if target else memory)
        process.restore(exchange(home, target) if target else {})
        found = {target}
    elif process.state == FAILED:
        raise LostError
    else:  # a helper or a coordinator has died: it may have been moved before
        found = set(card_memory(process.process_id))
    if process.state == LOCKED:
        process.step("Unlock")
    return found.pop() if len(found) == 1 else ""


def save(process: Process) -> None:
    """Takes the process off the GPUs; after a failure it runs.  Raises DriverError and LostError."""
    try:
        if process.state == RUNNING:
            process.lock()
        if process.state == LOCKED:
            process.step("Checkpoint")
    except DriverError as error:
        if process.state == FAILED:
            raise LostError from error
        if process.state == LOCKED:
            process.step("Unlock")
        raise


# --- the helper -------------------------------------------------------------------------------------------------------


def become(user_id: int, process_id: int) -> None:
    """Takes the user and the groups of the process for good.  Raises OSError."""
    lines = Path(f"/proc/{process_id}/status").read_text(errors="replace").split("\n")
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    if int(facts["Uid"].split()[1]) != user_id:
        raise PermissionError(f"process {process_id} is another one now")
    Path("/proc/self/oom_score_adj").write_text("0")  # a service's protection is not the user's
    os.setgroups([int(group) for group in facts["Groups"].split()])
    os.setgid(int(facts["Gid"].split()[0]))
    os.setuid(user_id)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # else its files in /proc, which the driver reads, are root's


def serve(process_id: int, user_id: int) -> None:
    """Answers requests until standard input ends."""
    if os.geteuid() == 0 and user_id != 0:
        become(user_id, process_id)
    with contextlib.suppress(OSError, DriverError):
        Process(process_id)  # the first request need not wait for it
    memory: dict[str, int] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            do, *gpus = line.split()
            process = Process(process_id)
            if do == "save":
                memory = card_memory(process_id)
                save(process)
                answer = "done"
            else:
                answer = f"done {restore(process, memory, *gpus)}"
        except LostError:
            answer = "lost the driver has failed in its midst, and cannot repeat it"
        except (DriverError, MemoryError, OSError, pynvml.NVMLError) as error:
            answer = f"failed {error}"
        print(answer[:200].strip(), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
