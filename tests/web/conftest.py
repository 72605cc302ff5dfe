"""Fixtures of the page's tests: a scripted coordinator behind the routes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvshare.coordinator.daemon.control import api
from tests.daemon.conftest import connect, coordinators  # noqa: F401 (fixtures)
from tests.harness import one_gpu
from tests.unit.cli import replies


def status() -> dict[str, Any]:
    """As the coordinator replies, with two programs of which one runs."""
    harness = one_gpu()
    for name in ("first.py", "second.py"):
        harness.client(name, wanted=True)
    return replies.status(harness) | {"hides_names": False}


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
