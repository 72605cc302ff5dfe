"""Two programs share one GPU: real coordinator, real hook, simulated GPU, judged by the GPU's own trace.

Non-goals: failures of programs or coordinators (test_failures.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from nvshare.simulated_gpu.trace import overlaps
from tests.end_to_end.conftest import Node, finish, stop
from tests.waiting import eventually

LONG = "100"
"""Seconds of a program that is stopped long before."""
BUSY = [sys.executable, "-m", "nvshare.bench.workloads.busy"]


def test_two_programs_take_turns(node: Node, saturate: Path) -> None:
    """The product's purpose: both run, in turns, and no work of one overlaps the other's."""
    node.start_coordinator("--quantum=20ms")
    both = [node.run([str(saturate), LONG, "200000", "4"], f"--name=p{index}") for index in range(2)]
    node.await_handovers(10)
    for process in both:
        assert stop(process)["launches"] > 0
    trace = node.trace()
    assert {busy.process_id for busy in trace} == {process.pid for process in both}
    assert overlaps(trace) == []


def test_idle_holder_gives_the_lease_back_early(node: Node, saturate: Path) -> None:
    """A program that computes a little and then thinks must not keep the others out until its quantum ends."""
    node.start_coordinator("--quantum=60s")
    thinker = node.run([*BUSY, f"--seconds={LONG}", "--burst=4", "--gap-every=1", "--gap-ms=300"], "--name=thinker")
    node.await_work(thinker.pid)
    assert finish(node.run([str(saturate), "0.3", "200000", "4"], "--name=worker"))["launches"] > 0
    assert thinker.poll() is None
    assert node.control("status")["gpus"][0]["idle_releases"] > 0


def test_concurrent_sharing_lets_all_run(node: Node, saturate: Path) -> None:
    """`--sharing concurrent`: nobody waits, so work does overlap, and the check of the other tests can fail."""
    node.start_coordinator("--sharing=concurrent")
    both = [node.run([str(saturate), LONG, "200000", "4"]) for _ in range(2)]
    eventually(lambda: overlaps(node.trace()), "work of one beside work of the other")
    for process in both:
        stop(process)
