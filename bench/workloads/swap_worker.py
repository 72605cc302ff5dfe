"""A CUDA program for the swap benchmarks: fills device memory, checks it, times pinned copies.

It is told a line at a time.

Commands: `start`, `alloc BYTES...`, `fill SEED`, `check`, `renew SEED BYTES...`,
`stream OUT BYTES ROUNDS BEGIN_NS`; each answers one line of JSON.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nvshare.bench.workloads.busy import Driver

PATTERN_BYTES = 32 << 20
PIECE_BYTES = 64 << 20
GIB = 1 << 30

pointer_t, size_t = ctypes.c_uint64, ctypes.c_size_t
memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, size_t)


@dataclass(slots=True)
class Held:
    """An allocation, and which piece of the pattern it begins with."""

    pointer: int
    size: int
    seed: int


class Worker:
    """One context, and what it has allocated."""

    def __init__(self) -> None:
        self._cuda = Driver()
        self._held: list[Held] = []
        self._pattern = ctypes.create_string_buffer(os.urandom(PATTERN_BYTES), PATTERN_BYTES)
        self._back = ctypes.create_string_buffer(PATTERN_BYTES)

    def start(self) -> int:
        """A context."""
        self._cuda.use()
        return 0

    def alloc(self, *sizes: int) -> int:
        """Nanoseconds that all of them took."""
        began = time.perf_counter_ns()
        for size in sizes:
            self._held.append(Held(self._cuda.memory(size).value, size, 0))
        return time.perf_counter_ns() - began

    def _parts(self, held: Held) -> Iterator[tuple[int, int, int]]:
        """(device address, address in the pattern, bytes): a different piece of the pattern everywhere."""
        start = ctypes.addressof(self._pattern)
        done = 0
        while done < held.size:
            offset = (held.seed * 4099 + done // 997) % (PATTERN_BYTES // 2)
            part = min(held.size - done, PATTERN_BYTES - offset)
            yield held.pointer + done, start + offset, part
            done += part

    def _fill(self, held: Held, seed: int) -> None:
        held.seed = seed
        for address, piece, size in self._parts(held):
            self._cuda("cuMemcpyHtoD_v2", pointer_t(address), ctypes.c_void_p(piece), size_t(size))

    def fill(self, seed: int) -> int:
        """Writes everything that is allocated."""
        for number, held in enumerate(self._held):
            self._fill(held, seed * 65537 + number)
        return len(self._held)

    def check(self) -> int:
        """Number of parts that differ from the written bytes."""
        wrong = 0
        back = ctypes.addressof(self._back)
        for held in self._held:
            for address, piece, size in self._parts(held):
                self._cuda("cuMemcpyDtoH_v2", self._back, pointer_t(address), size_t(size))
                wrong += memcmp(back, piece, size) != 0
        return wrong

    def renew(self, seed: int, *sizes: int) -> int:
        """Gives as many allocations back as there are sizes, makes and fills others; bytes that are held now."""
        dice = random.Random(seed)
        for number, size in enumerate(sizes):
            gone = self._held.pop(dice.randrange(len(self._held)))
            self._cuda("cuMemFree_v2", pointer_t(gone.pointer))
            new = Held(self._cuda.memory(size).value, size, 0)
            self._fill(new, seed * 65537 + number)
            self._held.append(new)
        return sum(held.size for held in self._held)

    def stream(self, out: int, size: int, rounds: int, begin_ns: int) -> list[int]:
        """[begin, end] of copying so much so often in one direction, in pieces; not before `begin_ns`, monotonic."""
        host, stream, device = ctypes.c_void_p(), ctypes.c_void_p(), self._cuda.memory(size)
        self._cuda("cuMemHostAlloc", ctypes.byref(host), size_t(size), 0)
        self._cuda("cuStreamCreate", ctypes.byref(stream), 1)
        base = host.value or 0
        began = 0
        for turn in range(rounds + 1):
            if turn == 1:  # the first one warms up
                self._cuda("cuStreamSynchronize", stream)
                time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
                began = time.monotonic_ns()
            for at in range(0, size, PIECE_BYTES):
                part, there = size_t(min(PIECE_BYTES, size - at)), pointer_t(device.value + at)
                if out:
                    self._cuda("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(base + at), there, part, stream)
                else:
                    self._cuda("cuMemcpyHtoDAsync_v2", there, ctypes.c_void_p(base + at), part, stream)
        self._cuda("cuStreamSynchronize", stream)
        ended = time.monotonic_ns()
        self._cuda("cuMemFreeHost", host)
        self._cuda("cuMemFree_v2", device)
        self._cuda("cuStreamDestroy_v2", stream)
        return [began, ended]


def main() -> None:
    """Answers commands until the input ends."""
    worker = Worker()
    commands: dict[str, Callable[..., Any]] = {
        "start": worker.start, "alloc": worker.alloc, "fill": worker.fill,
        "check": worker.check, "renew": worker.renew, "stream": worker.stream,
    }  # fmt: skip
    print(json.dumps({"result": "ready"}), flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        print(json.dumps({"result": commands[name](*map(int, arguments))}), flush=True)


if __name__ == "__main__":
    main()
