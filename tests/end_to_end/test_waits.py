"""Messages to the user of a program that waits for the GPU."""

from __future__ import annotations

import fcntl
import getpass
import importlib.util
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO

import pytest

from tests.end_to_end.conftest import Node, stop
from tests.waiting import eventually

WAITER = Path(__file__).with_name("programs") / "waiter.py"


def hold(node: Node, saturate: Path) -> subprocess.Popen[str]:
    """A program that holds the GPU for as long as the test needs: its kernels are long, so that it never seems idle."""
    node.start_coordinator("--quantum=10min")
    holder = node.run([str(saturate), "600", "200000000", "8"], "--name=holder.py")
    node.await_work(holder.pid)
    return holder


def test_a_long_wait_is_said(node: Node, saturate: Path) -> None:
    """A user who waits learns for whom, and when it is over; with NVSHARE_LOG=error nothing is printed."""
    holder = hold(node, saturate)
    said = node.run([str(saturate), "600", "200000", "4"])
    silent = node.run([str(saturate), "0.1", "200000", "4"], variables={"NVSHARE_LOG": "error"})
    assert said.stderr is not None
    first = said.stderr.readline()
    assert first.startswith(f"nvshare: waiting for GPU 0, held by holder.py ({getpass.getuser()}); "), first
    stop(holder)
    second = said.stderr.readline()
    assert second.startswith("nvshare: GPU 0 after "), second
    said.send_signal(signal.SIGTERM)
    assert said.communicate()[1] == ""
    assert silent.communicate()[1] == ""


def waiter(node: Node, *words: str) -> subprocess.Popen[str]:
    """A Python program whose thread sleeps before the gate."""
    process = node.run([sys.executable, str(WAITER), *words])
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    eventually(lambda: state_of(node, process) == "waiting", "a program that waits")
    return process


def state_of(node: Node, process: subprocess.Popen[str]) -> str | None:
    seats = [c["seats"] for c in node.control("status")["clients"] if c["process_id"] == process.pid]
    return str(seats[0][0]["phase"]) if seats and seats[0] else None


@pytest.mark.parametrize("words", [(), ("held", "threads"), ("busy",)], ids="+".join)
def test_an_interrupt_ends_a_wait(node: Node, saturate: Path, words: tuple[str, ...]) -> None:
    """Ctrl-C ends a program that waits for the GPU, whoever has the GIL."""
    hold(node, saturate)
    process = waiter(node, *words)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert "KeyboardInterrupt" in errors.splitlines(), errors
    assert process.returncode == -signal.SIGINT
    assert "result" not in out


def test_a_handler_runs_and_the_wait_goes_on(node: Node, saturate: Path) -> None:
    """A program's own handlers run during the wait; one that raises nothing changes nothing, one that raises ends it.

    SIGTERM without a handler ends the program.
    """
    holder = hold(node, saturate)
    plain = waiter(node, "held")
    plain.terminate()
    assert plain.wait() == -signal.SIGTERM
    ends, goes_on = waiter(node, "SIGTERM=exit", "held"), waiter(node, "SIGINT=print", "held")
    assert goes_on.stdout is not None
    for _ in range(2):
        goes_on.send_signal(signal.SIGINT)
        assert goes_on.stdout.readline() == "handler\n"
    ends.send_signal(signal.SIGTERM)
    assert ends.wait() == 7
    assert state_of(node, goes_on) == "waiting"
    stop(holder)
    assert goes_on.communicate()[0] == "result 0\n"


def test_a_thread_that_keeps_the_gil_delays_no_lease(node: Node, saturate: Path) -> None:
    """Broken: the interrupted thread waits for the GIL, and its owner for a lock of that thread: a deadlock."""
    holder = hold(node, saturate)
    process = waiter(node, "stuck")
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.flush()
    eventually(lambda: unread_bytes(process.stdin) == 0, "a thread that keeps the GIL and reads on")
    process.send_signal(signal.SIGINT)
    stop(holder)
    node.await_work(process.pid)
    _, errors = process.communicate("\n")
    assert "KeyboardInterrupt" in errors.splitlines(), errors


def unread_bytes(pipe: IO[str] | None) -> int:
    """What the other end of a pipe has not read yet."""
    answer = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, answer)  # type: ignore[arg-type]
    return int.from_bytes(answer, sys.byteorder)


CUPY = """
import cupy, sys
kernel = cupy.RawKernel('extern "C" __global__ void nvs_busy(unsigned long long ns) {}', "nvs_busy")
def step():
    kernel((1,), (1,), (cupy.uint64(1000),))
    cupy.cuda.Stream.null.synchronize()
step()
print("ready", flush=True)
sys.stdin.readline()
try:
    step()
except RuntimeError as error:
    print(error, flush=True)
    step()
"""


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed: pip install '.[cupy]'")
def test_a_library_ends_its_wait_too(node: Node, saturate: Path, tmp_path: Path) -> None:
    """CuPy raises an exception of its own; KeyboardInterrupt comes as soon as Python code runs."""
    node.start_coordinator("--quantum=10min")
    process = node.run([sys.executable, "-c", CUPY], variables={"CUPY_CACHE_DIR": str(tmp_path)})
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    node.await_work(node.run([str(saturate), "600", "200000000", "8"]).pid)
    process.stdin.write("\n")
    process.stdin.flush()
    eventually(lambda: state_of(node, process) == "waiting", "a program that waits")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert "CUDA_ERROR_OPERATING_SYSTEM" in out
    assert "KeyboardInterrupt" in errors.splitlines(), errors
