"""Legacy IPC on a real card: by the driver in mode `device`, by the hook in mode `swap`.

No program has more than 200 MiB.

Non-goals: what the simulated GPU shows as well (tests/hook/ipc/test_ipc.py, tests/end_to_end/memory/test_ipc.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.conftest import ROOT, Built
from tests.end_to_end.memory.test_ipc import PROGRAMS, ipc_program
from tests.hook.interception.test_interception_cudart import own_cudart
from tests.launch.conftest import runtime
from tests.waiting import BOUND_S

__all__ = ["ipc_program", "runtime"]  # fixtures

pytestmark = pytest.mark.gpu

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(runtime: RuntimeDir, built: Built) -> Run:
    """nvshare-run with these arguments on the card, which must succeed: (stdout, stderr)."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"NVSHARE_RUNTIME_DIR": str(runtime.path), "PYTHONPATH": path}

    def start(mode: str, *command: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "nvshare.coordinator.cli.run", f"--memory={mode}", "--", *command],
            env=environment, capture_output=True, text=True, timeout=4 * BOUND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr

    return start


@pytest.mark.parametrize("mode", ["device", "swap"])
def test_both_ends_write_and_read(run: Run, ipc_program: Path, mode: str) -> None:
    """Broken: what one process writes into the other's memory does not arrive, on the driver that matters."""
    out, errors = run(mode, str(ipc_program), "pair", "10", "100", "70")
    assert out.count('"mismatches": 0') == 2, out + errors


def test_the_same_is_refused_as_by_the_driver(run: Run, ipc_program: Path) -> None:
    """Broken: a program that relies on an error of the driver's gets another one in mode `swap`."""
    of_driver, of_hook = (dict(line.split() for line in run(mode, str(ipc_program), "errors")[0].splitlines())
                          for mode in ("device", "swap"))  # fmt: skip
    print(of_driver, of_hook)  # pytest shows them when they differ
    del of_driver["open_freed"]  # CUDA does not say what becomes of it
    assert of_hook.pop("open_freed") != "0"
    assert of_driver == of_hook


@pytest.mark.parametrize("mode", ["device", "swap"])
def test_the_runtime_shares(run: Run, mode: str) -> None:
    """Broken: the real libcudart cannot hand memory to another process on the real driver."""
    out, _ = run(mode, sys.executable, str(PROGRAMS / "ipc_runtime.py"), str(own_cudart()), "3000")
    assert json.loads(out) == {"rounds": 10, "wrong": 0, "child": 0}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here")
@pytest.mark.parametrize("mode", ["device", "swap"])
def test_tensors_go_through_a_queue(run: Run, mode: str) -> None:
    """Broken: torch.multiprocessing with tensors on the GPU fails, or the other process sees other values."""
    out, _ = run(mode, sys.executable, str(PROGRAMS / "ipc_torch.py"))
    assert json.loads(out.strip().splitlines()[-1]) == {"rounds": 9, "wrong": 0, "child": 0}
