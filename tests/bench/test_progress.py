"""Progress of long work: one line on a terminal, nothing elsewhere, never on standard output."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping

WORK = """
from nvshare.bench.harness.progress import showing, track
with showing("gate"):
    print([number for number in track(range(3), "pair")])
"""


def run(errors: int, environ: Mapping[str, str]) -> bytes:
    """Standard output of the work."""
    command = [sys.executable, "-c", WORK]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, env=environ, check=True).stdout


def test_progress_needs_a_terminal() -> None:
    """Broken: a redirected benchmark writes control sequences, or a terminal shows nothing for minutes."""
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    assert run(subprocess.STDOUT, environ) == b"[0, 1, 2]\n"
    ours, theirs = pty.openpty()
    try:
        assert run(theirs, environ) == b"[0, 1, 2]\n"
        shown = os.read(ours, 1 << 16)
    finally:
        os.close(theirs)
        os.close(ours)
    assert b"gate" in shown
