"""Every benchmark runs on the simulated GPU and prints what it promises; how fast is not asked here.

Non-goals: figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ROOT


def started(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A benchmark that has run to its end."""
    command = [sys.executable, "-m", module, *words]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def lines(module: str, *words: str) -> list[dict[str, Any]]:
    """Its JSON lines."""
    done = started(module, "--json", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(module: str, *words: str) -> dict[str, Any]:
    """Its only JSON line."""
    (told,) = lines(module, *words)
    return told


def run_until(
    enough: Callable[[list[dict[str, Any]]], object], seconds: float, module: str, *words: str
) -> list[dict[str, Any]]:
    """Its JSON lines; for longer and longer, as programs get to nothing in a short time on a busy machine."""
    for factor in (1, 4, 16, 64):
        done = started(module, "--json", f"--seconds={seconds * factor}", *words)
        told = [json.loads(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []
        if told and enough(told):
            return told
    pytest.fail(done.stdout + done.stderr)


def test_gate() -> None:
    """Without figures of the gate nobody would notice that it has become slow."""
    told = run("nvshare.bench.gate", "--simulate", "--pairs=1", "--calls=500", "--rounds=2")
    assert {"baseline_ns", "hooked_ns", "added_ns", "added_instructions"} <= set(told)
    assert told["simulated"] is True
    assert told["baseline_ns"] > 0
    assert told["hooked_ns"] > 0


def test_handover() -> None:
    """The same for hand-overs; none measured would be a failure."""
    (told,) = run_until(lambda told: told[0]["handovers"] > 0, 3, "nvshare.bench.handover", "--simulate")
    assert set(told["handover_us"]) == {"p50", "p99"}


def test_pairs() -> None:
    """The doubles of the workloads answer, and each way has its figures; else nothing is compared on a card."""
    words = ("--simulate", "--pairs=products+tiny,server+data", "--ways=native,turns", "--settle=0.1")

    def all_progress(told: list[dict[str, Any]]) -> bool:
        return all(min(cases[way]["np"]) > 0 for cases in told[0]["pairs"].values() for way in ("native", "turns"))

    (told,) = run_until(all_progress, 0.3, "nvshare.bench.pairs", *words)
    assert (told["simulated"], set(told["pairs"])) == (True, {"products+tiny", "server+data"})
    assert set(told["pairs"]["server+data"]["native"]["latency_ms"]) == {"p50", "p99"}
    assert told["geometric_means"]["turns"]["over_native"] > 0


def test_gangs() -> None:
    """All cases are measured, and the gang has turns together; else the comparison is of nothing."""
    words = ("--simulate=2x1GiB", "--repetitions=1", "--quantum=20ms", "--settle=0.2")
    cases = ("alone", "slicing", "apart", "turns", "auto_apart", "auto")

    def all_run(lines: list[dict[str, Any]]) -> bool:
        (told,) = lines
        steps = [told[case]["steps_per_s"]["median"] for case in cases]
        steps += [rate for case in cases for rate in told[case]["rivals_steps_per_s"]]
        return bool(min(steps) > 0 and told["turns"]["gang_turns"] > 0)

    (told,) = run_until(all_run, 1, "nvshare.bench.gangs", *words)
    assert (told["exchange"], told["simulated"]) == ("host", True)
    assert told["apart"]["gang_turns"] == told["slicing"]["gang_turns"] == 0
    assert told["total_over_better"] > 0


def test_gangs_want_two_gpus() -> None:
    """Broken: with one GPU the figures would be of something else."""
    done = started("nvshare.bench.gangs", "--simulate=1x1GiB")
    assert done.returncode == 1
    assert "2 GPUs are needed" in done.stderr
    assert "NCCL needs" in started("nvshare.bench.gangs", "--simulate", "--exchange=nccl").stderr


def test_park() -> None:
    """Broken: a program is not parked, or finds other memory, and the benchmark does not notice."""
    told = run("nvshare.bench.park", "--simulate", "--gib=0.06", "--cycles=2", "--idle=1")
    (one,) = told["sizes"]
    assert (one["mismatches"], one["left_mib"], told["idle"]["left_mib"]) == (0, 0, 0)
    assert one["had_mib"] >= 60
    assert (len(told["moved"]["standing_s"]), told["moved"]["mismatches"]) == (4, 0)
