"""The sentences that tell a user why a program waits, or gets no more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvshare.coordinator.daemon.control import explanations
from nvshare.coordinator.engine.snapshot import RefusalSnapshot, WaitSnapshot
from nvshare.coordinator.engine.standing import Standing
from nvshare.coordinator.model.client import Identity

MINE = Identity("mine.py", "python", 10, 1000, "")
THEIRS = Identity("train.py", "python", 11, 1001, "")
TURN = Standing("waiting", "turn", 2)
WAIT = WaitSnapshot(0, MINE, TURN, THEIRS, place=1, lacking_bytes=0)


def wait(reason: str, blocker: Identity | None = None, *, stopped: bool = False, lacking: int = 0) -> WaitSnapshot:
    return WaitSnapshot(0, MINE, Standing("waiting", reason, 2, stopped), blocker, place=0, lacking_bytes=lacking)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "known_name", {1000: "bob", 1001: "alice"}.__getitem__)


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        (WAIT, "waiting for GPU 0, held by train.py (alice); 2nd in line"),
        (
            wait("turn", THEIRS, stopped=True),
            "held by train.py (alice) (stopped: continue it with kill -CONT, or end it",
        ),
        (wait("free"), "waiting for GPU 0: no program holds it now; next in line"),
        (wait("next", THEIRS), "waiting for GPU 0: memory is being moved for train.py (alice); next in line"),
        (wait("paused"), "this program is paused; `nvshare-ctl resume mine.py` continues it"),
        (wait("lacks", lacking=1 << 30), "1GiB of this program's memory does not fit"),
        (wait("stuck", THEIRS), "the memory of train.py (alice) does not move"),
        (wait("stuck", THEIRS, stopped=True), "does not move (stopped: continue it with kill -CONT"),
        (wait("recovering"), "the coordinator has restarted, and an earlier holder is not back yet"),
        (wait("recovering", stopped=True), "is not back yet (stopped: continue it with kill -CONT"),
        (wait("debt"), "others come first, because programs of this user gave the GPU back too late"),
        (wait("moving"), "memory is being moved for it"),
        (wait("stopped"), "this program is stopped: continue it (kill -CONT) or end it"),
    ],
)
def test_the_reason_is_said(waits: WaitSnapshot, text: str) -> None:
    """Broken: a program waits and its user does not learn for what."""
    assert text in explanations.wait(waits, hide_names=False)


def test_hidden_names_are_those_of_other_users() -> None:
    """Broken: a user reads what another one runs, or cannot tell which of their own programs is in the way."""
    assert "held by a program of alice;" in explanations.wait(WAIT, hide_names=True)
    assert "held by mine.py (bob);" in explanations.wait(replace(WAIT, blocker=MINE), hide_names=True)


def test_containers_learn_nothing_of_each_other() -> None:
    """Broken: a container reads another tenant's pod."""
    theirs = replace(WAIT, blocker=replace(THEIRS, group="slot-7"))
    assert "held by another container;" in explanations.wait(theirs, hide_names=False)


def test_a_refusal_names_who_has_the_memory() -> None:
    """Broken: a program is out of memory, and its user cannot tell whom to ask."""
    refused = RefusalSnapshot(0, MINE, 4 << 30, ((THEIRS, 3 << 30), (MINE, 1 << 29)))
    text = explanations.refusal(refused, hide_names=False)
    assert text.startswith(
        "GPU 0 has 4GiB for programs, and train.py (alice) has 3GiB that cannot move, 1 other program"
    )
    assert "train.py" not in explanations.refusal(refused, hide_names=True)


@pytest.mark.parametrize(
    ("immovable", "why"), [((), "this one wants more"), (((THEIRS, 3 << 30),), "train.py (alice)")]
)
def test_a_refusal_names_the_hosts_memory(immovable: tuple[tuple[Identity, int], ...], why: str) -> None:
    """Broken: a program is out of memory on a GPU with room, and nobody says that the host has none."""
    text = explanations.refusal(RefusalSnapshot(0, MINE, 4 << 30, immovable, 1 << 29), hide_names=False)
    assert text.startswith(f"GPU 0 has 4GiB for programs, of the host's memory, with 512MiB left, and {why}")
    assert "swap" not in text
