"""Legacy IPC on a real card: by the driver in mode `device`, by the hook in mode `swap`.

No program has more than 200 MiB.

Non-goals: what the simulated GPU shows as well (tests/hook/ipc/test_ipc.py, tests/end_to_end/memory/test_ipc.py).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.memory.test_ipc import PROGRAMS, ipc_program
from tests.gpu.conftest import Run
from tests.hook.interception.test_interception_cudart import own_cudart

__all__ = ["ipc_program"]  # fixture

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("mode", ["device", "swap"])
def test_both_ends_write_and_read(hooked: Run, ipc_program: Path, mode: str) -> None:
    """Broken: what one process writes into the other's memory does not arrive, on the driver that matters."""
    out = hooked(f"--memory={mode}", "--", str(ipc_program), "pair", "10", "100", "70").stdout
    assert out.count('"mismatches": 0') == 2, out


def test_the_same_is_refused_as_by_the_driver(hooked: Run, ipc_program: Path) -> None:
    """Broken: a program that relies on an error of the driver's gets another one in mode `swap`."""
    said = (hooked(f"--memory={mode}", "--", str(ipc_program), "errors").stdout for mode in ("device", "swap"))
    of_driver, of_hook = (dict(line.split() for line in out.splitlines()) for out in said)
    print(of_driver, of_hook)  # pytest shows them when they differ
    del of_driver["open_freed"]  # CUDA does not say what becomes of it
    assert of_hook.pop("open_freed") != "0"
    assert of_driver == of_hook


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
