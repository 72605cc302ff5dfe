"""memory_program.py with questions to NVML."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pynvml
from memory_program import COMMANDS, main  # type: ignore[import-not-found]  # beside this program

u64 = ctypes.c_uint64
libdl = ctypes.CDLL(None)
libdl.dlvsym.restype = libdl.dlsym.restype = ctypes.c_void_p


def handle(index: int) -> Any:
    """Handle of an NVML device; 100 and up: MIG instances of the first."""
    pynvml.nvmlInit()
    if index >= 100:
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(pynvml.nvmlDeviceGetHandleByIndex(0), index - 100)
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def nvml(index: int) -> list[int]:
    """[total, free, used] by the first version, then [total, reserved, free, used] by the second."""
    first = pynvml.nvmlDeviceGetMemoryInfo(handle(index))
    second = pynvml.nvmlDeviceGetMemoryInfo(handle(index), pynvml.nvmlMemory_v2)
    return [first.total, first.free, first.used, second.total, second.reserved, second.free, second.used]


def processes(index: int, version: int) -> list[list[int]]:
    """[process id, bytes] of each one that computes; version 4: the list of details."""
    names = {1: "nvmlDeviceGetComputeRunningProcesses", 2: "nvmlDeviceGetComputeRunningProcesses_v2"}
    if version == 1:

        class First(ctypes.Structure):
            _fields_ = [("pid", ctypes.c_uint), ("usedGpuMemory", u64)]

        device, count, room = handle(index), ctypes.c_uint(64), (First * 64)()
        function = pynvml._nvmlGetFunctionPointer(names[1])
        assert function(device, ctypes.byref(count), room) == 0
        return [[one.pid, one.usedGpuMemory] for one in room[: count.value]]
    if version == 2:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle(index))
    elif version == 4:
        kind, mode = pynvml.nvmlProcessDetailList_v1, pynvml.NVML_PROCESS_MODE_COMPUTE
        found = pynvml.nvmlDeviceGetRunningProcessDetailList(handle(index), kind, mode)
    else:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle(index))
    return [[one.pid, one.usedGpuMemory] for one in found]


def paths() -> list[int]:
    """nvmlDeviceGetMemoryInfo's total by each way to the function: library handle, program handle, next, dlvsym."""
    device = handle(0)
    library = ctypes.c_void_p(ctypes.CDLL("libnvidia-ml.so.1", mode=ctypes.RTLD_GLOBAL)._handle)
    name = b"nvmlDeviceGetMemoryInfo"
    addresses = [
        libdl.dlsym(library, name),
        libdl.dlsym(ctypes.c_void_p(libdl._handle), name),
        libdl.dlsym(ctypes.c_void_p(0), name),
        libdl.dlsym(ctypes.c_void_p(-1), name),
    ]
    totals = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    for address in addresses:
        memory = pynvml.c_nvmlMemory_t()
        assert kind(address)(device, ctypes.byref(memory)) == 0
        totals.append(memory.total)
    return totals


def absent() -> list[bool]:
    """Whether NVML's functions are there before NVML is loaded, and one that there never was."""
    default = ctypes.c_void_p(0)
    names = (b"nvmlDeviceGetMemoryInfo", b"nvmlDeviceGetUUID", b"nvmlNoSuch", b"nv", b"n", b"")
    return [libdl.dlsym(default, name) is not None for name in names]


def failing() -> list[int]:
    """Answers of NVML to a wrong version, to an invalid handle, and before it was initialised."""
    pynvml.nvmlInit()
    memory = pynvml.c_nvmlMemory_v2_t()
    memory.version = 77
    second = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo_v2")
    first = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo")
    wrong = [second(handle(0), ctypes.byref(memory)), first(ctypes.c_void_p(8), ctypes.byref(pynvml.c_nvmlMemory_t()))]
    device = handle(0)
    while True:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            break
    return [*wrong, first(device, ctypes.byref(pynvml.c_nvmlMemory_t()))]


COMMANDS |= {
    "nvml": nvml,
    "processes": processes,
    "paths": paths,
    "absent": absent,
    "failing": failing,
    "pid": os.getpid,
}

if __name__ == "__main__":
    main()
