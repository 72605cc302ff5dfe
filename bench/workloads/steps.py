"""Programs that `nvshare.bench.throughput` compares: unmodified PyTorch or CuPy loops that count their steps.

    python -m nvshare.bench.workloads.steps WORKLOAD

Prints `ready` after its warm-up.  For each line of seconds on standard input it runs so long and prints one JSON
object: `steps`, `seconds`, `steps_per_s`, and for workloads with a beat `latency_ms`.  Ends with the input.

Invariants: knows nothing of the hook or of other programs; at most two steps are in flight, so that a step that is
counted is done; steps that end after the time is over do not count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

IN_FLIGHT = 2
INFER_EVERY_S = 0.010


@dataclass(frozen=True, slots=True)
class Workload:
    """`step` submits one step, `mark` gives an event behind it, `wait` waits for one; `beat_s`: a step so often."""

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


def run(workload: Workload, seconds: float) -> dict[str, Any]:
    """Steps that were done within the time, and how long each took to be done where the workload has a beat."""
    start = time.monotonic()
    end = start + seconds
    done = 0
    latencies: list[float] = []
    in_flight: list[Any] = []
    due = start
    while (now := time.monotonic()) < end:
        if workload.beat_s is not None:
            if now < due:
                time.sleep(due - now)
            due = max(due + workload.beat_s, time.monotonic())
        begun = time.monotonic()
        workload.step()
        in_flight.append(workload.mark())
        if len(in_flight) < IN_FLIGHT and workload.beat_s is None:
            continue
        workload.wait(in_flight.pop(0))
        finished = time.monotonic()
        if finished <= end:
            done += 1
            latencies.append((finished - begun) * 1e3)
    for mark in in_flight:
        workload.wait(mark)
    result: dict[str, Any] = {"steps": done, "seconds": seconds, "steps_per_s": done / seconds}
    if workload.beat_s is not None and latencies:
        latencies.sort()
        result["latency_ms"] = {
            "p50": latencies[len(latencies) // 2],
            "p99": latencies[min(len(latencies) - 1, len(latencies) * 99 // 100)],
        }
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
