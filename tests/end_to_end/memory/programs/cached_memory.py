"""A program of CuPy or PyTorch that has freed an array whose memory its library keeps, and works on another one.

Arguments: cupy or torch; bytes it works on; bytes it has freed; whether it frees its caches under pressure (0 or 1).
It works until SIGTERM and prints its steps.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import nvshare


def functions(library: str) -> tuple[Any, Any]:
    """How to make an array of zeros, and to wait for the GPU."""
    if library == "torch":
        import torch

        return lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.cuda.synchronize
    import cupy

    return lambda size: cupy.zeros(size, dtype=cupy.uint8), cupy.cuda.runtime.deviceSynchronize


def main() -> None:
    """One line of JSON at the end."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    zeros, synchronize = functions(sys.argv[1])
    kept, freed, releases = map(int, sys.argv[2:])
    if releases:
        nvshare.on_pressure(nvshare.release_caches)
    unused, array = zeros(freed), zeros(kept)
    del unused
    steps = 0
    while not stopped:
        for _ in range(4):
            array += 1
        synchronize()
        steps += 1
        nvshare.step()
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
