"""The gate by itself: C programs made of the gate's files alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hook.compiled import GATE, SOURCE, compile_c

PROGRAMS = Path(__file__).parent / "programs"
CLOCK = SOURCE / "base/process.c"


def run(program: Path, *arguments: str) -> None:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_basics(tmp_path: Path) -> None:
    """Broken: an unarmed gate stops somebody, nesting deadlocks, errno changes, or a forked child is not fresh."""
    run(compile_c(tmp_path / "basics", *GATE, CLOCK, PROGRAMS / "gate_basics.c"))


@pytest.mark.parametrize("arguments", [(), ("fence",), ("late",)], ids=["membarrier", "fence", "late"])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress(tmp_path: Path, sanitizer: str, arguments: tuple[str, ...]) -> None:
    """Broken: a thread is inside a closed gate, a wake-up is lost, or memory is not ordered by the gate."""
    flags = (f"-fsanitize={sanitizer}", "-Wno-tsan")
    run(compile_c(tmp_path / "stress", *GATE, CLOCK, PROGRAMS / "gate_stress.c", flags=flags), *arguments)
