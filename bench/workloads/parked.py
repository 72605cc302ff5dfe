"""A program for nvshare.bench.park: memory of known contents, one step at each line of standard input.

With PyTorch the step replays a captured graph and sums all memory; otherwise it compares its memory through
libcuda.so.1.  The answer is a JSON object with the time of the step and whether its result is right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable

from nvshare.bench.workloads.resident import MIB, Job

BLOCK = 256 * MIB


def torch_step(size: int) -> Callable[[], bool]:
    """A captured graph that adds one to a counter, and sums over blocks of memory."""
    import torch

    blocks = [torch.full((min(BLOCK, size - at) // 4,), 3.0, device="cuda") for at in range(0, size, BLOCK)]
    counter = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
    steps = 0

    def step() -> bool:
        nonlocal steps
        steps += 1
        graph.replay()
        right = all(float(block.min()) == 3.0 == float(block.max()) for block in blocks)
        return right and float(counter) == steps

    return step


def driver_step(size: int) -> Callable[[], bool]:
    """The memory of bench.chaos's job."""
    job = Job(size, 1.0)

    def step() -> bool:
        job.check()
        job.step()
        return job.mismatches == 0

    job.step()
    return step


def main() -> None:
    """Answers once for its start, then for each line."""
    parser = argparse.ArgumentParser(description="A program to be parked.")
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--with", dest="library", choices=("torch", "driver"), required=True)
    options = parser.parse_args()
    make = torch_step if options.library == "torch" and importlib.util.find_spec("torch") else driver_step
    step = make(options.mib * MIB)
    step()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        began = time.monotonic()
        right = step()
        print(json.dumps({"seconds": time.monotonic() - began, "right": right}), flush=True)


if __name__ == "__main__":
    main()
