"""Numba's CUDA target."""

from __future__ import annotations

from typing import Any

import numpy

if not hasattr(numpy, "row_stack"):
    # Some releases of Numba still use this name, which NumPy 2.5 dropped: it was another one of vstack.
    numpy.row_stack = numpy.vstack

from numba import cuda

from nvshare.bench.compatibility.cases import Outcome, Program


def _turn(values: Any, factor: Any) -> None:
    i = cuda.grid(1)
    if i < values.size:
        values[i] = values[i] * factor + i % 7


def kernel() -> Program:
    """A kernel compiled by Numba; copies in and out."""
    turn: Any = cuda.jit(_turn)
    timed = cuda.to_device(numpy.zeros(1 << 16, dtype=numpy.float32))
    factor = numpy.float32(0.5)

    def check() -> Outcome:
        outcome = Outcome()
        source = numpy.random.default_rng(31)
        values = cuda.to_device(source.standard_normal(1 << 16, dtype=numpy.float32))
        for _ in range(50):
            turn[256, 256](values, factor)
        outcome.bytes_of(values.copy_to_host())
        return outcome

    return Program(check, lambda: turn[256, 256](timed, factor), cuda.synchronize)


CASES = {"kernel": kernel}
