"""An application's thread that is cancelled while the hook waits in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.hook.compiled import SOURCE, compile_c

PROGRAMS = Path(__file__).parent / "programs"


def test_no_lock_is_left_behind(tmp_path: Path) -> None:
    """Broken: the thread ends with the lock, and every other one waits for it for ever."""
    program = compile_c(tmp_path / "cancel", PROGRAMS / "cancel_check.c")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_every_wait_goes_this_way() -> None:
    """Broken: a wait that was added later can be cancelled."""
    wait = re.compile(r"\b(pthread_cond_(timed)?wait|nanosleep|usleep|sleep)\(")
    found = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.[ch]")) if wait.search(path.read_text())]
    assert found == ["base/system.h"]
