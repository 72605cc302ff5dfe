"""A program of `nvshare.bench.pairs`: one workload that counts its steps in a window that all programs share.

    python -m nvshare.bench.workloads.pair_job NAME cuda|cpu|driver

After its warm-up it prints `{"ready": true, ...}`.  For each line `window BEGIN END` (monotonic clock, seconds) it
works at once and until END, and prints one JSON object: `rate` (steps a second between BEGIN and END), `steps` and, for
a server, `latency_ms` and `requests`.  It ends with its input.

Invariants: progress is interpolated between the ends of steps, so that a rate has no error of a whole step; the step
that is under way at END is finished before the program answers.
"""

from __future__ import annotations

import json
import math
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from nvshare.bench.workloads.steps import Workload, finished_steps, latencies_ms

WARM_UP_STEPS = 10


def progress_at(moment: float, ends: Sequence[float]) -> float:
    """Steps done at a moment; `ends`: when the first began, then when each ended."""
    done = bisect_right(ends, moment)
    if done == 0:
        return 0.0
    if done == len(ends):
        return done - 1.0
    return done - 1 + (moment - ends[done - 1]) / (ends[done] - ends[done - 1])


def rate_between(begin: float, end: float, ends: Sequence[float]) -> float:
    """Steps a second between two moments."""
    return (progress_at(end, ends) - progress_at(begin, ends)) / (end - begin)


def in_window(begin: float, end: float, start: float, steps: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Takes steps until one ends after the window."""
    ends = [start]
    latencies: list[float] = []
    for arrival, finished in steps:
        ends.append(finished)
        if begin <= arrival < end:
            latencies.append(finished - arrival)
        if finished > end:
            break
    inside = sum(begin < moment <= end for moment in ends[1:])
    return {"rate": rate_between(begin, end, ends), "steps": inside, "latencies": latencies}


def measure(workload: Workload, begin: float, end: float) -> dict[str, Any]:
    """One window."""
    with closing(finished_steps(workload)) as steps:
        found = in_window(begin, end, time.monotonic(), steps)
    latencies = found.pop("latencies")
    if workload.beat_s is not None and latencies:
        found |= {"latency_ms": latencies_ms(latencies), "requests": len(latencies)}
    return found


def _workload(name: str, where: str) -> tuple[Workload, dict[str, str]]:
    if where == "driver":
        from nvshare.bench.workloads import driver_jobs

        return driver_jobs.workload(name), {}
    import torch

    from nvshare.bench.workloads import torch_jobs

    return torch_jobs.workload(name, where), {"torch": torch.__version__, "cuda": str(torch.version.cuda)}


def main() -> int:
    """Command line."""
    if len(sys.argv) != 3 or sys.argv[2] not in {"cuda", "cpu", "driver"}:
        sys.stderr.write("usage: python -m nvshare.bench.workloads.pair_job NAME cuda|cpu|driver\n")
        return 2
    workload, versions = _workload(sys.argv[1], sys.argv[2])
    with closing(finished_steps(workload)) as steps:
        for _ in islice(steps, WARM_UP_STEPS):
            pass
    print(json.dumps({"ready": True, "versions": versions}), flush=True)
    for line in sys.stdin:
        word, begin, end = line.split()
        if word != "window" or not math.isfinite(float(begin) + float(end)):
            raise ValueError(line)
        print(json.dumps(measure(workload, float(begin), float(end))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
