"""Frameworks' own counters of the asynchronous pool, under the hook and without it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from nvshare.bench.harness.fixture import Fixture, fixture

PROGRAM = Path(__file__).parent / "programs" / "pool_counters.py"
MODES = ("device", "managed", "swap")


def counters(stand: Fixture, framework: str, mode: str | None) -> object:
    """Output of the program in a mode; None: without the hook."""
    extra = {"CUDA_VISIBLE_DEVICES": "0"}  # MemoryAsyncPool gives one GPU's pool to all
    if mode is not None:
        extra["NVSHARE_MEMORY"] = mode
    process = stand.start([sys.executable, str(PROGRAM), framework], hooked=mode is not None, extra=extra)
    told, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(told)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed (extra cupy)")
def test_cupy_says_the_same() -> None:
    """Broken: in a mode that moves memory MemoryAsyncPool says that nothing is used."""
    with fixture(simulate="1x1GiB") as stand:
        wanted = counters(stand, "cupy", None)
        assert {mode: counters(stand, "cupy", mode) for mode in MODES} == dict.fromkeys(MODES, wanted)
