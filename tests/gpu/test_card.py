"""The same promises on a real card.  Device memory only: nothing here oversubscribes.

Non-goals: figures (bench/), anything that the simulated GPU can show as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench.harness.fixture import Fixture, compile_program, fixture
from tests.conftest import ROOT, Built
from tests.waiting import eventually

pytestmark = pytest.mark.gpu


def run(*command: str, seconds: float = 110) -> dict[str, Any]:
    """A tool of ours that must succeed; its JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"NVSHARE_MEMORY": "device"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def holder(stand: Fixture) -> object:
    """Holders of the first GPU's lease."""
    return stand.control("status")["gpus"][0]["holders"]


def test_demo_on_the_card(built: Built) -> None:
    """Kernels' own stamps show no overlap: exclusivity holds on silicon, not only in the double."""
    told = run("-m", "nvshare.coordinator.cli.demo", "--seconds", "3", "--json")
    assert told["simulated"] is False
    assert told["violations"] == 0
    assert told["handovers"] > 0


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None and importlib.util.find_spec("cupy") is None, reason="no framework here"
)
def test_frameworks_compute_the_same(built: Built) -> None:
    """Two unmodified PyTorch and CuPy programs give bit for bit what they give alone."""
    cases = ("--case=torch.eager", "--case=cupy.default", "--seconds=0.2", "--budget=100")
    run("-m", "nvshare.bench.compatibility", "--json", *cases)  # its exit code says whether a result differs


def test_killed_holder_frees_the_card(built: Built, tmp_path: Path) -> None:
    """SIGKILL of the program that holds the lease: the next one runs although the quantum is an hour."""
    program = compile_program(ROOT / "bench" / "programs" / "saturate.c", tmp_path)
    with fixture(simulate=None, quantum="3600s") as stand:
        first = stand.start([str(program), "100", "200000", "4"], hooked=True, name="first")
        eventually(lambda: holder(stand), "the first program to hold the lease", 60)
        second = stand.start([str(program), "0.5", "200000", "4"], hooked=True, name="second")
        eventually(lambda: stand.control("status")["gpus"][0]["waiting"], "the second program to wait", 60)
        first.kill()
        first.communicate()
        out, _ = second.communicate(timeout=60)
        assert second.returncode == 0
        assert json.loads(out)["launches"] > 0
