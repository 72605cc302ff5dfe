"""Gangs of real processes on two simulated GPUs, judged by the GPUs' own trace.

Beside the members there is one competitor on the first GPU and two on the second one.  Under round robin alone the
members' turns have different periods, and drift apart; a gang's begin together.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import Busy, overlaps
from tests.conftest import ROOT, Built
from tests.end_to_end.conftest import Node, stop
from tests.hook.compiled import compile_c
from tests.waiting import eventually

LONG = "100"
"""Seconds of a program that is stopped long before."""
ENOUGH = 0.6
"""Of the members' time together: in a gang it is 0.9 and more where processors are free, without one 0.3 to 0.5."""
Span = tuple[int, int]


def start(node: Node, saturate: Path, gpu: int, *options: str) -> subprocess.Popen[str]:
    """A program that keeps one GPU busy."""
    return node.run([str(saturate), LONG, "1000000", "4"], *options, variables={"CUDA_VISIBLE_DEVICES": str(gpu)})


def turns(trace: Sequence[Busy], process_id: int) -> list[Span]:
    """From when to when the process had its GPU without anybody else's work in between, in order."""
    gpu = next(busy.gpu for busy in trace if busy.process_id == process_id)
    found: list[Span] = []
    before = 0
    for busy in sorted((busy for busy in trace if busy.gpu == gpu), key=lambda busy: busy.start_ns):
        if busy.process_id == process_id:
            if before == process_id:
                found[-1] = (found[-1][0], busy.end_ns)
            else:
                found.append((busy.start_ns, busy.end_ns))
        before = busy.process_id
    return found


def shared(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Which part of the time of one's turns the other one worked as well."""
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)
    return both / sum(end - begin for begin, end in one)


def run(node: Node, saturate: Path, *options: str) -> tuple[list[Span], list[Span]]:
    """Two members with these options among competitors; their turns while all five were at it."""
    node.start_coordinator("--quantum=30ms")
    members = [start(node, saturate, gpu, *options) for gpu in (0, 1)]
    others = [start(node, saturate, gpu) for gpu in (0, 1, 1)]
    for process in (*members, *others):
        node.await_work(process.pid)
    begun_ns = max(busy.end_ns for busy in node.trace())
    pids = [process.pid for process in members]

    def spans() -> list[list[Span]]:
        trace = [busy for busy in node.trace() if busy.start_ns > begun_ns]
        if not set(pids) <= {busy.process_id for busy in trace}:
            return [[], []]
        return [turns(trace, pid)[1:-1] for pid in pids]

    eventually(lambda: all(len(each) >= 12 for each in spans()), f"turns of both\n{node.log()}")
    found = spans()
    status = node.control("status")
    assert [gang["turns"] > 0 for gang in status["gangs"]] == ([True] if options else [])
    for process in (*members, *others):
        stop(process)
    assert overlaps(node.trace()) == [], "invariant 1: exclusive stays exclusive"
    return found[0], found[1]


@pytest.mark.parametrize("node", ["2x1GiB"], indirect=True)
def test_members_work_at_the_same_time(node: Node, saturate: Path) -> None:
    """Broken: a job of two processes would exchange data with one that is waiting for its GPU."""
    first, second = run(node, saturate, "--gang=pair")
    assert min(shared(first, second), shared(second, first)) > ENOUGH


@pytest.mark.parametrize("node", ["2x1GiB"], indirect=True)
def test_without_a_gang_they_drift_apart(node: Node, saturate: Path) -> None:
    """The check above can fail: the same programs in no gang work at different times as well."""
    first, second = run(node, saturate)
    assert min(shared(first, second), shared(second, first)) < ENOUGH


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
        out, errors = process.communicate()
        assert (process.returncode, out) == (0, "0\n"), errors
        assert "without the leases of all" not in errors, "then what follows is not promised"
    trace = node.trace()
    for process in running:
        assert {busy.gpu for busy in trace if busy.process_id == process.pid} == {0, 1}
    assert overlaps(trace) == []
