"""Failures and their bounds: killed holders, killed coordinators, stopped programs.

Judged by the GPU's own trace and by the programs' exit codes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import zmq

from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.trace import overlaps
from tests.daemon.processes import Hook
from tests.end_to_end.conftest import Node, finish, stop
from tests.waiting import eventually

LONG = "100"
"""Seconds of a program that is stopped or killed long before."""


def start_coordinator_without_turns(node: Node) -> None:
    """The holder keeps its lease, also on a machine so busy that its GPU is idle for a moment."""
    node.start_coordinator("--quantum=60s", variables={"NVSHARE_IDLE_RELEASE": "0"})


def two(node: Node, saturate: Path) -> list[int]:
    """Two saturating programs that have both worked already."""
    found = [node.run([str(saturate), LONG, "200000", "4"], f"--name=p{index}").pid for index in range(2)]
    for pid in found:
        node.await_work(pid)
    return found


def go_on(node: Node, pids: Iterable[int]) -> None:
    """Each works from now on."""
    now_ns = time.monotonic_ns()
    for pid in pids:
        node.await_work(pid, after_ns=now_ns)


def end_apart(node: Node) -> None:
    """All end in order, and were never on the GPU together."""
    for process in node.started:
        stop(process)
    assert overlaps(node.trace()) == []


def test_killed_holder_frees_the_gpu(node: Node, saturate: Path) -> None:
    """SIGKILL of the program that holds the lease: the next one runs, without waiting for its quantum's end."""
    start_coordinator_without_turns(node)
    holder = node.run([str(saturate), LONG, "200000", "4"], "--name=holder")
    node.await_work(holder.pid)
    waiter = node.run([str(saturate), "0.5", "200000", "4"], "--name=waiter")
    eventually(lambda: node.control("status")["gpus"][0]["waiting"] == 1, "the second program to wait")
    killed_ns = time.monotonic_ns()
    holder.kill()
    holder.wait()
    node.await_work(waiter.pid, after_ns=killed_ns)
    assert finish(waiter)["launches"] > 0
    assert overlaps(node.trace()) == []


def test_coordinator_killed_again_and_again(node: Node, saturate: Path) -> None:
    """A crash loop: each new coordinator takes over, both programs go on, never two holders."""
    node.start_coordinator("--quantum=10ms")
    pids = two(node, saturate)
    for _ in range(3):
        node.kill_coordinator()
        node.start_coordinator("--quantum=10ms")
        go_on(node, pids)
    end_apart(node)


def test_holder_dies_while_the_coordinator_is_away(node: Node, saturate: Path) -> None:
    """The journal names a holder that is dead: the new coordinator must not wait for it."""
    start_coordinator_without_turns(node)
    holder = node.run([str(saturate), LONG, "200000", "4"])
    node.await_work(holder.pid)
    waiter = node.run([str(saturate), "0.5", "200000", "4"])
    eventually(lambda: node.control("status")["gpus"][0]["waiting"] == 1, "the second program to wait")
    node.kill_coordinator()
    holder.kill()
    holder.wait()
    start_coordinator_without_turns(node)
    assert finish(waiter)["launches"] > 0
    assert overlaps(node.trace()) == []


def test_stopped_holder_does_not_break_exclusivity(node: Node, saturate: Path) -> None:
    """A holder under SIGSTOP can neither drain nor answer; when it goes on, the turns go on."""
    node.start_coordinator("--quantum=20ms")
    pids = two(node, saturate)
    os.kill(pids[0], signal.SIGSTOP)
    os.waitid(os.P_PID, pids[0], os.WSTOPPED)
    os.kill(pids[0], signal.SIGCONT)
    go_on(node, pids)
    end_apart(node)


def test_memory_that_is_only_reported_is_not_counted(node: Node) -> None:
    """Broken: a process without memory reports the whole card, and all others are out of memory."""
    node.start_coordinator()
    uuid = node.control("status")["gpus"][0]["uuid"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    liar = Hook(context, RuntimeDir(node.directory).hooks_socket).hello("liar", memory_mode=int(MemoryMode.DEVICE))
    liar.send(messages.AttachGpu(0, uuid, 0, False, 1 << 47, 1 << 47, 1 << 47))
    liar.next(messages.GpuSettings)
    eventually(lambda: node.control("status")["gpus"][0]["resident_bytes"] == 0, "its report is checked")
    assert "liar" in node.log()
    context.destroy(0)
