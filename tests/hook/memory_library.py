"""The hook's memory side alone, over a driver of a few functions whose inner calls can be made to fail.

Invariants: what `held` says is the driver's own count, independent of what the hook thinks.  May not go here: tests.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("memory", "memory/backends", "memory/quota", "memory/records", "swap", "ipc", "host")
"""Taken whole; and single files:"""
SOURCES: Final = (
    *(f"hooks/memory/{name}.c" for name in ("ipc", "memory", "pool", "swap", "vmm", "vmm_share")),
    *("base/process/thread.c", "contexts/dead.c", "inflight/marks.c"),
)

MIB: Final = 1 << 20
GIB: Final = 1 << 30
OUT_OF_MEMORY: Final = 2
INVALID_VALUE: Final = 1
INVALID_CONTEXT: Final = 201
UNKNOWN: Final = 999
DEVICE, MANAGED, SWAP = 0, 1, 2


def compile_c(target: Path, *sources: Path, options: tuple[str, ...] = ()) -> Path:
    """Compiles against the hook's headers; a failure shows the compiler's words."""
    finder = [sys.executable, str(ROOT / "client_hook" / "find_cuda_header.py")]
    include = subprocess.run(finder, capture_output=True, text=True, check=True).stdout.strip()
    compiler = shutil.which("cc") or "gcc"
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-unused-parameter", "-Wno-cast-function-type")
    command = [compiler, "-std=gnu11", "-O1", "-g", *warnings, *options, "-isystem", include]
    command += ["-I", str(ROOT / "client_hook" / "src"), "-I", str(ROOT / "tests" / "hook" / "c")]
    command += [*map(str, sources), "-o", str(target), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def memory_sources() -> list[Path]:
    """What makes up the library: the hook's own files and the stand-ins."""
    source = ROOT / "client_hook" / "src"
    hook = [path for folder in FOLDERS for path in sorted((source / folder).glob("*.c"))]
    hook += [source / name for name in SOURCES]
    return [*(ROOT / "tests" / "hook" / "c" / name for name in ("memory_fake.c", "memory_stand_in.c")), *hook]


def compile_library(target: Path) -> Path:
    """A shared object for `Memory`.

    Its thread-local variables must not take of the little that a process has for libraries loaded late, because
    tests load many copies.
    """
    return compile_c(target, *memory_sources(), options=("-fPIC", "-shared", "-Dtls_model(model)="))


class Usage(ctypes.Structure):
    """nvs_usage"""

    _fields_ = [(name, ctypes.c_uint64) for name in ("allocated", "resident", "pinned", "host")]
    allocated: int
    resident: int
    pinned: int
    host: int


class Prefetch(ctypes.Structure):
    """fake_prefetch"""

    _fields_ = [("pointer", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("out", ctypes.c_bool)]


class Property(ctypes.Structure):
    """The head of CUmemAllocationProp and of CUmemPoolProps, and room for the rest."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("rest", ctypes.c_uint64 * 8),
    ]


class Descriptor(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR"""

    _fields_ = [
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("format", ctypes.c_int),
        ("channels", ctypes.c_uint),
        ("flags", ctypes.c_uint),
    ]


class Memory:
    """CUDA calls as an application makes them; each returns the CUresult, with what came out of it."""

    def __init__(self, library: Path, mode: int) -> None:
        self.c = ctypes.CDLL(str(library))
        for name in ("fake_held", "nvs_memory_evict", "nvs_memory_restore", "nvs_now_ns"):
            getattr(self.c, name).restype = ctypes.c_uint64
        self.c.fake_set_mode(mode)
        self.c.fake_set_short(ctypes.c_bool(mode == DEVICE))
        self.limits()

    def held(self) -> int:
        return int(self.c.fake_held())

    def usage(self) -> Usage:
        out = Usage()
        self.c.nvs_memory_usage(0, ctypes.byref(out))
        return out

    def limits(self, limit: int = 0, capacity: int = 0, reserve: bool = False) -> None:
        self.c.nvs_memory_set_limits(0, ctypes.c_uint64(limit), ctypes.c_uint64(capacity), ctypes.c_bool(reserve))

    def alloc(self, size: int) -> tuple[int, int]:
        out = ctypes.c_uint64()
        return self.c.cuMemAlloc_v2(ctypes.byref(out), ctypes.c_size_t(size)), out.value

    def alloc_managed(self, size: int) -> tuple[int, int]:
        out = ctypes.c_uint64()
        return self.c.cuMemAllocManaged(ctypes.byref(out), ctypes.c_size_t(size), 1), out.value

    def alloc_pitch(self, width: int, height: int) -> tuple[int, int, int]:
        out, pitch = ctypes.c_uint64(), ctypes.c_size_t()
        result = self.c.cuMemAllocPitch_v2(
            ctypes.byref(out), ctypes.byref(pitch), ctypes.c_size_t(width), ctypes.c_size_t(height), 4
        )
        return result, out.value, pitch.value

    def alloc_async(self, size: int, stream: int = 0) -> tuple[int, int]:
        out = ctypes.c_uint64()
        return self.c.cuMemAllocAsync(ctypes.byref(out), ctypes.c_size_t(size), ctypes.c_void_p(stream)), out.value

    def pool(self, *, handle_types: int = 0, location_type: int = 1) -> int:
        out, props = ctypes.c_uint64(), Property(type=1, handle_types=handle_types, location_type=location_type)
        assert self.c.cuMemPoolCreate(ctypes.byref(out), ctypes.byref(props)) == 0
        return out.value

    def alloc_from(self, pool: int, size: int) -> tuple[int, int]:
        out = ctypes.c_uint64()
        function = self.c.cuMemAllocFromPoolAsync
        return function(ctypes.byref(out), ctypes.c_size_t(size), ctypes.c_uint64(pool), None), out.value

    def free(self, pointer: int) -> int:
        return int(self.c.cuMemFree_v2(ctypes.c_uint64(pointer)))

    def free_async(self, pointer: int, stream: int = 0) -> int:
        return int(self.c.cuMemFreeAsync(ctypes.c_uint64(pointer), ctypes.c_void_p(stream)))

    def reap(self) -> bool:
        return bool(self.c.nvs_memory_reap(0, ctypes.c_bool(False)) & 0xFF)

    def create(self, size: int, location_type: int = 1) -> tuple[int, int]:
        out, prop = ctypes.c_uint64(), Property(type=1, location_type=location_type)
        result = self.c.cuMemCreate(ctypes.byref(out), ctypes.c_size_t(size), ctypes.byref(prop), ctypes.c_uint64(0))
        return result, out.value

    def release(self, handle: int) -> int:
        return int(self.c.cuMemRelease(ctypes.c_uint64(handle)))

    def map(self, pointer: int, size: int, handle: int) -> int:
        n = ctypes.c_uint64
        return int(self.c.cuMemMap(n(pointer), n(size), n(0), n(handle), n(0)))

    def unmap(self, pointer: int, size: int) -> int:
        return int(self.c.cuMemUnmap(ctypes.c_uint64(pointer), ctypes.c_size_t(size)))

    def retain(self, pointer: int) -> tuple[int, int]:
        out = ctypes.c_uint64()
        return self.c.cuMemRetainAllocationHandle(ctypes.byref(out), ctypes.c_void_p(pointer)), out.value

    def array(self, width: int, height: int) -> tuple[int, int]:
        out, of = ctypes.c_uint64(), Descriptor(width=width, height=height, format=0x20, channels=1)
        return self.c.cuArray3DCreate_v2(ctypes.byref(out), ctypes.byref(of)), out.value

    def array_destroy(self, array: int) -> int:
        return int(self.c.cuArrayDestroy(ctypes.c_uint64(array)))

    def info(self) -> tuple[int, int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        return self.c.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), free.value, total.value

    def device_total(self) -> int:
        total = ctypes.c_size_t()
        assert self.c.cuDeviceTotalMem_v2(ctypes.byref(total), 0) == 0
        return total.value

    def move(self, out: bool, size: int) -> tuple[int, int]:
        """(nvs_status, bytes moved) of an evict or restore, as the agent's thread calls it: with no context."""
        moved = ctypes.c_uint64()
        self.context(0)
        function = self.c.nvs_memory_evict if out else self.c.nvs_memory_restore
        status = function(0, ctypes.c_uint64(size), None, ctypes.byref(moved)) & 0xFFFFFFFF
        self.context(0x100)
        return status, moved.value

    def context(self, context: int) -> None:
        self.c.fake_set_context(ctypes.c_uint64(context))
        self.c.fake_set_short(ctypes.c_bool(True))

    def destroy_context(self, context: int) -> None:
        self.c.fake_destroy_context(ctypes.c_uint64(context))

    def fail(self, call: int, result: int = UNKNOWN) -> None:
        self.c.fake_fail(call, result)

    def calls(self) -> int:
        return int(self.c.fake_calls())

    def prefetches(self) -> list[tuple[int, int, bool]]:
        count = ctypes.c_uint.in_dll(self.c, "fake_prefetch_count")
        table = (Prefetch * 256).in_dll(self.c, "fake_prefetches")
        found = [(p.pointer, p.bytes, p.out) for p in table[: count.value]]
        count.value = 0
        return found

    def reserves_asked(self) -> list[int]:
        count = ctypes.c_uint.in_dll(self.c, "fake_reserves").value
        return list((ctypes.c_uint64 * 64).in_dll(self.c, "fake_reserve_asked")[:count])
