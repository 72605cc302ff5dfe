"""Do calls that edit graphs reach the GPU?  The table says no (the hook's cuda_api.def); the card is asked here.

How: one process spins in a kernel that notices when it stands still, as it does whenever the GPU runs another process's
work.  Meanwhile a second process, without the hook, edits a graph of its own some hundred times.  No program has more
than 2 MiB.

Non-goals: whether such calls wait for a lease (tests/hook/gate/test_graph_edits.py).
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hook.gate.test_graph_edits import graph_program, names
from tests.waiting import BOUND_S

__all__ = ["graph_program"]  # a fixture

pytestmark = pytest.mark.gpu

SPIN_NS = 700_000_000
CALLS = 300
STRAY = 2
"""Gaps that nobody made: interrupts of the machine, housekeeping of the driver."""


class Editor:
    """The process that edits."""

    def __init__(self, program: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([program], env=plain(), stdin=pipe, stdout=pipe, text=True)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], BOUND_S)[0], "no answer"
        return self.process.stdout.readline().strip()

    def do(self, name: str) -> tuple[int, int]:
        """CUresult and median time of calls of one kind."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {CALLS}\n")
        self.process.stdin.flush()
        result, took_ns = self._line().split()
        return int(result), int(took_ns)


def plain() -> dict[str, str]:
    """Without the hook."""
    return {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "NVSHARE_SOCKET")}


@pytest.fixture
def editor(graph_program: Path) -> Iterator[Editor]:
    """It ends with the test."""
    made = Editor(graph_program)
    yield made
    made.process.kill()
    made.process.communicate()


def gaps_during(program: Path, editor: Editor, name: str) -> tuple[int, int, int]:
    """(gaps, the largest in ns, median time of a call in ns) of a kernel that spins while the calls are made."""
    pipe = subprocess.PIPE
    with subprocess.Popen([program, "probe", str(SPIN_NS)], env=plain(), stdout=pipe, text=True) as probe:
        assert probe.stdout is not None
        assert probe.stdout.readline().strip() == "spinning"
        result, took_ns = editor.do(name)
        still_spinning = probe.poll() is None
        gaps, largest_ns = map(int, probe.stdout.readline().split())
    assert result == 0, name
    assert still_spinning, f"{CALLS} calls of {name} took longer than the kernel that watched"
    return gaps, largest_ns, took_ns


def test_edits_do_not_reach_the_gpu(graph_program: Path, editor: Editor) -> None:
    """Broken: work of a program without a lease runs on a GPU that another one has; the row must become a gated one."""
    seen = {}
    for name in names():
        if not name.startswith("+"):
            seen[name] = gaps_during(graph_program, editor, name)
    # A launch is made of work: fewer of them, for each waits for its share of the GPU.
    probe = subprocess.Popen([graph_program, "probe", str(SPIN_NS)], env=plain(), stdout=subprocess.PIPE, text=True)
    assert probe.stdout is not None
    assert probe.stdout.readline().strip() == "spinning"
    assert editor.do("launch")[0] == 0
    control = int(probe.communicate(timeout=BOUND_S)[0].split()[0])
    print(f"gaps, largest in ns, ns a call: {seen}; gaps beside launches: {control}")
    if control <= seen["nothing"][0] + 2 * STRAY:
        pytest.skip(f"this card's kernel does not notice other work: {control} gaps beside {CALLS} launches")
    assert {name: told for name, told in seen.items() if told[0] > seen["nothing"][0] + STRAY} == {}
