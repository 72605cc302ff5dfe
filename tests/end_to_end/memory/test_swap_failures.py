"""Deaths in the middle of a hand-over in mode `swap`: real coordinator, real hook, jobs that compare their memory.

Moves are slowed down by the simulated driver, so that there is a middle to die in.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.end_to_end.conftest import Node, stop
from tests.waiting import eventually

MIB = 1 << 20
JOB_MIB = 40
SLOW = {"NVSHARE_SIM_FAULTS": "slow:cuMemUnmap=5000000,slow:cuMemMap=5000000"}


def job(node: Node) -> subprocess.Popen[str]:
    """One that works until it is stopped."""
    command = [sys.executable, "-m", "nvshare.bench.workloads.resident", f"--mib={JOB_MIB}", "--steps=1000000"]
    process = node.run([*command, "--step-ms=2"], "--memory=swap", variables=SLOW)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return process


def gpu(node: Node) -> dict[str, Any]:
    """As nvshare-ctl shows it."""
    found: dict[str, Any] = node.control("status")["gpus"][0]
    return found


def await_move(node: Node) -> None:
    """Until memory moves for a hand-over."""
    eventually(lambda: (shown := gpu(node))["moving"] > 0 and shown["evict_orders"] > 0, "memory to move")


@pytest.mark.parametrize("node", ["1x64MiB"], indirect=True)
def test_a_program_killed_while_memory_moves(node: Node) -> None:
    """Broken: what a dead program had on the card or was to get stays taken, and the other one waits for it."""
    node.start_coordinator("--quantum=50ms")
    killed, stays = job(node), job(node)
    await_move(node)
    killed.kill()
    killed.wait()
    told = stop(stays)
    assert told["mismatches"] == 0
    eventually(lambda: gpu(node)["resident_bytes"] == 0, "all memory to be free")
    assert gpu(node)["late_switches"] == 0


@pytest.mark.parametrize("node", ["1x64MiB"], indirect=True)
def test_a_coordinator_killed_while_memory_moves(node: Node) -> None:
    """Broken: a hand-over that nobody leads any more costs a program its data, or stands still for ever."""
    node.start_coordinator("--quantum=50ms")
    jobs = [job(node) for _ in range(2)]
    for _ in range(2):
        await_move(node)
        node.kill_coordinator()
        node.start_coordinator("--quantum=50ms")
    assert [stop(process)["mismatches"] for process in jobs] == [0, 0]
    eventually(lambda: gpu(node)["resident_bytes"] == 0, "all memory to be free")
