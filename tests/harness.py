"""Worlds of one GPU for tests of the core, with every check on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from nvshare.coordinator.simulation.harness import Harness
from nvshare.scheduler_policies.registry import create


def one_gpu(capacity: int = 1 << 30, **settings: Any) -> Harness:
    """A harness with one GPU."""
    harness = Harness(create, **settings)
    harness.gpu(capacity=capacity)
    return harness


def play_turn(harness: Harness, drain_ms: float = 0.0) -> int:
    """The holder has its turn until it is revoked, drains, and wants the lease again.  Returns its client."""
    (holder,) = harness.gpu_snapshot().leases.holders
    harness.until(lambda: harness.clients[holder].seat().phase == "revoking")
    harness.milliseconds(drain_ms)
    harness.clients[holder].release(wanted=True)
    return holder


def steps(action: Callable[[], object]) -> int:
    """Steps of the interpreter that the action takes: its cost, whatever else the machine does."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count
