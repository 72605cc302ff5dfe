"""The sentences that tell a user why a program waits, or gets no more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvshare.coordinator.daemon.control import explanations
from nvshare.coordinator.engine.snapshot import RefusalSnapshot, WaitSnapshot
from nvshare.coordinator.model.client import Identity

MINE = Identity("mine.py", "python", 10, 1000, "")
THEIRS = Identity("train.py", "python", 11, 1001, "")
WAIT = WaitSnapshot(
    0,
    MINE,
    (THEIRS,),
    place=1,
    paused=False,
    lacking_bytes=0,
    stuck=None,
    recovering=False,
    stopped=False,
    in_debt=False,
    moving=False,
)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "known_name", {1000: "bob", 1001: "alice"}.__getitem__)


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (WAIT, "waiting for GPU 0, held by train.py (alice); 2nd in line"),
        (replace(WAIT, place=0, holders=(THEIRS, MINE)), "held by train.py (alice) and 1 other program; next in line"),
        (replace(WAIT, holders=()), "waiting for GPU 0, which no program holds now; 2nd in line"),
        (replace(WAIT, paused=True), "this program is paused; `nvshare-ctl resume mine.py` continues it"),
        (replace(WAIT, lacking_bytes=1 << 30), "1GiB of this program's memory does not fit"),
        (
            replace(WAIT, holders=(), stuck=THEIRS),
            "the memory of train.py (alice) does not move; perhaps it is stopped",
        ),
        (replace(WAIT, recovering=True), "the coordinator has restarted, and an earlier holder is not back yet"),
        (replace(WAIT, recovering=True, stopped=True), "the program that held it is stopped: continue it (kill -CONT)"),
        (replace(WAIT, in_debt=True), "others come first, because programs of this user gave the GPU back too late"),
        (replace(WAIT, moving=True), "memory is being moved for it"),
    ],
)
def test_the_reason_is_said(wait: WaitSnapshot, text: str) -> None:
    """Broken: a program waits and its user does not learn for what."""
    assert text in explanations.wait(wait, hide_names=False)


def test_hidden_names_are_those_of_other_users() -> None:
    """Broken: a user reads what another one runs, or cannot tell which of their own programs is in the way."""
    assert "held by a program of alice;" in explanations.wait(WAIT, hide_names=True)
    assert "held by mine.py (bob);" in explanations.wait(replace(WAIT, holders=(MINE,)), hide_names=True)


def test_containers_learn_nothing_of_each_other() -> None:
    """Broken: a container reads another tenant's pod."""
    wait = replace(WAIT, holders=(replace(THEIRS, group="slot-7"),))
    assert "held by another container;" in explanations.wait(wait, hide_names=False)


def test_a_refusal_names_who_has_the_memory() -> None:
    """Broken: a program is out of memory, and its user cannot tell whom to ask."""
    refused = RefusalSnapshot(0, MINE, 4 << 30, ((THEIRS, 3 << 30), (MINE, 1 << 29)))
    text = explanations.refusal(refused, hide_names=False)
    assert text.startswith(
        "GPU 0 has 4GiB for programs, and train.py (alice) has 3GiB that cannot move, 1 other program"
    )
    assert "train.py" not in explanations.refusal(refused, hide_names=True)
