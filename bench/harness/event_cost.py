"""Cost of one event in the core: many clients on one GPU that always want it, in virtual time.

Clients answer as hooks do: they report progress every 100 ms of a lease and at its end, give revoked leases back and
want the GPU again, and move their memory when told to.  With `short` memory each has a tenth of the GPU.  Only
`Scheduler.handle` is timed, by the processor time of the thread; the log of events is part of it.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from statistics import median
from typing import Any

from nvshare.bench.harness.fixture import percentile
from nvshare.coordinator.engine.scheduler import PolicyFactory, Scheduler
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.protocol import messages

REPORT_NS = 100_000_000
CAPACITY = 80 << 30
WARM_UP = 4
"""Events of each client before the measurement: its turn, report and release among them."""


class Crowd:
    """The clients of one GPU, and the time of each event."""

    def __init__(self, create: PolicyFactory, policy: str, clients: int, *, short: bool) -> None:
        settings = Settings(policy=policy, max_clients=clients)
        self._core = Scheduler(create, settings)
        self._now_ns = 0
        self._timer_ns: int | None = None
        self._answers: deque[events.Event] = deque()
        self._reports: list[tuple[int, int, int]] = []
        """When, which client, which lease."""
        self._leases: dict[int, int] = {}
        self._bytes = CAPACITY // 10 if short else 1 << 20
        self.spent_ns: list[tuple[str, int]] = []
        self._give(events.GpuAdded("GPU-0", "made-up GPU", CAPACITY, CAPACITY))
        for client in range(1, clients + 1):
            mode = messages.MemoryMode.SWAP
            self._give(
                events.ClientRegistered(
                    client, messages.Hello(1, f"job {client}", "bench", 0, 0, mode, 0, ""), client, client % 8
                )
            )
            self._give(events.Received(client, messages.AttachGpu(0, "GPU-0", 1 << 30, 0, False, 0, 0, 0)))
            here = 0 if short else self._bytes
            self._give(events.Received(client, messages.MemoryReport(0, self._bytes, here, 0, self._bytes - here)))
            self._give(events.Received(client, messages.Request(0)))

    def run(self, count: int) -> None:
        """Runs until `count` events have been handled."""
        self.spent_ns.clear()
        while len(self.spent_ns) < count:
            if self._answers:
                self._now_ns += 10_000
                self._give(self._answers.popleft())
                continue
            due_ns = min(self._timer_ns or 1 << 62, self._reports[0][0] if self._reports else 1 << 62)
            self._now_ns = max(self._now_ns, due_ns)
            if self._timer_ns is not None and self._timer_ns <= self._now_ns:
                self._timer_ns = None
                self._give(events.TimerFired())
            else:
                self._report(*heapq.heappop(self._reports))

    def _report(self, at_ns: int, client: int, lease: int) -> None:
        if self._leases.get(client) == lease:
            self._give(self._progress(client, lease))
            heapq.heappush(self._reports, (at_ns + REPORT_NS, client, lease))

    def _progress(self, client: int, lease: int) -> events.Received:
        now_ns = self._now_ns
        return events.Received(client, messages.Progress(0, lease, now_ns, now_ns // 1000, now_ns // 2, now_ns, 0))

    def _release(self, client: int, lease: int) -> None:
        if self._leases.pop(client, None) is not None:
            self._answers.append(self._progress(client, lease))
            self._answers.append(
                events.Received(client, messages.Release(0, lease, messages.ReleaseReason.REVOKED, True, True, 0, 0, 1))
            )

    def _give(self, event: events.Event) -> None:
        before_ns = time.thread_time_ns()
        out = self._core.handle(event, self._now_ns)
        self.spent_ns.append((type(event).__name__, time.thread_time_ns() - before_ns))
        for command in out:
            if isinstance(command, commands.SetTimer):
                self._timer_ns = command.deadline_ns
            elif isinstance(command, commands.Send):
                self._answer(command.client, command.message)

    def _answer(self, client: int, message: messages.Message) -> None:
        if isinstance(message, messages.Grant):
            self._leases[client] = message.lease_id
            heapq.heappush(self._reports, (self._now_ns + REPORT_NS, client, message.lease_id))
        elif isinstance(message, messages.Revoke):
            self._release(client, message.lease_id)
        elif isinstance(message, messages.Evict | messages.Restore):
            here = self._bytes - message.bytes if isinstance(message, messages.Evict) else self._bytes
            moved, order = message.bytes, message.order_id
            self._answers.append(events.Received(client, messages.MoveProgress(0, order, moved, 1000, True, 0)))
            self._answers.append(
                events.Received(client, messages.MemoryReport(0, self._bytes, here, 0, self._bytes - here))
            )


def measure(create: PolicyFactory, policy: str, clients: int, count: int, *, short: bool) -> dict[str, Any]:
    """Microseconds for one event under a policy."""
    crowd = Crowd(create, policy, clients, short=short)
    crowd.run(WARM_UP * clients)
    crowd.run(count)
    spent_us = [spent / 1000 for _, spent in crowd.spent_ns]
    kinds: dict[str, list[float]] = {}
    for kind, spent in crowd.spent_ns:
        kinds.setdefault(kind, []).append(spent / 1000)
    return {
        "policy": policy,
        "memory": "short" if short else "fits",
        "median_us": round(median(spent_us), 1),
        "mean_us": round(sum(spent_us) / len(spent_us), 1),
        "p99_us": round(percentile(spent_us, 0.99), 1),
        "medians_us": {kind: round(median(each), 1) for kind, each in sorted(kinds.items())},
    }
