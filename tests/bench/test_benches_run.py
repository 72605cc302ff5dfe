"""Every benchmark runs on the simulated GPU and prints what it promises; how fast is not asked here.

Non-goals: figures.
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

from tests.conftest import ROOT


def run(module: str, *words: str) -> dict[str, Any]:
    """Its JSON object."""
    command = [sys.executable, "-m", module, "--json", *words]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_gate() -> None:
    """Without figures of the gate nobody would notice that it has become slow."""
    told = run("nvshare.bench.gate", "--simulate", "--pairs=1", "--calls=500", "--rounds=2")
    assert {"baseline_ns", "hooked_ns", "added_ns", "added_instructions"} <= set(told)
    assert told["simulated"] is True
    assert told["baseline_ns"] > 0
    assert told["hooked_ns"] > 0


def test_handover() -> None:
    """The same for hand-overs; none measured would be a failure."""
    told = run("nvshare.bench.handover", "--simulate", "--seconds=3")
    assert told["handovers"] > 0
    assert set(told["handover_us"]) == {"p50", "p99"}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (extra plots)")
def test_timeline(tmp_path: Path) -> None:
    """The picture in the README can be made again."""
    out = tmp_path / "timeline.png"
    command = [
        sys.executable,
        "-m",
        "nvshare.bench.timeline",
        "--simulate",
        "--seconds=1.5",
        "--start=0.5",
        f"--out={out}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pairs() -> None:
    """The doubles of the workloads answer, and each way has its figures; else nothing is compared on a card."""
    words = ("--pairs=products+tiny,server+data", "--ways=native,turns", "--seconds=0.3", "--settle=0.1")
    told = run("nvshare.bench.pairs", "--simulate", *words)
    assert (told["simulated"], set(told["pairs"])) == (True, {"products+tiny", "server+data"})
    for cases in told["pairs"].values():
        assert all(min(cases[way]["np"]) > 0 for way in ("native", "turns")), cases
    assert set(told["pairs"]["server+data"]["native"]["latency_ms"]) == {"p50", "p99"}
    assert told["geometric_means"]["turns"]["over_native"] > 0


def test_gangs() -> None:
    """All cases are measured, and only one of them has turns together; else the comparison is of nothing."""
    told = run("nvshare.bench.gangs", "--simulate=2x1GiB", "--seconds=1", "--repetitions=1", "--quantum=20ms")
    assert (told["exchange"], told["simulated"]) == ("host", True)
    assert told["alone"]["steps_per_s"] > 0
    assert min(told["alone"]["rivals_steps_per_s"]) > 0
    assert (told["gang"]["gang_turns"] > 0, told["apart"]["gang_turns"]) == (True, 0)
    for case in ("apart", "gang"):
        assert told[case]["steps_per_s"]["median"] > 0
        assert all(0 < share < 1 for share in told[case]["time_share"])


def test_gangs_want_two_gpus() -> None:
    """Broken: with one GPU the figures would be of something else."""
    command = [sys.executable, "-m", "nvshare.bench.gangs", "--simulate=1x1GiB"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "2 GPUs are needed" in done.stderr
    command = [sys.executable, "-m", "nvshare.bench.gangs", "--simulate", "--exchange=nccl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "NCCL needs" in done.stderr
