"""Fixtures of the page's tests: a scripted coordinator behind the routes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.server import plain
from nvshare.coordinator.system.sensors import CardSensors
from tests.daemon.conftest import connect, coordinators  # noqa: F401 (fixtures)
from tests.harness import one_gpu

EXTRA: dict[str, Any] = {
    "simulated": True, "runtime_dir": "run", "problems": [], "host_owners": [], "gangs": [], "live": [],
    "hides_names": False, "host_budget_bytes": 1 << 30, "host_shared_bytes": 0,
}  # fmt: skip


def status() -> dict[str, Any]:
    """As the coordinator replies, with two programs of which one runs."""
    harness = one_gpu()
    for name in ("first.py", "second.py"):
        harness.client(name, wanted=True)
    snapshot = harness.scheduler.snapshot(harness.clock.now_ns)
    sensors = CardSensors(busy=0.5).plain()
    gpus = [{"index": index, **plain(gpu), "sensors": sensors} for index, gpu in enumerate(snapshot.gpus)]
    clients = [plain(client) for client in snapshot.clients]
    return {"now_ns": harness.clock.now_ns, "gpus": gpus, "clients": clients, **EXTRA}


@dataclass
class ScriptedReader:
    """A coordinator that always has the same status and takes every change."""

    reply: dict[str, Any] = field(default_factory=status)
    asked: list[api.Request] = field(default_factory=list)
    problem: Exception | None = None

    def call(self, request: api.Request) -> Any:
        self.asked.append(request)
        if self.problem is not None:
            raise self.problem
        return self.reply if isinstance(request, api.Status) else {"done": request.ask}

    def follow(self, take: Callable[[dict[str, Any]], None]) -> None:
        del take
        threading.Event().wait()
