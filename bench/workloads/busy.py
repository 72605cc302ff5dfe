"""A small CUDA program that keeps a GPU busy and can prove when: kernels in bursts, two streams, copies, idle gaps.

Purpose: the demo's and the benchmarks' unmodified program.  It speaks to libcuda.so.1 through ctypes, so that it needs
no framework, and knows nothing of the hook.

The proof: the kernel `nvs_busy(ns, log, slot)` spins until the GPU's %globaltimer has advanced by `ns` and writes the
times of its start and end into its slot of a ring on the device, which the program saves at its end
(`--log`: pairs of unsigned 64-bit integers, nanoseconds).  %globaltimer is one clock for all processes on a GPU.
On the simulated GPU the kernel of this name takes as long as its first parameter says; its trace is kept there instead.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KERNEL_PTX = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry nvs_busy(.param .u64 duration, .param .u64 log, .param .u64 slot)
{
    .reg .pred %again;
    .reg .b64 %wanted, %ring, %offset, %start, %now, %spent;
    ld.param.u64 %wanted, [duration];
    ld.param.u64 %ring, [log];
    ld.param.u64 %offset, [slot];
    cvta.to.global.u64 %ring, %ring;
    shl.b64 %offset, %offset, 4;
    add.u64 %ring, %ring, %offset;
    mov.u64 %start, %globaltimer;
SPIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %spent, %now, %start;
    setp.lt.u64 %again, %spent, %wanted;
    @%again bra SPIN;
    st.global.u64 [%ring], %start;
    st.global.u64 [%ring + 8], %now;
    ret;
}
\0"""

LOG_SLOTS = 1 << 20
"""Kernels that the ring remembers; the oldest are forgotten first."""

_NON_BLOCKING_STREAM = 1
_EVENT_BLOCKING = 1
_EVENT_WITHOUT_TIMING = 2


_compare = ctypes.CDLL(None).memcmp


class CudaError(Exception):
    """A driver call failed."""


class Driver:
    """The driver's functions, with every result checked."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no CUDA driver: {error}") from None

    def __call__(self, function: str, *arguments: object) -> None:
        result = getattr(self._library, function)(*arguments)
        if result:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(name))
            raise CudaError(f"{function}: {(name.value or b'unknown error').decode()} ({result})")

    def use(self, gpu: int = 0) -> None:
        """Makes the GPU's primary context current."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), gpu)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def busy_kernel(self) -> ctypes.c_void_p:
        """The kernel `nvs_busy`, loaded into the current context."""
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), KERNEL_PTX)
        self("cuModuleGetFunction", ctypes.byref(kernel), module, b"nvs_busy")
        return kernel

    def memory(self, size: int) -> ctypes.c_uint64:
        """Device memory."""
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer


class Kernels:
    """Kernels of one length on a stream of their own."""

    def __init__(self, kernel_ns: int, gpu: int = 0) -> None:
        self.cuda = Driver()
        self.cuda.use(gpu)
        self._kernel, self.stream = self.cuda.busy_kernel(), ctypes.c_void_p()
        self.cuda("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING_STREAM)
        self._arguments = (ctypes.c_uint64(kernel_ns), self.cuda.memory(16), ctypes.c_uint64(0))
        self._parameters = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in self._arguments))

    def launch(self, count: int) -> None:
        """Submits so many."""
        for _ in range(count):
            self.cuda("cuLaunchKernel", self._kernel, 1, 1, 1, 1, 1, 1, 0, self.stream, self._parameters, None)

    def wait(self) -> None:
        """Returns when all have run."""
        self.cuda("cuStreamSynchronize", self.stream)


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one iteration.  `ahead` bursts may be under way; a gap follows every `gap_every` (0: never)."""

    kernel_ns: int
    burst: int
    copy_bytes: int
    ahead: int = 1
    gap_every: int = 0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Burst:
    """State of one burst under way: its end on the GPU, and a value that goes there and back."""

    done: ctypes.c_void_p
    sent: ctypes.c_void_p
    received: ctypes.c_void_p


class Program:
    """One process's context, streams and buffers."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.launches = self.copies = self.mismatches = 0
        self._cuda = cuda = Driver()
        cuda.use()
        self._kernel = cuda.busy_kernel()
        self._streams = [self._made("cuStreamCreate", _NON_BLOCKING_STREAM) for _ in range(2)]
        self._log = cuda.memory(16 * LOG_SLOTS)
        cuda("cuMemsetD8_v2", self._log, 0, ctypes.c_size_t(16 * LOG_SLOTS))
        cuda("cuCtxSynchronize")  # our streams do not wait for the default one
        self._buffer = cuda.memory(load.copy_bytes)
        self._free = [self._burst() for _ in range(load.ahead)]
        self._under_way: deque[Burst] = deque()
        self._join = self._made("cuEventCreate", _EVENT_WITHOUT_TIMING)
        self._arguments = (ctypes.c_uint64(load.kernel_ns), self._log, ctypes.c_uint64(0))
        self._parameters = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in self._arguments))

    def _made(self, create: str, flags: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._cuda(create, ctypes.byref(handle), flags)
        return handle

    def _burst(self) -> Burst:
        done = self._made("cuEventCreate", _EVENT_WITHOUT_TIMING | _EVENT_BLOCKING)
        buffers = [ctypes.c_void_p(), ctypes.c_void_p()]
        for buffer in buffers:
            self._cuda("cuMemHostAlloc", ctypes.byref(buffer), ctypes.c_size_t(self.load.copy_bytes), 0)
        return Burst(done, *buffers)

    def iteration(self, value: int) -> None:
        """Submits one burst: kernels over both streams, then a value to the GPU and back.  Waits for the oldest burst
        first if enough are under way."""
        if not self._free:
            self._finish_oldest()
        burst = self._free.pop()
        for index in range(self.load.burst):
            self._launch(self._streams[index % 2])
        first, second = self._streams
        size = ctypes.c_size_t(self.load.copy_bytes)
        ctypes.memset(burst.sent, value, self.load.copy_bytes)
        self._cuda("cuMemcpyHtoDAsync_v2", self._buffer, burst.sent, size, first)
        self._cuda("cuMemcpyDtoHAsync_v2", burst.received, self._buffer, size, first)
        self._cuda("cuEventRecord", self._join, second)
        self._cuda("cuStreamWaitEvent", first, self._join, 0)
        self._cuda("cuEventRecord", burst.done, first)
        self.copies += 2
        self._under_way.append(burst)

    def finish(self) -> None:
        """Waits for everything under way."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        burst = self._under_way.popleft()
        self._cuda("cuEventSynchronize", burst.done)
        size = ctypes.c_size_t(self.load.copy_bytes)
        if _compare(burst.sent, burst.received, size) != 0:
            self.mismatches += 1
        self._free.append(burst)

    def _launch(self, stream: ctypes.c_void_p) -> None:
        self._arguments[2].value = self.launches % LOG_SLOTS
        self._cuda("cuLaunchKernel", self._kernel, 1, 1, 1, 1, 1, 1, 0, stream, self._parameters, None)
        self.launches += 1

    def clock_offset_ns(self) -> int | None:
        """CLOCK_MONOTONIC less %globaltimer, to about 20 us: from the kernel whose launch and end, as the host saw
        them, lie closest together.  None where kernels write no log.  Takes log slots."""
        best: tuple[int, int] | None = None
        stream = self._streams[0]
        for _ in range(16):
            slot = self.launches % LOG_SLOTS
            before_ns = time.monotonic_ns()
            self._launch(stream)
            self._cuda("cuStreamSynchronize", stream)
            after_ns = time.monotonic_ns()
            times = (ctypes.c_uint64 * 2)()
            place = ctypes.c_uint64(self._log.value + 16 * slot)
            self._cuda("cuMemcpyDtoH_v2", times, place, ctypes.c_size_t(16))
            if times[1] == 0:
                return None
            found = (after_ns - before_ns, (before_ns + after_ns - times[0] - times[1]) // 2)
            best = found if best is None else min(best, found)
        return None if best is None else best[1]

    def save_log(self, path: Path) -> None:
        """Writes the times of the kernels that ran, in the order of their slots."""
        slots = min(self.launches, LOG_SLOTS)
        times = (ctypes.c_uint64 * (2 * slots))()
        if slots:
            self._cuda("cuMemcpyDtoH_v2", times, self._log, ctypes.c_size_t(16 * slots))
        path.write_bytes(bytes(times))


def read_log(path: Path) -> list[tuple[int, int]]:
    """(start, end) in nanoseconds of each kernel in a log that `--log` wrote; empty slots are left out."""
    times = array.array("Q", path.read_bytes())
    return [(start, end) for start, end in zip(times[::2], times[1::2], strict=True) if end]


def run(load: Load, seconds: float, seed: int, log: Path | None) -> dict[str, int | None]:
    """Keeps the GPU busy for so long; raises CudaError."""
    program = Program(load)
    chance = random.Random(seed)
    deadline = time.monotonic() + seconds
    bursts = 0
    with contextlib.suppress(KeyboardInterrupt):  # an early end is still an orderly one
        while time.monotonic() < deadline:
            program.iteration(chance.randrange(256))
            bursts += 1
            if load.gap_every and bursts % load.gap_every == 0:
                program.finish()
                time.sleep(load.gap_s * chance.uniform(0.5, 1.5))
    program.finish()
    offset_ns = None
    if log is not None:
        offset_ns = program.clock_offset_ns()
        program.save_log(log)
    return {
        "launches": program.launches,
        "copies": program.copies,
        "mismatches": program.mismatches,
        "clock_offset_ns": offset_ns,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a summary in JSON; 1 when CUDA fails or data came back different."""
    parser = argparse.ArgumentParser(description="Keep a GPU busy.")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kernel-us", type=int, default=300, help="duration of one kernel")
    parser.add_argument("--burst", type=int, default=16, help="kernels between two copies")
    parser.add_argument(
        "--ahead", type=int, default=2, help="bursts under way at once; 1 leaves the GPU idle in between"
    )
    parser.add_argument("--copy-kib", type=int, default=256)
    parser.add_argument("--gap-every", type=int, default=0, help="bursts between idle gaps; 0: none")
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="where to write when the kernels ran")
    options = parser.parse_args(argv)
    load = Load(
        kernel_ns=options.kernel_us * 1000,
        burst=options.burst,
        copy_bytes=options.copy_kib * 1024,
        ahead=options.ahead,
        gap_every=options.gap_every,
        gap_s=options.gap_ms / 1000,
    )
    try:
        summary = run(load, options.seconds, options.seed, options.log)
    except CudaError as error:
        sys.stderr.write(f"busy: {error}\n")
        return 1
    print(json.dumps(summary), flush=True)
    return 1 if summary["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
