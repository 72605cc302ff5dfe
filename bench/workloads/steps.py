"""The workload protocol of `nvshare.bench.pairs`, and the loop that takes the steps.

Invariants: at most two steps are in flight, so that a counted step is done.  The requests of a workload with a beat
arrive at their times whether or not earlier ones are done; a latency runs from the arrival.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

IN_FLIGHT = 2
DATA_IN_PRODUCTS = 6
"""Steps of the workload `products` that take the GPU as long as one step of `data` (nvshare.bench.pairs)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`step` submits one step, `mark` gives an event behind it, `wait` waits for one; `beat_s`: between requests."""

    step: Callable[[], object]
    mark: Callable[[], Any]
    wait: Callable[[Any], object]
    beat_s: float | None = None


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
