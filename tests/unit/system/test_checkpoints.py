"""The helper that makes the driver's calls for one program, without a driver: whose process it is, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
GROUPS = [4321, 4322]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    """A program of another user, with groups that no directory knows."""
    with subprocess.Popen(["/bin/sleep", "1000"], user=NOBODY, group=4320, extra_groups=GROUPS) as process:
        yield process
        process.kill()


def helper(process_id: int, user_id: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "nvshare.coordinator.system.checkpoints", str(process_id), str(user_id)]
    pipe = subprocess.PIPE
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def facts(process_id: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


def test_it_is_a_process_of_the_programs_user(program: subprocess.Popen[bytes]) -> None:
    """Broken: it acts as root, lacks the groups to which the cards belong, or its user cannot see and end it; or it
    prints a traceback when the coordinator is gone."""
    with helper(program.pid, NOBODY) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("save\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline().startswith("failed ")
        found, theirs = facts(process.pid), facts(program.pid)
        assert [found[name] for name in ("Uid", "Gid", "Groups")] == [theirs[name] for name in ("Uid", "Gid", "Groups")]
        assert set(found["CapPrm"] + found["CapEff"]) == {"0" * 16}
        assert Path(f"/proc/{process.pid}").stat().st_uid == NOBODY
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "0\n", "a service's is lower"
        process.stdin.close()
        assert (process.wait(), process.stderr.read()) == (0, "")


def test_a_process_of_somebody_else_gets_none(program: subprocess.Popen[bytes]) -> None:
    """Broken: a process id that has come back gives one user's helper the groups of another."""
    with helper(program.pid, NOBODY - 1) as process:
        assert process.wait() != 0
