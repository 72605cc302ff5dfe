"""One coordinator a card: who has it is told, who waits for it gets it, and nothing is left of a holder that died."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nvshare.coordinator.system import card_lock
from tests.conftest import ROOT
from tests.waiting import eventually

HOLD = """import sys
from nvshare.coordinator.system import card_lock
held = card_lock.hold(sys.argv[1:], 0)
print("held", flush=True)
sys.stdin.read()
"""


OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def card() -> Iterator[str]:
    name = f"GPU-{uuid.uuid4()}"
    yield name
    (card_lock._FOLDER / name).unlink(missing_ok=True)


@pytest.fixture
def holder(card: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the card until it is killed."""
    command = [sys.executable, "-c", HOLD, card]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_loser_is_told_who_has_the_card(card: str, holder: subprocess.Popen[bytes]) -> None:
    """Broken: two coordinators schedule one card, or the operator cannot find the other one."""
    with pytest.raises(card_lock.CardHeldError) as caught:
        card_lock.hold([card], 0)
    assert f"{card} is scheduled by process {holder.pid} of user " in str(caught.value)
    assert f"({os.getuid()}): {sys.executable} -c import sys" in str(caught.value)


def test_who_waits_gets_the_card_of_a_holder_that_was_killed(
    card: str, holder: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: a daemon never comes back, or a dead coordinator's lock stays."""
    with ThreadPoolExecutor() as threads, caplog.at_level(logging.WARNING, "nvshare"):
        told: list[str] = []
        waiting = threads.submit(card_lock.hold, [card], None, told.append)
        eventually(lambda: "waiting for its end" in caplog.text, "the waiting one says so")
        assert not waiting.done()
        holder.send_signal(signal.SIGKILL)
        held = waiting.result(60)
    assert caplog.text.count("waiting for its end") == 1
    (text,) = told
    assert f"{card} is scheduled by process {holder.pid} of user " in text
    assert "; stop that coordinator, or use it: nvshare-run --runtime-dir" in text
    for each in held:
        each.close()


def test_a_failed_attempt_holds_no_other_card(card: str, holder: subprocess.Popen[bytes]) -> None:
    """Broken: who lost one card keeps the others from everybody."""
    free = "GPU-" + card.removeprefix("GPU-")[::-1]
    with pytest.raises(card_lock.CardHeldError):
        card_lock.hold([free, card], 0)
    for held in card_lock.hold([free], 0):
        held.close()
    (card_lock._FOLDER / free).unlink(missing_ok=True)


def test_simulated_cards_are_told_apart_by_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: two simulations on one machine, whose cards have the same UUIDs, exclude each other."""
    simulated = "GPU-51a15eed-0000-4000-8000-000000000000"
    names = []
    for state in ("/a/simulated_gpu", "/b/simulated_gpu", "/b/../a/simulated_gpu"):
        monkeypatch.setenv("NVSHARE_SIM_STATE", state)
        names.append(card_lock._name(simulated))
        assert card_lock._name("GPU-1") == "\0nvshare/card/GPU-1", "no environment makes a real card another one"
    assert names[0] == names[2] != names[1]


def test_a_full_queue_of_askers_hides_only_the_name(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: other users' connections to the lock make it free, or stop a coordinator that asks."""
    monkeypatch.setattr(socket, "SOMAXCONN", 0)
    held = card_lock.hold([card], 0)
    for _ in range(3):
        with pytest.raises(card_lock.CardHeldError, match=r"process|an unknown process"):
            card_lock.hold([card], 0)
    for each in held:
        each.close()


SQUAT = """import socket, sys
lock = socket.socket(socket.AF_UNIX)
lock.bind("\\0nvshare/card/" + sys.argv[1])
lock.listen()
print("bound", flush=True)
sys.stdin.read()
"""


@as_root
def test_no_other_user_keeps_root_from_a_card(
    card: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: a user who binds a card's name stops the system's coordinator, or two of root's schedule the card."""
    monkeypatch.setattr(card_lock, "OVERRULE_S", 0.0)
    command = ["/usr/bin/env", "python3", "-c", SQUAT, card]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=OTHER_USER, cwd="/") as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == b"bound\n"
        held = card_lock.hold([card], None)
        assert f"scheduled by process {squatter.pid} of user" in caplog.text
        assert "serving beside it" in caplog.text
        with pytest.raises(card_lock.CardHeldError, match="another coordinator of root"):
            card_lock.hold([card], None)
        squatter.kill()
    for each in held:
        each.close()
