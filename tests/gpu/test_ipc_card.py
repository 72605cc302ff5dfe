"""Legacy IPC on a real card: by the driver in mode `device`, by the hook in mode `swap`.

No program has more than 200 MiB.

Non-goals: what the simulated GPU shows as well (tests/hook/ipc/test_ipc.py, tests/end_to_end/memory/test_ipc.py).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from nvshare.bench.harness.fixture import Fixture, fixture
from tests.conftest import Built
from tests.end_to_end.conftest import TOLD, Told, finish
from tests.end_to_end.memory.test_ipc import MIB, PROGRAMS, both_write_and_read, refusals
from tests.gpu.conftest import Run
from tests.hook.interception.test_interception_cudart import own_cudart

pytestmark = pytest.mark.gpu


def pair(stand: Fixture, mode: str) -> list[Told]:
    """Two programs that do what they are told, and use the card."""
    options = (f"--memory={mode}",)
    return [Told(stand.start(TOLD, hooked=True, options=options, stdin=subprocess.PIPE)) for _ in range(2)]


@pytest.mark.parametrize("mode", ["device", "swap"])
def test_both_ends_write_and_read(built: Built, mode: str) -> None:
    """Broken: what one process writes into the other's memory does not arrive, on the driver that matters."""
    with fixture(simulate=None) as stand:
        programs = pair(stand, mode)
        both_write_and_read(programs, 100 * MIB, 70 * MIB, 10)
        for process in programs:
            finish(process.process)


def test_the_same_is_refused_as_by_the_driver(built: Built) -> None:
    """Broken: a program that relies on an error of the driver's gets another one in mode `swap`."""
    said = {}
    for mode in ("device", "swap"):
        with fixture(simulate=None) as stand:
            programs = pair(stand, mode)
            said[mode] = refusals(*programs)
            for process in programs:
                finish(process.process)
    print(said)  # pytest shows them when they differ
    del said["device"]["open what is freed"]  # CUDA does not say what becomes of it
    assert said["swap"].pop("open what is freed") != 0
    assert said["device"] == said["swap"]


@pytest.mark.parametrize("mode", ["device", "swap"])
def test_the_runtime_shares(hooked: Run, mode: str) -> None:
    """Broken: the real libcudart cannot hand memory to another process on the real driver."""
    program = (sys.executable, str(PROGRAMS / "ipc_runtime.py"), str(own_cudart()), "3000")
    out = hooked(f"--memory={mode}", "--", *program).stdout
    assert json.loads(out) == {"rounds": 10, "wrong": 0, "child": 0}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here")
@pytest.mark.parametrize("mode", ["device", "swap"])
def test_tensors_go_through_a_queue(hooked: Run, mode: str) -> None:
    """Broken: torch.multiprocessing with tensors on the GPU fails, or the other process sees other values."""
    out = hooked(f"--memory={mode}", "--", sys.executable, str(PROGRAMS / "ipc_torch.py")).stdout
    assert json.loads(out.strip().splitlines()[-1]) == {"rounds": 9, "wrong": 0, "child": 0}
