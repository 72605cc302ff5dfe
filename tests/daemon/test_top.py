"""`nvshare-ctl top` in a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable

from nvshare.coordinator.protocol import messages
from tests.daemon.processes import Hook, Running, ctl, environment
from tests.waiting import BOUND_S, eventually

Connect = Callable[..., Hook]


def test_top_follows_and_obeys_keys(coordinator: Running, connect: Connect) -> None:
    """Broken if top showed nothing, lost keys, or left the terminal without an echo."""
    connect(coordinator).hello("train.py").attach(wanted=True).next(messages.Grant)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "nvshare.coordinator.cli.ctl", "top", "--every", "0.1"]
    env = environment(NVSHARE_RUNTIME_DIR=str(coordinator.directory.path), TERM="xterm", NO_COLOR="1", COLUMNS="80")
    top = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = bytearray()

    def shows(words: bytes) -> None:
        give_up_at = time.monotonic() + BOUND_S
        while words not in seen:
            assert select.select([ours], [], [], max(0.0, give_up_at - time.monotonic()))[0], bytes(seen)
            seen.extend(os.read(ours, 65536))

    try:
        shows(b"> ")
        assert b"train.py" in seen
        os.write(ours, b"p")
        shows(b"train.py is paused")
        assert b"\x1b[3" not in seen.replace(b"\x1b[3m", b""), "no colour"
        eventually(lambda: coordinator.status()["clients"][0]["paused"], "the pause")
        os.write(ours, b"q")
        shows(b"\x1b[?1049l")
        assert top.wait() == 0
    finally:
        top.kill()
        top.wait()
        os.close(ours)


def test_one_frame_for_a_pipe(coordinator: Running, connect: Connect) -> None:
    """Broken if a script could not read who runs."""
    connect(coordinator).hello("train.py").attach(wanted=True).next(messages.Grant)
    done = ctl(coordinator.directory.path, "top")
    assert done.returncode == 0
    assert "running   train.py (" in done.stdout
    assert "\x1b" not in done.stdout
    assert ctl(coordinator.directory.path / "nothing", "top", "--once").returncode == 3
