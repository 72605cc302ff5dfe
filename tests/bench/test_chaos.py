"""nvshare.bench.chaos: a short run without a failure, and witnesses that see failures."""

from __future__ import annotations

from pathlib import Path

from nvshare.bench.chaos import Trace
from nvshare.simulated_gpu.trace import Busy
from tests.bench.test_benches_run import run


def test_a_short_run_is_clean() -> None:
    """Broken if a death or a stop of coordinator or client cost another program its work, its data or its turn."""
    told = run("nvshare.bench.chaos", "--minutes=1", "--disturbances=5", "--seed=7")
    assert told["coordinator_kills"] > 0
    assert told["client_kills"] > 0
    assert (told["app_failures"], told["double_holds"], told["data_mismatches"]) == (0, 0, 0), told["details"]
    assert told["details"]["kernels"] > 0


def test_the_trace_shows_two_processes_at_once(tmp_path: Path) -> None:
    """Broken if chaos could not see what it is there to find."""
    trace = Trace(tmp_path / "unused")
    trace.judge([Busy(0, 1, 0, 100, "kernel"), Busy(0, 1, 50, 300, "kernel"), Busy(0, 2, 300, 400, "kernel")])
    assert trace.double_holds == []
    trace.judge([Busy(1, 3, 350, 360, "kernel"), Busy(0, 1, 399, 500, "kernel")])
    assert trace.double_holds == ["2 and 1: 1 ns at 399"]
