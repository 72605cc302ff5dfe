"""`nvshare.bench.scale` measures something, in the form that others read.  No test asserts its figures."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.daemon.processes import BOUND_S, ROOT, environment


def test_the_benchmark_gives_its_figures() -> None:
    """Broken if the benchmark did not run, counted nothing, or named its figures otherwise."""
    words = [sys.executable, "-m", "nvshare.bench.scale", "--json", "--clients", "12", "--gpus", "2", "--seconds", "1"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=2 * BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) == {"clients", "gpus", "handovers_per_s", "rss_mb"}
    assert (figures["clients"], figures["gpus"]) == (12, 2)
    assert figures["handovers_per_s"] > 0
    assert figures["rss_mb"] > 0
