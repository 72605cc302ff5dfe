"""Is work beside an open capture drained on a real card?

How: each case queues a kernel of 0.3 s beside a capture and notes when the kernel was seen to run.  A second program
runs short kernels all the time and notes when it began and ended each.  None of those lies within a long one.  No
program has more than 64 MiB.

Non-goals: what work computes (test_semantics_card.py has the same cases).
"""

from __future__ import annotations

import select
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from nvshare.bench.harness.fixture import Fixture, fixture
from tests.end_to_end.test_semantics import LIMIT, cases, compiled
from tests.waiting import BOUND_S

__all__ = ["compiled"]  # a fixture

pytestmark = pytest.mark.gpu

LONG_NS = 300_000_000
OPTIONS = ("--memory=device", f"--gpu-memory-limit={LIMIT}")

Span = tuple[int, int]


def spans(lines: Iterable[str]) -> list[Span]:
    """Two numbers a line: from, to."""
    return [(int(first), int(last)) for first, last in (line.split() for line in lines)]


def beside(stand: Fixture, program: Path, case: str, noted: Path) -> tuple[list[Span], list[Span]]:
    """When the long kernels of a case were seen to run, and the rounds of the program beside it."""
    watcher = stand.start([str(program), "watcher"], hooked=True, options=OPTIONS, stdin=subprocess.PIPE)
    try:
        assert watcher.stdout is not None
        assert select.select([watcher.stdout], [], [], BOUND_S)[0]
        assert watcher.stdout.readline() == "ready\n"
        extra = {"WINDOWS": str(noted), "LONG_NS": str(LONG_NS)}
        worker = stand.start([str(program), case], hooked=True, options=OPTIONS, extra=extra)
        try:
            output, _ = worker.communicate(timeout=BOUND_S)
        finally:
            worker.kill()
            worker.wait()
        assert (worker.returncode, output) == (0, "good\n")
        rounds, _ = watcher.communicate(timeout=BOUND_S)
        assert watcher.returncode == 0, rounds[-2000:]
    finally:
        watcher.kill()
        watcher.wait()
    return spans(noted.read_text(encoding="utf-8").splitlines()), spans(rounds.splitlines()[:-1])


def check(stand: Fixture, program: Path, case: str, noted: Path) -> None:
    """The program beside it waited for the end of the long kernels, and ran nothing within them."""
    windows, rounds = beside(stand, program, case, noted)
    assert windows
    for first, last in windows:
        assert [one for one in rounds if first < one[0] and one[1] < last] == [], "somebody else's kernel ran meanwhile"
        assert [one for one in rounds if one[0] < last <= one[1]], "nobody else wanted the card"


@pytest.mark.parametrize("case", [case for case in cases("semantics_captures") if case != "freed"])
def test_work_beside_a_capture_is_drained(compiled: Path, tmp_path: Path, case: str) -> None:
    """The lease goes on while the work runs, and in mode `swap` the memory leaves the card below it."""
    with fixture(simulate=None, quantum="10ms") as stand:
        check(stand, compiled / "semantics_captures", case, tmp_path / "windows")
