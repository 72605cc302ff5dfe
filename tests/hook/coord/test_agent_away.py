"""While no coordinator answers the agent sleeps, and wakes for nothing but its next attempt."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.conftest import StartClient
from tests.hook.coord.test_agent import hold
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator
from tests.waiting import eventually

PROGRAMS = Path(__file__).parent / "programs"
ATTEMPTS = 6
"""Attempts to watch: some 0.6 s, in which an agent that does not sleep polls ten thousand times and more."""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
A_FEW = 4
"""Rounds of the agent for each attempt: the attempt, its end, and what a timer that rings early costs."""
AT_FIRST = 40
"""Rounds that begin with a program's own calls."""


class Counts:
    """System calls of the agent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(16))

    def read(self) -> tuple[int, int]:
        """Attempts to connect, and rounds of the agent's loop."""
        connects, polls = struct.unpack("=QQ", self.path.read_bytes())
        return connects, polls

    def sleeps(self) -> None:
        """Over the next attempts there is about one round for each."""
        connects, polls = self.read()
        eventually(lambda: self.read()[0] >= connects + ATTEMPTS, "attempts to connect")
        after, rounds = self.read()
        assert rounds - polls <= A_FEW * (after - connects) + AT_FIRST


@pytest.fixture
def counts(tmp_path: Path, hook_env: dict[str, str], built: Built) -> Counts:
    """Counts of the clients of this test."""
    library = compile_c(tmp_path / "count.so", PROGRAMS / "count_calls.c", flags=("-shared", "-fPIC"))
    counted = Counts(tmp_path / "counts")
    hook_env |= {"LD_PRELOAD": f"{library}:{built.hook}", "NVS_TEST_COUNTS": str(counted.path)}
    return counted


@pytest.fixture
def turned_away(tmp_path: Path) -> Iterator[None]:
    """Somebody listens, and closes every connection at once."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "hooks.sock"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    server = threading.Thread(target=serve)
    server.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    server.join()


def test_sleeps_when_nobody_ever_listened(counts: Counts, start: StartClient) -> None:
    """Broken: a program that was started before its coordinator burns a processor until that comes."""
    start().tell("launch 1000")
    counts.sleeps()


def test_sleeps_when_it_is_turned_away(counts: Counts, turned_away: None, start: StartClient) -> None:
    """Broken: a coordinator that does not want a client has it burn a processor."""
    start().tell("launch 1000")
    counts.sleeps()


@pytest.mark.parametrize("holds", [True, False], ids=["holder", "waiter"])
def test_sleeps_after_the_coordinator_died(
    counts: Counts, coordinator: ScriptedCoordinator, start: StartClient, holds: bool
) -> None:
    """Broken: all programs of a node burn a processor each while its coordinator is away."""
    client = start()
    if holds:
        hold(coordinator, client)
    else:
        client.tell("launch 1000")
        coordinator.welcome()
        coordinator.asked()
    coordinator.stop()
    counts.sleeps()
    coordinator.restart()
    coordinator.welcome()
    coordinator.grant(9 if not holds else 7)
    if not holds:
        assert client.answer() == "launched"


def unprivileged() -> None:
    """Root, too, obeys the modes of files after the next exec."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def test_a_coordinator_that_is_not_for_this_user(
    coordinator: ScriptedCoordinator, client_program: Path, hook_env: dict[str, str]
) -> None:
    """Broken: a program hears of "no coordinator", where the coordinator runs and does not let its user in."""
    coordinator.path.chmod(0)
    with ScriptedClient(client_program, hook_env, preexec_fn=unprivileged) as client:
        client.tell("launch 1000")
        assert "this user may not connect to the coordinator" in client.error_line()
        coordinator.path.chmod(0o600)
        coordinator.welcome()
        coordinator.asked()
        coordinator.grant(7)
        assert client.answer() == "launched"


def test_a_holder_that_nobody_coordinates_any_more_says_so(
    coordinator: ScriptedCoordinator, client: ScriptedClient
) -> None:
    """Broken: after the loss of the runtime directory a program keeps the GPU for itself, and nobody learns why."""
    hold(coordinator, client)
    coordinator.stop()
    coordinator.path.unlink(missing_ok=True)
    assert "no coordinator answers" in (said := client.error_line())
    assert "goes on with the GPU" in said
