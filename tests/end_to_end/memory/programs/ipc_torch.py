"""An unmodified PyTorch program: tensors on the GPU go through a queue to a spawned process, and back.

Both ends read and write them.  Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import multiprocessing

SIZES = (1000, 300_000, 3_000_000)
"""Elements of four bytes: PyTorch keeps small, middle-sized and large tensors in allocations of different kinds."""


def child(inbox: Any, outbox: Any) -> None:
    """Doubles what comes and sends a tensor of its own."""
    kept = []
    while (tensor := inbox.get()) is not None:
        tensor.mul_(2)
        own = tensor + 1
        torch.cuda.synchronize()
        kept.append(own)  # until the other end has read it
        outbox.put(own)
        del tensor
    inbox.get()


def main() -> int:
    """See the head of the file."""
    context = multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(there, back), daemon=True)
    process.start()
    rounds = wrong = 0
    for seed in range(3):
        for size in SIZES:
            tensor = torch.arange(size, device="cuda", dtype=torch.float32) + seed
            expected = (torch.arange(size, dtype=torch.float32) + seed) * 2
            torch.cuda.synchronize()
            there.put(tensor)
            got = back.get()
            wrong += not torch.equal(tensor.cpu(), expected)
            wrong += not torch.equal(got.cpu(), expected + 1)
            got.fill_(7)
            wrong += not bool((got == 7).all())
            del got
            rounds += 1
    there.put(None)
    there.put(None)
    process.join()
    print(json.dumps({"rounds": rounds, "wrong": wrong, "child": process.exitcode}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
