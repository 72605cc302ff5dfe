"""CuPy with each of its allocators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy

from nvshare.bench.compatibility.cases import Outcome, Program, Skipped

SOURCE = (
    'extern "C" __global__ void turn(float *a, int n)'
    "{ int i = blockDim.x * blockIdx.x + threadIdx.x; if (i < n) a[i] = a[i] * 0.5f + (float)(i % 7); }"
)


def default_pool() -> Any:
    """CuPy's default memory pool."""
    return cupy.get_default_memory_pool().malloc


def asynchronous_pool() -> Any:
    """Stream-ordered allocation: cudaMallocFromPoolAsync."""
    if not cupy.cuda.Device().attributes.get("MemoryPoolsSupported", 0):
        raise Skipped("this device has no memory pools")
    return cupy.cuda.MemoryAsyncPool().malloc


def managed_pool() -> Any:
    """Managed memory of the application's own."""
    return cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc


def arrays(allocator: Callable[[], Any]) -> Program:
    """A kernel of its own, elementwise kernels, sorting, allocations and copies on a stream of its own."""
    cupy.cuda.set_allocator(allocator())
    own = cupy.RawKernel(SOURCE, "turn")
    timed = cupy.zeros(1 << 16, dtype=cupy.float32)

    def step() -> None:
        fresh = timed * 0.5  # a new array: the allocator's path
        own((timed.size // 256,), (256,), (fresh, fresh.size))
        cupy.add(fresh, timed, out=timed)

    def check() -> Outcome:
        outcome = Outcome()
        source = numpy.random.default_rng(5)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            values = cupy.asarray(source.standard_normal(1 << 18, dtype=numpy.float32))
            for _ in range(10):
                fresh = cupy.asarray(source.standard_normal(1 << 12, dtype=numpy.float32))
                values[: fresh.size] += fresh
                own((values.size // 256,), (256,), (values, values.size))
                outcome.bytes_of(cupy.asnumpy(cupy.sort(values)))
                outcome.bytes_of(cupy.asnumpy(cupy.cumsum(values.astype(cupy.int64))))
            stream.synchronize()
        return outcome

    return Program(check, step, lambda: cupy.cuda.Device().synchronize())


CASES = {
    "default": lambda: arrays(default_pool),
    "async": lambda: arrays(asynchronous_pool),
    "managed": lambda: arrays(managed_pool),
}
