"""Pacing by itself, against a model of a driver (programs/pacing_check.c): bounds that hold, costs that are counted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hook.compiled import GATE, SOURCE, compile_c

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, under the sanitizers."""
    out = tmp_path_factory.mktemp("pacing") / "check"
    flags = ("-fsanitize=address,undefined",)
    sources = (SOURCE / "inflight" / f"{name}.c" for name in ("pacing", "stream"))
    return compile_c(out, PROGRAMS / "pacing_check.c", *sources, *GATE, flags=flags)


def run(program: Path, scenario: str, regime: str) -> None:
    # Events of the threads that ended last are not freed by the model.
    done = subprocess.run(
        [str(program), scenario, regime], capture_output=True, text=True, check=False,
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


@pytest.mark.parametrize("regime", ["alone", "paced"])
@pytest.mark.parametrize(
    "scenario",
    [
        *("kernels", "long-kernels", "streams", "graphs", "long-graphs", "threads"),
        *("blocked", "blocked-at-first", "blocked-again", "behind-host-function"),
    ],
)
def test_bounds(check: Path, scenario: str, regime: str) -> None:
    """Broken: a revoke waits for more than the budget, the GPU falls idle for it, or a program is held up for good."""
    run(check, scenario, regime)


@pytest.mark.parametrize("scenario", ["mixture", "medley", "medley-streams", "many-kernels", "longer"])
def test_kinds_of_work_that_differ(check: Path, scenario: str) -> None:
    """Broken: short work after long lets the GPU fall idle, long work after short makes a revoke wait."""
    run(check, scenario, "paced")


@pytest.mark.parametrize("scenario", ["light", "interpreted", "turning", "warmed-up", "run-ahead", "synchronizing"])
def test_who_is_alone_does_not_notice(check: Path, scenario: str) -> None:
    """Broken: a program that has the GPU to itself pays for those who might come, or its queue grows without bound."""
    run(check, scenario, "alone")


@pytest.mark.parametrize("regime", ["alone", "paced"])
def test_threads_that_end_leave_nothing(check: Path, regime: str) -> None:
    """Broken: a program that starts a thread for each request leaves events in the driver, without bound."""
    run(check, "ended", regime)


@pytest.mark.parametrize("scenario", ["ended-context", "context-ended-first", "forked"])
def test_events_that_are_gone_are_not_destroyed(check: Path, scenario: str) -> None:
    """Broken: an event of a context that has ended, or of the parent process, is given to the driver once more; or one
    context's end leaks the events that the thread has in others."""
    run(check, scenario, "paced")


@pytest.mark.parametrize("scenario", ["other-context", "default-stream", "capturing"])
def test_only_where_events_may_be(check: Path, scenario: str) -> None:
    """Broken: streams of a context that is not current are not paced, or a capture is disturbed."""
    run(check, scenario, "paced")
