"""An unmodified program that uses the driver's asynchronous pools; prints what its framework's own counters say.

Argument: cupy or torch.  At most 160 MiB.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MIB = 1 << 20
Seen = list[list[object]]


def cupy_counters(made: bool) -> Seen:
    """Counters of CuPy's MemoryAsyncPool, of the default pool or of one that is made."""
    import cupy

    runtime = cupy.cuda.runtime
    pool = cupy.cuda.MemoryAsyncPool(runtime.memPoolCreate(runtime.MemPoolProps(1, 0, 1, 0)) if made else "default")
    seen: Seen = []

    def after(step: str, _: Any = None) -> None:
        seen.append([step, pool.used_bytes(), pool.total_bytes(), pool.free_bytes()])

    one, two, three = pool.malloc(1000), pool.malloc(40 * MIB), pool.malloc(70 * MIB)
    after("three")
    del two
    after("one freed")
    after("synchronized", runtime.deviceSynchronize())
    again = pool.malloc(39 * MIB)
    after("another one")
    del three
    after("trimmed", pool.free_all_blocks())
    del one, again
    after("all freed")
    after("synchronized", runtime.deviceSynchronize())
    return seen


def torch_counters() -> Seen:
    """Counters of PyTorch's cudaMallocAsync back end."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ[variable] = "backend:cudaMallocAsync"
    import torch

    seen: Seen = []

    def after(step: str, _: Any = None) -> None:
        told = torch.cuda.memory_stats()
        figures = [f"{kind}_bytes.all.{which}" for kind in ("allocated", "reserved") for which in ("current", "peak")]
        seen.append([step, *(told[name] for name in figures)])

    def tensor(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    one, two, three = tensor(1000), tensor(40 * MIB), tensor(70 * MIB)
    after("three")
    del two
    after("one freed")
    after("synchronized", torch.cuda.synchronize())
    after("reset", torch.cuda.reset_peak_memory_stats())
    del three
    after("two freed")
    after("emptied", torch.cuda.empty_cache())
    again = tensor(39 * MIB)
    after("another one")
    del one, again
    after("all freed", torch.cuda.synchronize())
    return seen


def main() -> None:
    """One line of JSON."""
    print(json.dumps(torch_counters() if sys.argv[1] == "torch" else [cupy_counters(made) for made in (False, True)]))


if __name__ == "__main__":
    main()
