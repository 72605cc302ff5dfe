"""PyTorch as it is on the simulated GPU, under the hook: a small part of `nvshare.bench.frameworks`.

Non-goals: the whole list, which takes a quarter of an hour.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from nvshare.bench.frameworks import Runs

PYTHON = os.environ.get("NVSHARE_TEST_TORCH") or (sys.executable if importlib.util.find_spec("torch") else "")
LIMIT_S = 300.0

pytestmark = pytest.mark.skipif(not PYTHON, reason="PyTorch is not installed, and NVSHARE_TEST_TORCH names no Python")


@pytest.mark.parametrize("job", ["products", "training", "graph", "compiled"])
def test_pytorch_runs_under_the_hook(job: str, tmp_path: Path) -> None:
    """Broken: PyTorch asks what the simulated driver does not answer, or what the hook answers wrongly."""
    assert Runs(Path(PYTHON), job, tmp_path, LIMIT_S).run("swap", 1)["seconds"]
