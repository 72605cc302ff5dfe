"""A job for nvshare.bench.chaos and the tests: steps of a fixed GPU time that each write all of its memory.

It compares its memory now and then.  It speaks to libcuda.so.1 through ctypes.  It says when it is ready, begins when
it is told, and then says when it began and ended, by the monotonic clock.
SIGTERM ends it in order before its time.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import time

from nvshare.bench.workloads.busy import CudaError, Kernels

MIB = 1 << 20
BLOCK_BYTES = 64 * MIB
PAGE_BYTES = 2 * MIB
KERNEL_NS = 1_000_000
CHECK_EVERY = 16
"""Steps between two comparisons of one word in each page."""
HOST, DEVICE = 1, 2

size_t, pointer_t = ctypes.c_size_t, ctypes.c_uint64


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D"""

    _fields_ = [
        (f"{end}_{name}", kind)
        for end in ("src", "dst")
        for name, kind in (
            ("x", size_t), ("y", size_t), ("type", ctypes.c_int), ("host", ctypes.c_void_p),
            ("device", pointer_t), ("array", ctypes.c_void_p), ("pitch", size_t),
        )
    ] + [("width", size_t), ("height", size_t)]  # fmt: skip


class Job:
    """Its context and memory."""

    def __init__(self, total_bytes: int, step_ms: float) -> None:
        self._count = max(1, round(step_ms * 1e6 / KERNEL_NS))
        self._kernels = Kernels(round(step_ms * 1e6 / self._count))
        self._cuda = self._kernels.cuda
        self._blocks = []
        while total_bytes >= PAGE_BYTES:
            size = min(total_bytes, BLOCK_BYTES) // PAGE_BYTES * PAGE_BYTES
            self._blocks.append((self._cuda.memory(size), size))
            total_bytes -= size
        self._words = (ctypes.c_uint32 * (BLOCK_BYTES // PAGE_BYTES))()
        self._steps = 0
        self.mismatches = 0

    def _word(self, block: int) -> int:
        return (self._steps * 2654435761 + block * 40503) & 0xFFFFFFFF

    def step(self) -> None:
        """Kernels, and a new word in all of the memory."""
        if self._steps and self._steps % CHECK_EVERY == 0:
            self.check()
        self._steps += 1
        self._kernels.launch(self._count)
        for block, (pointer, size) in enumerate(self._blocks):
            word = ctypes.c_uint(self._word(block))
            self._cuda("cuMemsetD32Async", pointer, word, size_t(size // 4), self._kernels.stream)
        self._kernels.wait()

    def check(self) -> None:
        """Counts the pages whose first word is not what the last step wrote."""
        for block, (pointer, size) in enumerate(self._blocks):
            pages = size // PAGE_BYTES
            how = Copy2D(
                src_type=DEVICE, src_device=pointer, src_pitch=PAGE_BYTES,
                dst_type=HOST, dst_host=ctypes.addressof(self._words), dst_pitch=4, width=4, height=pages,
            )  # fmt: skip
            self._cuda("cuMemcpy2D_v2", ctypes.byref(how))
            self.mismatches += sum(word != self._word(block) for word in self._words[:pages])


def main() -> int:
    """Prints "ready", and a summary at the end; 1 when CUDA fails or data is lost."""
    parser = argparse.ArgumentParser(description="A job with much memory.")
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0)
    options = parser.parse_args()
    told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
    try:
        job = Job(options.mib * MIB, options.step_ms)
        job.step()
        print(json.dumps("ready"), flush=True)
        sys.stdin.readline()
        began_ns = time.monotonic_ns()
        for _ in range(options.steps):
            if told_to_end:
                break
            job.step()
        job.check()
    except CudaError as error:
        sys.stderr.write(f"resident: {error}\n")
        return 1
    summary = {"began_ns": began_ns, "ended_ns": time.monotonic_ns(), "mismatches": job.mismatches}
    print(json.dumps(summary), flush=True)
    return 1 if job.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
