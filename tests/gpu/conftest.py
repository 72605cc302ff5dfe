"""`nvshare-run` on the card; the first program starts a coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.conftest import ROOT, Built
from tests.launch.conftest import runtime
from tests.waiting import BOUND_S

__all__ = ["runtime"]  # fixture

RUN = [sys.executable, "-m", "nvshare.coordinator.cli.run"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(runtime_dir: Path) -> dict[str, str]:
    """Of nvshare-run, from this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return plain | {"NVSHARE_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": path}


@pytest.fixture
def hooked(runtime: RuntimeDir, built: Built) -> Run:
    """Runs `nvshare-run` with these arguments to its end, which must be good."""

    def run(*arguments: str, data: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*RUN, *arguments], env=environment(runtime.path) | more, input=data, capture_output=True, text=True,
            timeout=4 * BOUND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
