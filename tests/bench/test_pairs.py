"""The benchmark of pairs: its arithmetic by hand-made figures, and its whole path with programs that only talk.

Non-goals: figures of a card.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench.pairs.figures import compare, geometric_means, limit_errors, progress
from nvshare.bench.pairs.mixes import WAYS, Job, Mix, Way, mix
from nvshare.bench.pairs.programs import Plan, measure_all
from nvshare.bench.pairs.scenarios import beside_best_effort
from nvshare.bench.workloads.pair_job import in_window, progress_at, rate_between

FAKE = """
import json, os, sys
print("frameworks talk")
print(json.dumps({"ready": True, "versions": {"fake": "1"}}), flush=True)
hooked = "LD_PRELOAD" in os.environ
for line in sys.stdin:
    word, begin, end = line.split()
    assert word == "window" and float(begin) < float(end)
    answer = {"rate": float(os.environ.get("RATE", 60)) if hooked else 100.0}
    if sys.argv[1] == "server":
        answer["latency_ms"] = {"p50": 1.0, "p99": 3.0 if hooked else 2.0}
    print(json.dumps(answer), flush=True)
"""
"""A workload without a GPU, slower under the hook."""


def plan(tmp_path: Path, **changes: Any) -> Plan:
    """With the program above and short windows."""
    program = tmp_path / "fake.py"
    program.write_text(FAKE, encoding="utf-8")
    usual: dict[str, Any] = {
        "command": lambda name: [sys.executable, str(program), name],
        "simulate": "1x1GiB", "seconds": 0.05, "settle_s": 0.01, "deadline": time.monotonic() + 600, "answer_s": 60.0,
    }  # fmt: skip
    return Plan(**usual | changes)


def test_a_rate_has_no_error_of_a_whole_step() -> None:
    """Broken: a training of few steps a second would be off by percents, by luck."""
    ends = [0.0, 1.0, 2.0, 4.0]
    assert [progress_at(moment, ends) for moment in (-1.0, 0.0, 0.5, 3.0, 4.0, 9.0)] == [0.0, 0.0, 0.5, 2.5, 3.0, 3.0]
    assert rate_between(0.5, 3.0, ends) == pytest.approx(2.0 / 2.5)


def test_steps_count_within_the_window() -> None:
    """Broken: work before or after the common window would count, and requests of another time."""
    steps = [(0.0, 0.9), (0.9, 1.1), (1.1, 2.0), (2.0, 3.5), (9.0, 9.5)]
    found = in_window(1.0, 3.0, 0.0, iter(steps))
    assert found["steps"] == 2
    assert found["latencies"] == pytest.approx([0.9, 1.5])
    assert found["rate"] == pytest.approx((3 + 1.0 / 1.5 - 1.5) / 2)


def test_ratios_by_hand() -> None:
    """Broken: a way would be compared with the wrong one, or with one that failed."""
    cases: dict[str, dict[str, Any]] = {
        "native": {"stp": 1.2}, "turns": {"stp": 0.6}, "default": {"stp": 1.5}, "mps": {"failed": "dead"},
        "default_mps": {"stp": 0.6},
    }  # fmt: skip
    compare(cases, WAYS.values())
    assert (cases["default"]["ratio"], cases["default"]["best_way"]) == (1.25, "native")
    assert (cases["default_mps"]["ratio"], cases["default_mps"]["best_way"]) == (0.5, "native")
    assert "ratio" not in cases["native"]
    others = {"native": {"stp": 1.0}, "default": {"stp": 1.0, "ratio": 0.8}}
    means = geometric_means({"server+products": cases, "train+decode": others})
    assert means["default"]["ratio"] == 1.0
    assert means["default"]["over_native"] == pytest.approx(1.25**0.5, abs=1e-4)
    assert means["default"]["over_native_models"] == 1.0


def test_the_whole_path(tmp_path: Path) -> None:
    """Pairing, baselines, ratios, a variable of a job, the policy's reason, and that of a way that is not to be had."""
    ways = [*(WAYS[name] for name in ("native", "turns", "default")), Way("odd", ("--no-such-option",))]
    limited = Mix("limited", (Job("a", (("RATE", "30"),)),))
    told = measure_all([mix("a+b"), mix("server+a+a"), limited], ways, plan(tmp_path))
    json.dumps(told)
    assert told["alone"]["a"]["rates"] == [100.0, 100.0]
    assert told["versions"] == {"fake": "1"}
    pair = told["pairs"]["a+b"]
    assert {name: case["np"] for name, case in pair.items()} == {
        "native": [1.0, 1.0], "turns": [0.6, 0.6], "default": [0.6, 0.6],
    }  # fmt: skip
    assert (pair["default"]["ratio"], pair["default"]["best_way"]) == (0.6, "native")
    assert ["explain" in pair[name] for name in ("native", "turns")] == [False, True]
    assert {name: case["np"] for name, case in told["pairs"]["limited"].items()} == {
        "native": [1.0], "turns": [0.3], "default": [0.3],
    }  # fmt: skip
    triple = told["pairs"]["server+a+a"]["default"]
    assert (triple["stp"], triple["min_np"]) == (1.8, 0.6)
    assert triple["latency_ms"] == {"p50": 1.0, "p99": 3.0}
    assert (triple["p99_over_alone"], triple["p99_ratio"]) == (1.5, 1.5)
    assert "No such option" in told["ways"]["odd"]["skipped"]


def test_no_mps_without_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the card's own slicing would be measured and called MPS."""
    monkeypatch.setenv("PATH", os.defpath)
    told = measure_all([mix("a+b")], [WAYS["mps"]], plan(tmp_path))
    assert "not in PATH" in told["ways"]["mps"]["skipped"]
    assert told["pairs"]["a+b"] == {}


def test_progress_by_hand() -> None:
    """Broken: the figures that everything is judged by."""
    assert progress([30.0, 10.0], [40.0, 20.0]) == {"np": [0.75, 0.5], "stp": 1.25, "min_np": 0.5}


def test_shares_by_hand() -> None:
    """Broken: limits would look held when time is lost, or the reverse."""
    found = limit_errors([0.27, 0.63], (0.3, 0.7))
    assert found == {"share_points": [30.0, 70.0], "share_error_points": 0.0, "over_limit_points": -3.0, "loss": 0.1}
    assert limit_errors([0.35, 0.65], (0.3, 0.7))["share_error_points"] == 5.0


def test_scenarios_by_hand() -> None:
    """Broken: the figures that classes are judged by."""
    native = {"np": [1.0, 0.9], "latency_ms": {"p50": 1.0, "p99": 2.0}, "p99_over_alone": 4.0}
    ours = {"np": [1.0, 0.8], "latency_ms": {"p50": 1.0, "p99": 1.0}, "p99_over_alone": 2.0}
    told = beside_best_effort("server+products", {"native": native, "default": ours, "mps": {"failed": "x"}}, {})
    assert told["default"] == {"p99_over_alone": 2.0, "server_np": 1.0, "harvest": 0.8, "p99_over_native": 0.5}
    assert set(told) == {"native", "default"}
