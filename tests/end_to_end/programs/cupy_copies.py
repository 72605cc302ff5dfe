"""An unmodified CuPy program: copies in two streams, pool allocations, kernels between; checks its own data.

Kernels of the simulated GPU compute nothing, so what is compared went through copies only.
"""

from __future__ import annotations

import json
import signal
import sys
import time

import cupy
import numpy


def main() -> int:
    """Argument: how many seconds, unless SIGTERM ends it before."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    deadline = time.monotonic() + float(sys.argv[1])
    source = numpy.random.default_rng(3)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    rounds = wrong = 0
    while not stopped and time.monotonic() < deadline:
        sent = source.integers(0, 255, 1 << 16, dtype=numpy.uint8)
        with streams[rounds % 2] as stream:
            there = cupy.asarray(sent)
            other = cupy.empty_like(there)
            cupy.copyto(other, there)
            busy = cupy.zeros(1 << 12, dtype=cupy.float32)
            for _ in range(20):
                busy += 1
            back = cupy.asnumpy(there)
            stream.synchronize()
        rounds += 1
        wrong += not numpy.array_equal(sent, back)
    print(json.dumps({"rounds": rounds, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
