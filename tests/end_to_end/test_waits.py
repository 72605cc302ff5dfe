"""What a user sees of a wait for the GPU."""

from __future__ import annotations

import getpass
import subprocess
from pathlib import Path

from tests.end_to_end.conftest import Node, stop

BOUND_S = 120.0


def hold(node: Node, saturate: Path, *options: str) -> subprocess.Popen[str]:
    """A program that holds the GPU for as long as the test needs."""
    node.start_coordinator("--quantum=10min")
    holder = node.run([str(saturate), "600", "200000", "4"], "--name=holder.py", *options)
    node.await_work(holder.pid)
    return holder


def test_a_long_wait_is_said(node: Node, saturate: Path) -> None:
    """A user who waits learns for whom, and when it is over; with NVSHARE_LOG=error nothing is printed."""
    holder = hold(node, saturate)
    short = [str(saturate), "0.1", "200000", "4"]
    said, silent = node.run(short), node.run(short, variables={"NVSHARE_LOG": "error"})
    assert said.stderr is not None
    first = said.stderr.readline()
    assert first.startswith(f"nvshare: waiting for GPU 0, held by holder.py ({getpass.getuser()}); "), first
    stop(holder)
    _, errors = said.communicate(timeout=BOUND_S)
    assert errors.startswith("nvshare: GPU 0 after "), errors
    assert len(errors.splitlines()) == 1
    assert silent.communicate(timeout=BOUND_S)[1] == ""
