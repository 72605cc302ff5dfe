"""For programs that the tests start: the CUDA driver by ctypes, with errors as exceptions.

These programs are like applications: nothing of the product is imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import uuid
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from ctypes import c_float as c_float  # the programs take these from here
from ctypes import c_uint as c_uint
from typing import Any

PTX = b""".version 8.0
.target sm_90
.visible .entry nvs_busy(.param .u64 n) { ret; }
.visible .entry nvs_part(.param .u64 n, .param .u64 demand) { ret; }
.visible .entry other() { ret; }
"""


class CudaError(RuntimeError):
    """A driver call did not return CUDA_SUCCESS."""

    def __init__(self, function: str, result: int) -> None:
        super().__init__(f"{function} returned {result}")
        self.result = result


class Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp, of pinned memory on device 0."""

    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", Location), ("flags", c_int)]


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs"""

    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_uint * 15)]


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair"""

    _fields_ = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs"""

    _fields_ = [("pairs", ctypes.POINTER(GpuPair)), ("count", ctypes.c_uint), ("reserved", ctypes.c_uint * 13)]


def say(*words: object) -> None:
    """One line to the test."""
    print(*words, flush=True)


class Driver:
    """`driver.cuMemAlloc_v2(...)` raises CudaError; `driver.result("cuMemAlloc_v2", ...)` returns the number."""

    def __init__(self, init: bool = True, device: int = 0) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        if init:
            self.cuInit(0)
            self.context = c_void_p()
            self.cuDevicePrimaryCtxRetain(byref(self.context), device)
            self.cuCtxSetCurrent(self.context)

    def result(self, function: str, *arguments: Any) -> int:
        return int(self.library[function](*arguments))

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("cu"):
            raise AttributeError(function)

        def call(*arguments: Any) -> None:
            result = self.result(function, *arguments)
            if result != 0:
                raise CudaError(function, result)

        return call

    def allocate(self, size: int) -> c_uint64:
        pointer = c_uint64()
        self.cuMemAlloc_v2(byref(pointer), c_size_t(size))
        return pointer

    def managed(self, size: int) -> c_uint64:
        pointer = c_uint64()
        self.cuMemAllocManaged(byref(pointer), c_size_t(size), 1)
        return pointer

    def used(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.cuMemGetInfo_v2(byref(free), byref(total))
        return total.value - free.value

    def stream(self, flags: int = 1) -> c_void_p:
        stream = c_void_p()
        self.cuStreamCreate(byref(stream), flags)
        return stream

    def event(self) -> c_void_p:
        event = c_void_p()
        self.cuEventCreate(byref(event), 0)
        return event

    def kernel(self, name: bytes = b"nvs_busy") -> c_void_p:
        module, function = c_void_p(), c_void_p()
        self.cuModuleLoadData(byref(module), PTX + b"\0")
        self.cuModuleGetFunction(byref(function), module, name)
        return function

    def busy(self, function: c_void_p, stream: c_void_p | None, duration_ns: int, demand: int = 0) -> int:
        """Launches nvs_busy, or nvs_part with a demand in millionths; the result of the launch."""
        values = (c_uint64(duration_ns), c_uint64(demand))
        parameters = (c_void_p * 2)(*(ctypes.cast(byref(value), c_void_p) for value in values))
        return self.result("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None)

    @contextlib.contextmanager
    def held(self, stream: c_void_p) -> Iterator[None]:
        """Work that is submitted to the stream inside the block starts when the block ends."""
        entered, leave = threading.Event(), threading.Event()

        def block(_data: object) -> None:
            entered.set()
            leave.wait()

        self.blocks = [*getattr(self, "blocks", []), ctypes.CFUNCTYPE(None, c_void_p)(block)]
        self.cuLaunchHostFunc(stream, self.blocks[-1], None)
        try:
            if not entered.wait(30):
                raise TimeoutError("the stream did not reach the block")
            yield
        finally:
            leave.set()

    def read(self, pointer: c_uint64, size: int, offset: int = 0) -> bytes:
        target = ctypes.create_string_buffer(size)
        self.cuMemcpyDtoH_v2(target, c_uint64(pointer.value + offset), c_size_t(size))
        return target.raw

    def write(self, pointer: c_uint64, data: bytes) -> None:
        self.cuMemcpyHtoD_v2(pointer, data, c_size_t(len(data)))

    def physical(self, size: int) -> c_uint64:
        handle = c_uint64()
        properties = AllocationProp(1, 1, Location(1, 0))
        self.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_uint64(0))
        return handle

    def reserve(self, size: int) -> c_uint64:
        address = c_uint64()
        self.cuMemAddressReserve(byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return address

    def map(self, address: c_uint64, size: int, handle: c_uint64) -> None:
        """Maps, and gives device 0 access."""
        self.cuMemMap(address, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        self.cuMemSetAccess(address, c_size_t(size), byref(AccessDesc(Location(1, 0), 3)), c_size_t(1))

    def uuid(self, device: int = 0) -> str:
        """UUID of a device, as NVML writes it."""
        raw = (ctypes.c_ubyte * 16)()
        self.cuDeviceGetUuid_v2(raw, device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def state(self, pid: int) -> int:
        """CUprocessState of a process: 0 running, 1 locked, 2 checkpointed, 3 failed."""
        state = c_int(-1)
        self.cuCheckpointProcessGetState(pid, byref(state))
        return state.value

    def step(self, name: str, pid: int, *words: str) -> int:
        """One step of a checkpoint; its words: the timeout of a Lock in milliseconds, OLD=NEW UUIDs of a Restore."""
        arguments = None
        if name == "Lock" and words:
            arguments = byref(LockArgs(int(words[0])))
        if name == "Restore" and words:
            named = [[uuid.UUID(side[4:]).bytes for side in word.split("=")] for word in words]
            pairs = (GpuPair * len(named))(*(GpuPair(*map((ctypes.c_ubyte * 16).from_buffer_copy, n)) for n in named))
            arguments = byref(RestoreArgs(pairs, len(named)))
        return self.result(f"cuCheckpointProcess{name}", pid, arguments)

    def instantiate(self, graph: c_void_p) -> c_void_p:
        executable = c_void_p()
        self.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0))
        return executable


def wait_for_line() -> None:
    """Waits for a line from the test."""
    sys.stdin.readline()
