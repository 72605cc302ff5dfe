"""Physical memory handed down from one program to another: who may, what is left behind.

May not go here: moves of real chunks (test_swap_process.py).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hook.compiled import PROGRAMS, SOURCE, compile_c


@pytest.mark.parametrize("sanitizer", ["", "-fsanitize=address,undefined"])
def test_both_ends(tmp_path: Path, sanitizer: str) -> None:
    """Broken: memory goes to another user's program, to one that the coordinator did not name, or another GPU's, a
    descriptor leaks (its memory is lost until the program ends), or an application runs out of descriptors."""
    flags = (sanitizer, "-fno-sanitize-recover=all") if sanitizer else ()
    sources = (PROGRAMS / "handdown_check.c", SOURCE / "swap/handdown.c", SOURCE / "ipc/socket.c")
    program = compile_c(tmp_path / "check", *sources, flags=flags)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its memory outlives it" in done.stdout
