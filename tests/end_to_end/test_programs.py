"""Unmodified programs under the whole product: CuPy, and some that hardly use the driver.

Non-goals: taking turns as such (test_sharing.py).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import overlaps
from tests.end_to_end.conftest import Node, stop
from tests.waiting import eventually

PROGRAMS = Path(__file__).with_name("programs")
NOT_INITIALIZED, NO_DEVICE = 3, 100


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed (extra cupy)")
def test_two_cupy_programs(node: Node) -> None:
    """CuPy reaches the driver through a real libcudart: its work takes turns too, and its data stays its own."""
    node.start_coordinator("--quantum=20ms")
    command = [sys.executable, str(PROGRAMS / "cupy_copies.py"), "100"]
    both = [node.run(command, "--memory=device", f"--name=cupy{index}") for index in range(2)]
    node.await_handovers(10)
    results = [stop(process) for process in both]
    assert all(result["rounds"] > 0 and result["wrong"] == 0 for result in results), results
    trace = node.trace()
    assert {busy.process_id for busy in trace} == {process.pid for process in both}
    assert overlaps(trace) == []


INTRODUCTION = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
result = cuda.cuInit(0)
print(result, threads() - before, flush=True)
if result == 0 and os.fork() == 0:
    print(cuda.cuInit(0), threads() - 1, flush=True)
    os._exit(0)
input()
"""


def test_a_program_introduces_itself_while_the_driver_begins(node: Node) -> None:
    """Broken: its first question about memory waits for what could have been asked before; or a fork's child, which
    cannot use the GPU, is known, too."""
    node.start_coordinator()
    process = node.run([sys.executable, "-c", INTRODUCTION], "--name=early")
    assert process.stdout is not None
    assert process.stdout.readline() == "0 2\n", "the agent, and the driver's thread for checkpoints"
    assert process.stdout.readline() == f"{NOT_INITIALIZED} 0\n"
    eventually(
        lambda: (
            [(client["name"], client["process_id"]) for client in node.control("status")["clients"]]
            == [("early", process.pid)]
        ),
        "the program to be known",
    )
    eventually(lambda: node.control("status")["gpus"][0]["clients"] == 1, "its GPU to be known")
    process.communicate("\n")
    assert process.returncode == 0


def test_a_program_that_may_see_no_gpu_begins_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each of the many programs that are kept from the GPU by CUDA_VISIBLE_DEVICES has a thread and a
    connection."""
    node.start_coordinator()
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        process = node.run([sys.executable, "-c", INTRODUCTION])
        assert process.stdout is not None
        assert process.stdout.readline() == f"{NO_DEVICE} 0\n"
        assert node.control("status")["clients"] == []
        process.communicate("\n")
