"""A CUDA program for bench.swap: fills device memory, checks it, and times plain pinned copies; told a line at a time.

Commands: `start`, `alloc BYTES...`, `fill SEED`, `check SEED`, `copies BYTES ROUNDS`; each answers one line of JSON.

May not go here: anything of nvshare.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.workloads.busy import Driver

PATTERN_BYTES = 32 << 20
GIB = 1 << 30

pointer_t, size_t = ctypes.c_uint64, ctypes.c_size_t


class Worker:
    """One context, and what it has allocated."""

    def __init__(self) -> None:
        self._cuda = Driver()
        self._held: list[tuple[int, int]] = []
        self._pattern = os.urandom(PATTERN_BYTES)

    def start(self) -> int:
        """A context."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._cuda("cuInit", 0)
        self._cuda("cuDeviceGet", ctypes.byref(device), 0)
        self._cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._cuda("cuCtxSetCurrent", context)
        return 0

    def alloc(self, *sizes: int) -> int:
        """Nanoseconds that all of them took."""
        began = time.perf_counter_ns()
        for size in sizes:
            self._held.append((self._allocate(size), size))
        return time.perf_counter_ns() - began

    def _allocate(self, size: int) -> int:
        out = pointer_t()
        self._cuda("cuMemAlloc_v2", ctypes.byref(out), size_t(size))
        return out.value

    def _parts(self, seed: int) -> list[tuple[int, int, int]]:
        """(device address, offset in the pattern, bytes): a different piece of the pattern everywhere."""
        found = []
        for number, (pointer, size) in enumerate(self._held):
            done = 0
            while done < size:
                offset = (seed * 65537 + number * 4099 + done // 997) % (PATTERN_BYTES // 2)
                part = min(size - done, PATTERN_BYTES - offset)
                found.append((pointer + done, offset, part))
                done += part
        return found

    def fill(self, seed: int) -> int:
        """Writes everything that is allocated."""
        for address, offset, size in self._parts(seed):
            part = self._pattern[offset : offset + size]
            self._cuda("cuMemcpyHtoD_v2", pointer_t(address), part, size_t(size))
        return len(self._held)

    def check(self, seed: int) -> int:
        """How many parts are not what was written."""
        back = ctypes.create_string_buffer(PATTERN_BYTES)
        wrong = 0
        for address, offset, size in self._parts(seed):
            self._cuda("cuMemcpyDtoH_v2", back, pointer_t(address), size_t(size))
            wrong += memoryview(back).cast("B")[:size] != memoryview(self._pattern)[offset : offset + size]
        return wrong

    def copies(self, size: int, rounds: int) -> dict[str, list[float]]:
        """GiB/s of plain copies between the device and pinned memory: out, in, both at once."""
        hosts, devices, streams = [], [], []
        for _ in range(2):
            host, stream = ctypes.c_void_p(), ctypes.c_void_p()
            self._cuda("cuMemHostAlloc", ctypes.byref(host), size_t(size), 0)
            self._cuda("cuStreamCreate", ctypes.byref(stream), 1)
            hosts.append(host)
            streams.append(stream)
            devices.append(pointer_t(self._allocate(size)))

        def timed(out: bool, into: bool) -> float:
            began = time.perf_counter_ns()
            if out:
                self._cuda("cuMemcpyDtoHAsync_v2", hosts[0], devices[0], size_t(size), streams[0])
            if into:
                self._cuda("cuMemcpyHtoDAsync_v2", devices[1], hosts[1], size_t(size), streams[1])
            for stream in streams:
                self._cuda("cuStreamSynchronize", stream)
            return size * (out + into) / GIB / ((time.perf_counter_ns() - began) / 1e9)

        timed(True, True)
        found = {"out": [], "in": [], "duplex": []}  # type: dict[str, list[float]]
        for _ in range(rounds):
            found["out"].append(timed(True, False))
            found["in"].append(timed(False, True))
            found["duplex"].append(timed(True, True))
        for host, device, stream in zip(hosts, devices, streams, strict=True):
            self._cuda("cuMemFreeHost", host)
            self._cuda("cuMemFree_v2", device)
            self._cuda("cuStreamDestroy_v2", stream)
        return found


def main() -> None:
    """Until the input ends."""
    worker = Worker()
    commands: dict[str, Callable[..., Any]] = {
        "start": worker.start, "alloc": worker.alloc, "fill": worker.fill,
        "check": worker.check, "copies": worker.copies,
    }  # fmt: skip
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        print(json.dumps(commands[name](*map(int, arguments))), flush=True)


if __name__ == "__main__":
    main()
