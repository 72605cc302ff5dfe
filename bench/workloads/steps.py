"""Programs that `nvshare.bench.throughput` compares: unmodified PyTorch or CuPy loops that count their steps.

    python -m nvshare.bench.workloads.steps WORKLOAD

Prints `ready` after its warm-up.  For each line of seconds on standard input it runs so long and prints one JSON
object: `steps`, `seconds`, `steps_per_s`, and for workloads with a beat `latency_ms`.  Ends with the input.

Invariants: knows nothing of the hook or of other programs; at most two steps are in flight, so that a step that is
counted is done; steps that end after the time is over do not count.  The requests of a workload with a beat arrive at
their times whether or not earlier ones are done; a latency runs from the arrival.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

IN_FLIGHT = 2
INFER_EVERY_S = 0.010
DATA_IN_PRODUCTS = 6
"""Steps of the workload `products` that take the GPU as long as one step of `data` (nvshare.bench.pairs)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`step` submits one step, `mark` gives an event behind it, `wait` waits for one; `beat_s`: between requests."""

    step: Callable[[], object]
    mark: Callable[[], Any]
    wait: Callable[[Any], object]
    beat_s: float | None = None


def torch_workload(name: str) -> Workload:
    """gemm: 64 bf16 products of 2048 cubed, saturates.  small: 200 tiny kernels.  infer: a 6-layer MLP."""
    import torch

    device = torch.device("cuda")

    def mark() -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(event: Any) -> object:
        return event.synchronize()

    if name == "gemm":
        left = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
        right = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(left)

        def gemm() -> None:
            for _ in range(64):
                torch.mm(left, right, out=out)

        return Workload(gemm, mark, wait)
    if name == "small":
        tiny = torch.zeros(64, device=device)

        def small() -> None:
            for _ in range(200):
                tiny.add_(1.0)

        return Workload(small, mark, wait)
    layers = [torch.nn.Linear(1024, 1024, device=device) for _ in range(6)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    batch = torch.randn(8, 1024, device=device)

    def infer() -> None:
        with torch.inference_mode():
            model(batch)

    return Workload(infer, mark, wait, beat_s=INFER_EVERY_S)


def cupy_workload(name: str) -> Workload:
    """cupy-stream: elementwise passes over 256 MiB, saturates.  cupy-small: 200 tiny kernels."""
    import cupy

    values = cupy.zeros(64 << 20 if name == "cupy-stream" else 64, dtype=cupy.float32)
    passes = 16 if name == "cupy-stream" else 200

    def step() -> None:
        for _ in range(passes):
            cupy.add(values, 1.0, out=values)

    def mark() -> Any:
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        return event

    def wait(event: Any) -> object:
        return event.synchronize()

    return Workload(step, mark, wait)


TORCH = ("gemm", "small", "infer")
CUPY = ("cupy-stream", "cupy-small")


def finished_steps(workload: Workload) -> Generator[tuple[float, float], None, None]:
    """(arrival, end) of each step as it ends, by the monotonic clock, until the caller closes the iterator."""
    depth = 1 if workload.beat_s is not None else IN_FLIGHT
    in_flight: deque[tuple[float, Any]] = deque()
    due = time.monotonic()
    try:
        while True:
            if workload.beat_s is not None and (ahead_s := due - time.monotonic()) > 0:
                time.sleep(ahead_s)
                arrival = time.monotonic()  # a late wake-up is the host's, not the GPU's
            else:
                arrival = due if workload.beat_s is not None else time.monotonic()
            due += workload.beat_s or 0.0
            workload.step()
            in_flight.append((arrival, workload.mark()))
            if len(in_flight) == depth:
                arrival, mark = in_flight.popleft()
                workload.wait(mark)
                yield arrival, time.monotonic()
    finally:
        for _, mark in in_flight:
            workload.wait(mark)


def latencies_ms(latencies_s: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(latencies_s)
    last = len(ordered) - 1
    return {name: ordered[min(last, len(ordered) * rank // 100)] * 1e3 for name, rank in (("p50", 50), ("p99", 99))}


def run(workload: Workload, seconds: float) -> dict[str, Any]:
    """Steps that were done within the time, and how long each took to be done where the workload has a beat."""
    end = time.monotonic() + seconds
    latencies: list[float] = []
    with closing(finished_steps(workload)) as steps:
        for arrival, finished in steps:
            if finished > end:
                break
            latencies.append(finished - arrival)
    result: dict[str, Any] = {"steps": len(latencies), "seconds": seconds, "steps_per_s": len(latencies) / seconds}
    if workload.beat_s is not None and latencies:
        result["latency_ms"] = latencies_ms(latencies)
    return result


def main() -> int:
    """Command line."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name in TORCH:
        workload = torch_workload(name)
    elif name in CUPY:
        workload = cupy_workload(name)
    else:
        sys.stderr.write(f"usage: python -m nvshare.bench.workloads.steps {'|'.join((*TORCH, *CUPY))}\n")
        return 2
    run(workload, 1.0)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(workload, float(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
