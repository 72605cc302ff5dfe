"""Doubles of the workloads of `nvshare.bench.pairs` without a framework, for simulated GPUs: kernels of a fixed length.

Non-goals: figures that mean something about a card.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

from nvshare.bench.workloads.busy import KERNEL_PTX, Driver
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
    "server": Shape(2, 50, beat_s=0.005), "data": Shape(2 * DATA_IN_PRODUCTS, 500, wait_s=0.006), "cupy": Shape(4, 500),
}  # fmt: skip


def workload(name: str) -> Workload:
    """The double of this name, through libcuda.so.1."""
    shape = SHAPES[name]
    cuda = Driver()
    device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    kernel, stream, log = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    cuda("cuInit", 0)
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    cuda("cuModuleLoadData", ctypes.byref(module), KERNEL_PTX)
    cuda("cuModuleGetFunction", ctypes.byref(kernel), module, b"nvs_busy")
    cuda("cuStreamCreate", ctypes.byref(stream), 1)
    cuda("cuMemAlloc_v2", ctypes.byref(log), ctypes.c_size_t(16))
    values = (ctypes.c_uint64(shape.kernel_us * 1000), log, ctypes.c_uint64(0))
    parameters = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))

    def step() -> None:
        assert values  # the kernel's parameters point there
        if shape.wait_s:
            cuda("cuStreamSynchronize", stream)
            time.sleep(shape.wait_s)
        for _ in range(shape.kernels):
            cuda("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None)

    def mark() -> Any:
        event = ctypes.c_void_p()
        cuda("cuEventCreate", ctypes.byref(event), 2)
        cuda("cuEventRecord", event, stream)
        return event

    def wait(event: Any) -> None:
        cuda("cuEventSynchronize", event)
        cuda("cuEventDestroy_v2", event)

    return Workload(step, mark, wait, shape.beat_s)
