"""CUDA's own semantics under the hook on a real card, which another program shares: what the simulated driver takes
from the documentation (green contexts, resets, forks) is here as it is.

No program has more than 64 MiB.

Non-goals: what the simulated GPU shows as well (tests/end_to_end/test_semantics.py has the cases).
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.end_to_end.test_semantics import ATTEMPTS, LIMIT, MODES, cases, compiled
from tests.gpu.conftest import RUN, environment
from tests.waiting import BOUND_S

__all__ = ["compiled"]  # fixture

pytestmark = pytest.mark.gpu

PACED = {"handler_launches", "handler_jumps"}
"""They work until a signal falls into a wait for the lease, and count on the simulated GPU's pace for that."""

WAITING = {("managed", "null_stream")}
"""On a card a memset of managed memory waits for the stream's earlier work, so nothing is left to be drained."""

CASES = [
    (program, case)
    for program in ("semantics_work", "semantics_captures", "semantics_life")
    for case in cases(program)
    if case not in PACED
]


def start(runtime_dir: Path, mode: str, program: Path, case: str) -> subprocess.Popen[str]:
    """One case under the hook, with a coordinator that the first one starts; without either where mode is empty."""
    options = (f"--memory={mode}", f"--gpu-memory-limit={LIMIT}", "--name=case")
    command = [*RUN, *options, "--"] if mode else []
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, str(program), case], env=environment(runtime_dir), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def outcome(runtime_dir: Path, mode: str, program: Path, case: str) -> str:
    """Complaints of the program, or nothing."""
    for _ in range(ATTEMPTS):
        process = start(runtime_dir, mode, program, case)
        try:
            output, errors = process.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            return "it did not end"
        finally:
            process.kill()
            process.wait()
        if process.returncode != os.EX_TEMPFAIL:
            break
    good = (process.returncode, set(output.splitlines())) == (0, {"good"})
    return "" if good else f"exit {process.returncode}: {output}{errors}"


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, runtime: RuntimeDir, compiled: Path) -> Iterator[str]:
    """A memory mode, in which another program works on the card meanwhile."""
    chosen = str(request.param)
    rival = start(runtime.path, chosen, compiled / "semantics_work", "rival")
    try:
        assert rival.stdout is not None
        assert select.select([rival.stdout], [], [], BOUND_S)[0]
        assert rival.stdout.readline() == "ready\n"
        yield chosen
        output, errors = rival.communicate(timeout=BOUND_S)
        assert (rival.returncode, output) == (0, "good\n"), errors
    finally:
        rival.kill()
        rival.wait()


def test_all_cases_on_the_card(runtime: RuntimeDir, compiled: Path, mode: str) -> None:
    """A framework would compute something else, fail or hang on the driver that matters."""
    wrong = {}
    for program, case in CASES:
        if (mode, case) in WAITING:
            continue
        if why := outcome(runtime.path, mode, compiled / program, case):
            alone = outcome(runtime.path, "", compiled / program, case) or "good"
            wrong[case] = f"{why}; without the hook: {alone.splitlines()[0]}"
    assert not wrong, "\n".join(f"{case}: {why}" for case, why in wrong.items())
