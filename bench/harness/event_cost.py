"""Cost of one event in the core: many jobs on one virtual GPU that always want it (virtual_node/node.py).

Only `Scheduler.handle` is timed, by the processor time of the thread; the log of events is part of it.  With `short`
memory each job has a tenth of the GPU.
"""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import Any

from nvshare.bench.harness.fixture import percentile
from nvshare.bench.virtual_node.node import FIRST_REPORT_NS, FOREVER_NS, Job, VirtualNode
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import Settings

CAPACITY = 80 << 30
WARM_UP = 4
"""Events of each client before the measurement: its turn, report and release among them."""


class Crowd(VirtualNode):
    """A node that times each event."""

    def __init__(self, policy: str, clients: int, *, short: bool) -> None:
        self.spent_us: list[tuple[str, float]] = []
        size = CAPACITY // 10 if short else 1 << 20
        jobs = [Job(f"job {n}", 0, FOREVER_NS, memory_bytes=size, user=n % 8) for n in range(clients)]
        settings = Settings(policy=policy, max_clients=clients)
        super().__init__(jobs, 1, CAPACITY, settings, shared_report_ns=FIRST_REPORT_NS)

    def handle(self, event: events.Event) -> list[commands.Command]:
        before_ns = time.thread_time_ns()
        out = super().handle(event)
        self.spent_us.append((type(event).__name__, (time.thread_time_ns() - before_ns) / 1000))
        return out

    def run_events(self, count: int) -> None:
        """Runs until `count` more events have been handled."""
        end = self.handled + count
        while self.handled < end:
            self.step(FOREVER_NS)


def measure(policy: str, clients: int, count: int, *, short: bool) -> dict[str, Any]:
    """Microseconds for one event under a policy."""
    crowd = Crowd(policy, clients, short=short)
    while len(crowd.programs) < clients:
        crowd.step(FOREVER_NS)
    crowd.run_events(WARM_UP * clients)
    crowd.spent_us.clear()
    crowd.run_events(count)
    spent_us = [spent for _, spent in crowd.spent_us]
    kinds: dict[str, list[float]] = {}
    for kind, spent in crowd.spent_us:
        kinds.setdefault(kind, []).append(spent)
    return {
        "policy": policy,
        "memory": "short" if short else "fits",
        "median_us": round(median(spent_us), 1),
        "mean_us": round(fmean(spent_us), 1),
        "p99_us": round(percentile(spent_us, 0.99), 1),
        "medians_us": {kind: round(median(each), 1) for kind, each in sorted(kinds.items())},
    }
