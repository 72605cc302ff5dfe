"""Waiting for a program in a shell, ending it, and a command that hears of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.daemon.processes import ctl
from tests.end_to_end.conftest import Node
from tests.waiting import BOUND_S, eventually


def wait(node: Node, *words: str) -> subprocess.Popen[str]:
    """`nvshare-ctl wait` in a process of its own, which says first whom it waits for."""
    command = [sys.executable, "-m", "nvshare.coordinator.cli.ctl", "wait", *words, "--json"]
    environment = node.environment()
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def found(waiting: subprocess.Popen[str]) -> str:
    """Whom it waits for, once it does."""
    assert waiting.stderr is not None
    return waiting.stderr.readline().rstrip()


def result(waiting: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and the state that it tells."""
    out, _ = waiting.communicate(timeout=BOUND_S)
    return waiting.returncode, json.loads(out)["state"]


def test_a_shell_waits_for_a_program(node: Node, saturate: Path, tmp_path: Path) -> None:
    """Broken if nobody learned that the GPU is free, or a script went on too early, for ever, or after a failure."""
    told = tmp_path / "told"
    node.start_coordinator(
        "--quantum=10min",
        f'--notify-command=echo "$NVSHARE_EVENT_KIND: $NVSHARE_EVENT_TEXT" >> {told}',
    )
    first = node.run([str(saturate), "600", "200000000", "8"], "--name=first; false")
    node.await_work(first.pid)
    second = node.run([str(saturate), "600", "200000", "4"], "--name=second")
    eventually(lambda: len(node.control("clients")["clients"]) == 2, "the second program")
    assert result(wait(node, "second", "--until", "room")) == (0, "room")
    assert result(wait(node, "second", "--until", "running", "--timeout", "100ms")) == (1, "waiting")
    running, done = wait(node, "second", "--until", "running"), wait(node, "first; false")
    assert found(running).endswith("(second)")
    assert found(done).endswith("(first; false)")
    assert node.control("end", "first; false")["process_id"] == first.pid
    assert first.wait() == 0, "it handles SIGTERM"
    assert result(done) == (0, "done")
    assert result(running) == (0, "running")
    paused = node.control("pause", "second")
    eventually(lambda: not node.control("status")["gpus"][0]["holders"], "its lease")
    early = wait(node, f"c{paused['client']}", "--until", "running", "--timeout", "10min")
    assert node.control("end", "second", "--kill")["killed"]
    assert second.wait() == -9
    assert early.wait() == 1, "ended before it ran, or was gone already"
    refused = ctl(node.directory, "end", "second")
    assert (refused.returncode, "no client 'second'" in refused.stderr) == (1, True)
    eventually(lambda: told.exists() and "free: GPU 0 is free" in told.read_text(), "the notification")
    lines = told.read_text().splitlines()
    assert "registered: first; false has started" in lines, "a name is no word of the shell"


def test_the_cards_own_sensors_are_shown(node: Node, saturate: Path) -> None:
    """Broken if `top` and the page could not say how busy the card is."""
    node.start_coordinator()
    program = node.run([str(saturate), "600", "200000", "4"])
    node.await_work(program.pid)
    eventually(lambda: node.control("status")["gpus"][0]["sensors"]["used_bytes"] is not None, "figures of the card")
