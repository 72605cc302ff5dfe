"""Doubles of the workloads of `nvshare.bench.pairs` without a framework, for simulated GPUs: kernels of a fixed length.

Non-goals: figures that mean something about a card.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

from nvshare.bench.workloads.busy import Kernels
from nvshare.bench.workloads.steps import DATA_IN_PRODUCTS, Workload


@dataclass(frozen=True, slots=True)
class Shape:
    """One step: so many kernels of a length, after the host has waited."""

    kernels: int
    kernel_us: int
    wait_s: float = 0.0
    beat_s: float | None = None


SHAPES = {
    "products": Shape(2, 500), "graphed": Shape(2, 500), "elementwise": Shape(1, 4000), "tiny": Shape(20, 5),
    "decode": Shape(20, 20, wait_s=0.001), "train": Shape(20, 250), "cnn": Shape(20, 100),
    "server": Shape(2, 50, beat_s=0.005), "data": Shape(2 * DATA_IN_PRODUCTS, 500, wait_s=0.006),
    "memory": Shape(4, 500), "long": Shape(8, 1600), "graphed_long": Shape(8, 1600), "wide": Shape(1, 4000),
    "graphed_wide": Shape(1, 4000),
}  # fmt: skip


def workload(name: str) -> Workload:
    """The double of this name, through libcuda.so.1."""
    shape = SHAPES[name]
    kernels = Kernels(shape.kernel_us * 1000)
    cuda = kernels.cuda

    def step() -> None:
        if shape.wait_s:
            kernels.wait()
            time.sleep(shape.wait_s)
        kernels.launch(shape.kernels)

    def mark() -> Any:
        event = ctypes.c_void_p()
        cuda("cuEventCreate", ctypes.byref(event), 2)
        cuda("cuEventRecord", event, kernels.stream)
        return event

    def wait(event: Any) -> None:
        cuda("cuEventSynchronize", event)
        cuda("cuEventDestroy_v2", event)

    return Workload(step, mark, wait, shape.beat_s)
