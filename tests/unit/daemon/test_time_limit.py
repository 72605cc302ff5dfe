"""A policy of another package that does not come back is interrupted."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import pytest

from nvshare.coordinator.daemon import time_limit
from nvshare.coordinator.engine.policy_guard import PolicyGuard
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import Allotment, GpuView, Happened, JobView, Plan, PolicyBase
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness


class _Loops(PolicyBase):
    """Never comes back from one of its operations."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.swallowed = 0

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        while self.operation == "decide":
            pass
        while self.operation == "swallow":
            while True:
                try:
                    try:
                        len(str(jobs))
                    except BaseException:
                        self.swallowed += 1
                except BaseException:
                    self.swallowed += 1
        return Plan((Allotment(jobs[0].client, gpu.quantum_ns),))

    def observe(self, happened: Happened) -> None:
        while self.operation == "observe":
            pass


@pytest.mark.parametrize("operation", ["decide", "swallow", "observe"])
def test_a_policy_that_loops_is_replaced(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a bug in somebody's policy would stop the coordinator, and every program of the node with it."""
    monkeypatch.setattr(PolicyGuard, "time_limit", staticmethod(partial(time_limit.TimeLimit, 0.02)))
    before = signal.getsignal(signal.SIGALRM)
    harness = Harness(lambda name, uuid: _Loops(operation) if name == "loops" else create(name, uuid), policy="loops")
    harness.gpu()
    a, b = harness.client(wanted=True), harness.client(wanted=True)
    assert a.granted() is not None
    a.release()
    assert b.granted() is not None
    assert harness.gpu_snapshot().rules.policy == "round_robin"
    assert harness.logged("TimeoutError: it took longer than")
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_policy_that_takes_much_of_the_time_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: decisions of 150 ms each, all within the limit, stop the coordinator for most of the time."""
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    limit = time_limit.TimeLimit(3600.0)

    def slow() -> None:
        nonlocal seconds
        seconds += 0.15

    for _ in range(20):
        seconds += 1.5  # a tenth of the time
        limit(slow)
    for _ in range(8):
        limit(slow)
    with pytest.raises(time_limit.PolicyTimeoutError, match="1 ms, the rest of 10% of the time"):
        limit(lambda: [None for _ in iter(int, 1)])


class _Hard(PolicyBase):
    """Cannot be made, or freed."""

    freed = 0

    def __init__(self, *, made: bool) -> None:
        while not made:
            pass

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        raise AssertionError

    def __del__(self) -> None:
        _Hard.freed += 1


@pytest.mark.parametrize("made", [True, False])
def test_a_policy_is_made_within_its_time_and_never_freed(made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `set policy` of a package whose constructor or destructor waits silences the coordinator."""
    monkeypatch.setattr(registry, "create", lambda name, uuid: _Hard(made=made))
    monkeypatch.setattr(time_limit, "KEPT_S", 0.02)
    with nullcontext() if made else pytest.raises(registry.BrokenPolicyError, match="it took longer than 20 ms"):
        time_limit.make_policy("of-a-package", "")
    gc.collect()
    assert _Hard.freed == 0


def test_only_the_main_thread_can_be_interrupted() -> None:
    """Broken: a coordinator in another thread, as in a notebook, would not start."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(time_limit.possible()))
    thread.start()
    thread.join()
    assert found == [False]
    assert time_limit.possible()
