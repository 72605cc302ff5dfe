"""A second user without rights, on a machine whose coordinator root runs: looks, cannot change, changes one's own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nvshare.coordinator.daemon.control import api
from tests.daemon.made_up_gpus import uuid_of
from tests.daemon.processes import Coordinators, Running, environment
from tests.waiting import eventually

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

BECOME = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
"""After the imports: other users may not be allowed to read this Python."""
CTL = (
    "import os; from nvshare.coordinator.cli import ctl; from nvshare.coordinator.cli.views import events, status; "
    f"{BECOME}; ctl.main()"
)


class SecondUser:
    """Runs commands as a user without rights."""

    def __init__(self, running: Running) -> None:
        self._directory = running.directory.path

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            env=environment(NVSHARE_RUNTIME_DIR=str(self._directory)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ctl(self, *words: str) -> tuple[int, str]:
        """Exit code and output of `nvshare-ctl`."""
        with self.start("-c", CTL, *words) as process:
            out, errors = process.communicate()
        return process.returncode, out + errors

    def json(self, *words: str) -> Any:
        code, out = self.ctl(*words, "--json")
        assert code == 0, out
        return json.loads(out)


@pytest.fixture
def shared(coordinators: Coordinators) -> Running:
    """Root's coordinator, which serves all users."""
    coordinators.base.chmod(0o755)
    coordinators.program = "for_all_users.py"
    return coordinators.start()


@pytest.fixture
def second(shared: Running) -> SecondUser:
    return SecondUser(shared)


@pytest.fixture
def theirs(shared: Running, second: SecondUser) -> Iterator[subprocess.Popen[str]]:
    """A program of the second user."""
    code = f"import os, sys; from tests.daemon.holder import main; {BECOME}; main(*sys.argv[1:], 0)"
    with second.start("-c", code, str(shared.directory.hooks_socket), uuid_of(0)) as process:
        eventually(lambda: shared.status()["clients"], "the program is connected")
        yield process
        process.kill()


def test_a_second_user_sees_and_cannot_change(
    shared: Running, second: SecondUser, theirs: subprocess.Popen[str]
) -> None:
    """Broken: users of a shared server are blind, or each is root of the GPUs."""
    root = eventually(lambda: shared.status(), "an answer")
    assert second.json("status")["gpus"][0]["uuid"] == root["gpus"][0]["uuid"]
    code, out = second.ctl("set", "quantum", "5ms")
    assert (code, "only root may change settings of the node" in out) == (1, True), out
    assert shared.status()["gpus"][0]["quantum_ns"] == root["gpus"][0]["quantum_ns"]
    assert second.json("pause", "holder")["paused"]
    assert f"user {NOBODY}: pause client=holder name=holder " in shared.log.read_text()
    shared.ask(api.Set(setting="limit", client="holder", value=1 << 29))
    code, out = second.ctl("limit", "holder", "--memory", "1GiB")
    assert (code, "at most" in out) == (1, True), out
    with second.start("-u", "-c", CTL, "events", "--json") as process:
        assert process.stdout is not None

        def event() -> str:
            shared.ask(api.Set(setting="quantum", value=7_000_000))
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], 0.05)
            return process.stdout.readline() if readable else ""

        assert json.loads(eventually(event, "an event"))["quantum_ns"] == 7_000_000
        process.kill()


def test_the_directory_gives_no_more_than_its_sockets(shared: Running) -> None:
    """Broken: another user reads the journal or takes the coordinator's lock."""
    code = (
        f"import os, sys; {BECOME}; "
        "print(*(name for name in os.listdir(sys.argv[1]) if os.access(f'{sys.argv[1]}/{name}', os.R_OK)))"
    )
    shared.ask(api.Set(setting="quantum", value=7_000_000))  # makes the file of live settings
    command = [sys.executable, "-c", code, str(shared.directory.path)]
    readable = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert {"hooks.sock", "control.sock", "events.sock"} <= readable
    assert not readable & {"journal", "coordinator.lock", "keepalive.lock", "live_settings.json"}


DEAF = f"""
import os, socket, sys
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.protocol import framing
{BECOME}
kept = []
for name, role, frame in (("events", b"SUB", b"\\x01"), ("control", b"DEALER", api.encode_request(api.Status()))):
    for _ in range(60):
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].connect(sys.argv[1] + "/" + name + ".sock")
        try:
            kept[-1].sendall(framing.GREETING + framing.ready(role) + framing.frame(frame) * 20)
        except ConnectionError:
            pass  # all connections of this user are in use
print("deaf", flush=True)
sys.stdin.read()
"""
"""Takes as many connections as it gets, asks on each, and reads nothing."""


def test_a_reader_that_does_not_read_stops_nobody(shared: Running, second: SecondUser) -> None:
    """Broken: a reader that stands still, or that takes all connections, blocks operators."""
    with second.start("-c", DEAF, str(shared.directory.path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "deaf\n"
        for _ in range(100):
            shared.ask(api.Set(setting="quantum", value=7_000_000))
        assert shared.status()["gpus"]
        process.kill()
    assert "this user already has 12 connections" in shared.log.read_text()
