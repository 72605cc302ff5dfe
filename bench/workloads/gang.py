"""Programs for nvshare.bench.gangs: a rank of a job that exchanges something after each step, and a rival.

    python -m nvshare.bench.workloads.gang rank NUMBER host FILE        kernels, then a token through a mapped file
    python -m nvshare.bench.workloads.gang rank NUMBER nccl FILE PORT   PyTorch: products, then an all-reduce over NCCL
    python -m nvshare.bench.workloads.gang rival GPU host|nccl          kernels, or products, and nobody to wait for

Two ranks run, each on the GPU of its number.  They answer to `worker_group.py`: a line `{"ready": true}`, then for
each line `run SECONDS` one object: `steps`, `seconds`, `worst_ms` (the longest step).  The ranks end a run together.

Invariants: knows nothing of the hook or of gangs; whoever waits for a token sleeps, and not for ever.

Non-goals: what is compared with what.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvshare.bench.workloads.busy import CudaError, Kernels

RANKS = 2
KERNEL_NS, KERNELS = 500_000, 8
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.0001
FILE_BYTES = 64


class Step:
    """Some kernels, waited for: 4 ms."""

    def __init__(self, gpu: int) -> None:
        self._kernels = Kernels(KERNEL_NS, gpu)

    def __call__(self) -> None:
        self._kernels.launch(KERNELS)
        self._kernels.wait()


class Tokens:
    """A mapped file with a counter for each rank, which that rank alone writes, and the last step of the run, which
    rank 0 writes."""

    def __init__(self, path: Path, number: int) -> None:
        self._number = number
        self._done = 0
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), FILE_BYTES)

    def _get(self, place: int) -> int:
        (value,) = struct.unpack_from("<Q", self._words, 8 * place)
        return int(value)

    def exchange(self, *, over: bool) -> bool:
        """This rank's step is done; returns when the other's is, and whether it was the last of the run."""
        self._done += 1
        if self._number == 0 and over:  # before the token that tells of it
            struct.pack_into("<Q", self._words, 8 * RANKS, self._done)
        struct.pack_into("<Q", self._words, 8 * self._number, self._done)
        end = time.monotonic() + PATIENCE_S
        while self._get(1 - self._number) < self._done:
            if time.monotonic() > end:
                raise CudaError(f"rank {1 - self._number} sent no token for {PATIENCE_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
        return self._get(RANKS) == self._done

    def count(self, *, over: bool) -> bool:
        """The step is done here, and no rank can end the next one alone: whether it was the last of the run."""
        self._done += 1
        last = self._get(RANKS) == self._done
        if self._number == 0 and over and not last:
            struct.pack_into("<Q", self._words, 8 * RANKS, self._done + 1)
        return last


def timed(step: Callable[[], object], is_over: Callable[[bool], bool], seconds: float) -> dict[str, Any]:
    """Steps until `is_over`, which hears after each one whether the time is over."""
    begin = before = time.monotonic()
    steps, worst = 0, 0.0
    while True:
        step()
        over = is_over(time.monotonic() - begin >= seconds)
        now = time.monotonic()
        steps, worst, before = steps + 1, max(worst, now - before), now
        if over:
            return {"steps": steps, "seconds": now - begin, "worst_ms": worst * 1e3}


def host_rank(number: int, path: Path) -> Callable[[float], dict[str, Any]]:
    """Kernels and tokens."""
    step, tokens = Step(number), Tokens(path, number)
    step()
    return lambda seconds: timed(step, lambda over: tokens.exchange(over=over), seconds)


def nccl_rank(number: int, path: Path, port: int) -> Callable[[float], dict[str, Any]]:
    """A step as in training: products, a reduction of 32 MiB of gradients, their use."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE=str(RANKS))
    torch.cuda.set_device(number)
    device = torch.device("cuda", number)
    dist.init_process_group("nccl", rank=number, world_size=RANKS, device_id=device)
    weights = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    gradients = torch.ones(8 << 20, device=device)
    tokens = Tokens(path, number)

    def step() -> None:
        product = weights
        for _ in range(20):
            product = (weights @ product) * 0.01
        dist.all_reduce(gradients)
        gradients.mul_(0.5)
        torch.cuda.synchronize()

    for _ in range(3):
        step()
    return lambda seconds: timed(step, lambda over: tokens.count(over=over), seconds)


def rival(gpu: int, exchange: str) -> Callable[[float], dict[str, Any]]:
    """Saturates its GPU."""
    if exchange == "host":
        step: Callable[[], object] = Step(gpu)
    else:
        import torch

        torch.cuda.set_device(gpu)
        matrix = torch.randn(2048, 2048, device=torch.device("cuda", gpu), dtype=torch.bfloat16)
        out = torch.empty_like(matrix)

        def products() -> None:
            for _ in range(50):
                torch.mm(matrix, matrix, out=out)
            torch.cuda.synchronize()

        step = products
    step()
    return lambda seconds: timed(step, lambda over: over, seconds)


def main() -> int:
    """Command line."""
    role, number, exchange, *place = sys.argv[1:]
    try:
        if role == "rival":
            run = rival(int(number), exchange)
        elif exchange == "nccl":
            run = nccl_rank(int(number), Path(place[0]), int(place[1]))
        else:
            run = host_rank(int(number), Path(place[0]))
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(run(float(line.split()[1]))), flush=True)
    except CudaError as error:
        sys.stderr.write(f"{role} {number}: {error}\n")
        return 1
    if exchange == "nccl" and role == "rank":
        import torch.distributed as dist

        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
