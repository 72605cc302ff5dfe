"""`nvshare.bench.scale` measures something, in the form that others read.  No test asserts its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from nvshare.scheduler_policies.registry import BUILT_IN
from tests.daemon.processes import ROOT, environment


def run(*words: str) -> dict[str, Any]:
    """Its JSON."""
    command = [sys.executable, "-m", "nvshare.bench.scale", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_the_benchmark_gives_its_figures() -> None:
    """Broken if the benchmark did not run, counted nothing, or named its figures otherwise."""
    figures = run("--clients", "12", "--gpus", "2", "--seconds", "1")
    assert set(figures) == {"clients", "gpus", "handovers_per_s", "rss_mb", "machine"}
    assert (figures["clients"], figures["gpus"]) == (12, 2)
    assert figures["handovers_per_s"] > 0
    assert figures["rss_mb"] > 0


def test_the_cost_of_an_event_is_given_for_each_policy() -> None:
    """Broken if the clients stopped working, or a policy was left out."""
    cost = run("--cost", "--clients", "20", "--events", "100")["cost"]
    assert {(one["policy"], one["memory"]) for one in cost} == {(p, m) for p in BUILT_IN for m in ("fits", "short")}
    assert all(one["median_us"] > 0 for one in cost)
