"""Gangs of real processes on two simulated GPUs, judged by the GPUs' own trace.

Beside the members there is one competitor on the first GPU and two on the second one.  Under round robin alone the
members' turns have different periods, and drift apart; those of a gang begin as soon as both GPUs have drained.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import overlaps
from tests.conftest import ROOT, Built
from tests.end_to_end.conftest import Node, stop
from tests.hook.compiled import compile_c
from tests.waiting import eventually

LONG = "100"
"""Seconds of a program that is stopped long before."""


def start(node: Node, saturate: Path, gpu: int, *options: str) -> subprocess.Popen[str]:
    """A program that keeps one GPU busy."""
    return node.run([str(saturate), LONG, "1000000", "4"], *options, variables={"CUDA_VISIBLE_DEVICES": str(gpu)})


@pytest.mark.parametrize("node", ["2x1GiB"], indirect=True)
def test_members_start_together(node: Node, saturate: Path) -> None:
    """Broken: a job of two processes would exchange data with one that is waiting for its GPU."""
    node.start_coordinator("--quantum=30ms")
    node.follow_events()
    members = [start(node, saturate, gpu, "--gang=pair") for gpu in (0, 1)]
    others = [start(node, saturate, gpu) for gpu in (0, 1, 1)]
    for process in (*members, *others):
        node.await_work(process.pid)

    def together() -> int:
        return sum(event["kind"] == "gang_gathered" and event["missing"] == 0 for event in node.events)

    eventually(lambda: together() >= 8, f"turns together\n{node.log()}")
    assert node.control("status")["gangs"][0]["turns"] > 0
    for process in (*members, *others):
        stop(process)
    assert overlaps(node.trace()) == [], "invariant 1: exclusive stays exclusive"


@pytest.mark.parametrize("node", ["2x1GiB"], indirect=True)
def test_the_death_of_a_member_stops_nobody(node: Node, saturate: Path) -> None:
    """Broken: the GPUs would be kept for a gang whose member was killed in the middle of its work."""
    node.start_coordinator("--quantum=20ms")
    members = [start(node, saturate, gpu, "--gang=pair") for gpu in (0, 1)]
    others = [start(node, saturate, gpu) for gpu in (0, 1)]
    for process in (*members, *others):
        node.await_work(process.pid)
    eventually(lambda: node.control("status")["gangs"][0]["turns"] > 2, "turns together")
    members[1].kill()
    members[1].wait()
    killed_ns = max(busy.end_ns for busy in node.trace())
    for process in (members[0], *others):
        node.await_work(process.pid, after_ns=killed_ns)
    eventually(lambda: len(node.control("status")["gangs"][0]["clients"]) == 1, "the gang of one")
    for process in (members[0], *others):
        stop(process)
    eventually(lambda: node.control("status")["gangs"] == [], "no gang is left")


@pytest.mark.parametrize("node", ["2x1GiB"], indirect=True)
def test_graphs_over_both_gpus_keep_to_their_turns(node: Node, built: Built, tmp_path: Path) -> None:
    """Broken: what a graph does on another GPU than its launch runs beside the program whose turn it is there."""
    program = ROOT / "tests" / "hook" / "gate" / "programs" / "graph_gpus.c"
    compiled = compile_c(tmp_path / "graph_gpus", program, built.sim_dir / "libcuda.so.1")
    node.start_coordinator("--quantum=50ms", variables={"NVSHARE_IDLE_RELEASE": "0"})
    running = [node.run([str(compiled)], f"--gang={name}", "--memory=device") for name in ("one", "two")]

    def both(line: str) -> list[str]:
        for process in running:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return [process.stdout.readline().strip() for process in running if process.stdout is not None]

    assert both("begin") == ["ready", "ready"]
    for line in ("last 200000", "build kernel", "loop 50"):
        assert both(line) == ["0", "0"]  # of the line before
    handovers = 0
    while handovers < 3:  # each round is work for both, so that in each at least one waits for the other
        assert both("loop 50") == ["0", "0"]
        handovers = node.control("status")["gpus"][0]["handovers"]
    for process in running:
        assert process.stdout is not None
        last = process.stdout.readline()  # communicate() drops what readline() has buffered
        _, errors = process.communicate()
        assert (process.returncode, last) == (0, "0\n"), errors
        assert "without the leases of all" not in errors, "then what follows is not promised"
    trace = node.trace()
    for process in running:
        assert {busy.gpu for busy in trace if busy.process_id == process.pid} == {0, 1}
    assert overlaps(trace) == []
