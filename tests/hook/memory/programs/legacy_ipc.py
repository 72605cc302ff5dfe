"""cuIpcGetMemHandle and its kin, for the programs that tests start: ctypes only.

Non-goals: anything that imports the product; these programs see what an application sees.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from between_gpus import Driver, current  # type: ignore[import-not-found]  # beside this program
from graphs_and_pools import made  # type: ignore[import-not-found]  # as above

u64 = ctypes.c_uint64
cuda = Driver()


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("content", ctypes.c_ubyte * 64)]


def ipc_get(pointer: int) -> list[int]:
    """[CUresult, the handle as a number]"""
    handle = IpcHandle()
    return [int(cuda.cuIpcGetMemHandle(ctypes.byref(handle), u64(pointer))), int.from_bytes(handle, "little")]


def ipc_open(handle: int, flags: int) -> list[int]:
    """[CUresult, pointer]"""
    opened: list[int] = made("cuIpcOpenMemHandle_v2", IpcHandle.from_buffer_copy(handle.to_bytes(64, "little")), flags)
    return opened


def ipc_cycle(handle: int, rounds: int) -> list[int]:
    """Opens and closes: how often that failed, and how many descriptors and mappings the process has more."""

    def count() -> int:
        mappings = Path("/proc/self/maps").read_text(encoding="ascii").count("simulated_gpu_memory")
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) + mappings

    def once() -> bool:
        result, pointer = ipc_open(handle, 1)
        return result == 0 and cuda.cuIpcCloseMemHandle(u64(pointer)) == 0

    failed = not once()
    before = count()
    return [failed + sum(not once() for _ in range(rounds)), count() - before]


def ipc_storm(handle: int, threads: int, rounds: int) -> int:
    """Threads that open and close the same; how often that failed."""
    failed = []
    context = ctypes.c_void_p(current())

    def run() -> None:
        cuda.cuCtxSetCurrent(context)
        for number in range(rounds):
            result, pointer = ipc_open(handle, 1)
            if result != 0 or cuda.cuIpcCloseMemHandle(u64(pointer)) != 0:
                failed.append(number)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return len(failed)


COMMANDS: dict[str, Callable[..., Any]] = {
    "ipc_get": ipc_get,
    "ipc_null": lambda pointer: cuda.cuIpcGetMemHandle(None, u64(pointer)),
    "ipc_open": ipc_open,
    "ipc_close": lambda pointer: cuda.cuIpcCloseMemHandle(u64(pointer)),
    "ipc_cycle": ipc_cycle,
    "ipc_storm": ipc_storm,
    "ipc": lambda pointer: cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), u64(pointer)),
}
