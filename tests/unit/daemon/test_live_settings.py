"""Live settings: their duration, their owners, and files that a coordinator cannot use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.daemon.control.live_settings import NODE, LiveSettings, Owner
from nvshare.coordinator.model import events
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import JobClass

GPU, OTHER = "GPU-0", "GPU-1"


def hello(client: int = 1, process_id: int | None = None, **more: object) -> events.ClientRegistered:
    pid = os.getpid() if process_id is None else process_id
    made = events.ClientRegistered(
        client, messages.Hello(1, "train", "python", 0, 3, MemoryMode.SWAP, 1 << 30, "", 2), pid, 0
    )
    return replace(made, **more)  # type: ignore[arg-type]


def set_for(live: LiveSettings, client: int, setting: str, value: float | str, gpu: str | None = None) -> None:
    owner = live.owner(client)
    assert owner is not None
    live.put(owner, setting, value, (gpu,))


def test_a_process_that_comes_back_has_what_was_set_for_it(tmp_path: Path) -> None:
    """Broken if a restart, or a connection that broke, undid a pause, a limit, a weight or a priority."""
    path = tmp_path / "live"
    before = LiveSettings(path)
    assert before.registered(hello()) == []
    for setting, value in (("paused", True), ("priority", -7), ("weight", 9), ("limit", 5)):
        set_for(before, 1, setting, value)
    set_for(before, 1, "limit", 6, GPU)
    wanted: list[events.Event] = [
        events.Set("paused", True, client=2),
        events.Set("priority", -7, client=2),
        events.Set("weight", 9, client=2),
        events.Set("limit", 5, client=2),
        events.Set("limit", 6, GPU, client=2),
    ]
    for live in (before, LiveSettings(path)):
        live.gone(1)
        assert sorted(map(repr, live.registered(hello(2)))) == sorted(map(repr, wanted))
        assert live.attached(2, GPU) == [events.Set("limit", 6, GPU, client=2)]
        assert live.attached(2, OTHER) == []


def test_a_live_class_and_share_replace_what_the_program_says_of_itself(tmp_path: Path) -> None:
    """Broken if a program that connects again undid the operator's class, or unset did not restore its own."""
    live = LiveSettings(tmp_path / "live")
    live.registered(hello())
    said = events.Profiled(1, JobClass.INTERACTIVE, 0.4, 0.9, None, spatial=False)
    assert live.profiled(said) == said
    set_for(live, 1, "class", "best_effort")
    set_for(live, 1, "share_limit", 0.5)
    assert live.profiled(said) == replace(said, job_class=JobClass.BEST_EFFORT, share_limit=0.5)
    owner = live.owner(1)
    assert len(live.drop(owner, None, None)) == 2
    assert live.in_force(1, "class") == [events.Set("class", "interactive", client=1)]
    assert live.in_force(1, "share_limit") == [
        events.Set("share_limit", 0.9, client=1),
        events.Set("share_request", 0.4, client=1),
    ]


def test_nobody_inherits_from_a_process_that_is_gone(tmp_path: Path) -> None:
    """Broken if a program were paused because its process id had belonged to a paused one."""
    path = tmp_path / "live"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        live = LiveSettings(path)
        live.registered(hello(1, child.pid))
        set_for(live, 1, "paused", True)
        live.put(Owner(os.getpid(), 1), "paused", True)  # as if this process's id had been another's before
        assert [each.owner.process_id for each in live.all()] == [child.pid]
        assert LiveSettings(path).registered(hello(2, child.pid)) == [events.Set("paused", True, client=2)]
        assert LiveSettings(path).registered(hello(2)) == []
        child.kill()
    assert live.all() == []
    assert LiveSettings(path).all() == []
    live.put(NODE, "quantum", 5_000_000, [GPU])
    assert len(json.loads(path.read_text())["settings"]) == 1, "those of the dead are dropped"


def test_a_slot_keeps_what_was_set_until_it_is_allocated_anew(tmp_path: Path) -> None:
    """Broken if the next pod in a slot were paused, or a process of this pod that comes later were not."""
    path = tmp_path / "live"
    present = {"slot-0": "first"}
    live = LiveSettings(path, present.get)
    for client in (1, 2):
        assert live.registered(hello(client, -client, group="slot-0")) == []
    assert live.alike(1) == [1, 2]
    set_for(live, 1, "paused", True)
    after = LiveSettings(path, present.get)
    assert after.registered(hello(3, -3, group="slot-0")) == [events.Set("paused", True, client=3)]
    assert after.registered(hello(4, -4, group="slot-1")) == []
    present["slot-0"] = "second"
    assert after.registered(hello(5, -5, group="slot-0")) == []
    assert after.all() == []


def test_what_cannot_be_identified_does_not_last(tmp_path: Path) -> None:
    """Broken if the settings of one process of a foreign PID namespace went to another."""
    live = LiveSettings(tmp_path / "live")
    live.registered(hello(1, -2))
    live.registered(hello(2, -3))
    assert live.owner(1) is None
    assert live.alike(1) == [1]


def test_a_slots_file_does_not_undo_what_the_operator_set(tmp_path: Path) -> None:
    """Broken if an annotation that changes undid it, or were forgotten when it is unset."""
    live = LiveSettings(tmp_path / "live", {"slot-0": "first"}.get)
    live.registered(hello(1, -1, group="slot-0"))
    assert live.slot_changed(events.Set("priority", 50, client=1)) == [events.Set("priority", 50, client=1)]
    set_for(live, 1, "priority", 8)
    assert live.slot_changed(events.Set("priority", 60, client=1)) == [events.Set("priority", 8, client=1)]
    assert live.slot_changed(events.Set("weight", 60, client=1)) == [events.Set("weight", 60, client=1)]
    assert live.slot_changed(events.Set("class", "interactive", client=1)) == [
        events.Set("class", "interactive", client=1)
    ]
    set_for(live, 1, "share_limit", 0.2)
    live.slot_changed(events.Set("share_limit", 0.5, client=1))
    assert live.slot_changed(events.Set("share_request", 0.1, client=1)) == [
        events.Set("share_limit", 0.2, client=1),
        events.Set("share_request", 0.1, client=1),
    ]
    assert live.slot_changed(events.Set("gang", "g", client=1)) == [events.Set("gang", "g", client=1)]
    assert [each.value for each in live.drop(None, "priority", None)] == [8]
    assert live.in_force(1, "priority") == [events.Set("priority", 60, client=1)]


def test_one_for_all_gpus_takes_the_place_of_those_for_some(tmp_path: Path) -> None:
    """Broken if an old setting of one GPU came back after a restart."""
    path = tmp_path / "live"
    live = LiveSettings(path)
    live.registered(hello())
    set_for(live, 1, "limit", 6, GPU)
    set_for(live, 1, "limit", 5)
    assert LiveSettings(path).registered(hello()) == [events.Set("limit", 5, client=1)]
    set_for(live, 1, "limit", 7, GPU)
    live.drop(live.owner(1), "limit", None)
    assert LiveSettings(path).registered(hello()) == []
    assert live.in_force(1, "limit") == [events.Set("limit", 1 << 30, client=1)]
    live.put(NODE, "quantum", None, [GPU, OTHER])
    live.put(NODE, "host_budget", 5)
    assert LiveSettings(path).node() == {("quantum", GPU): None, ("quantum", OTHER): None, ("host_budget", None): 5}
    live.drop(None, "quantum", OTHER)
    assert LiveSettings(path).node() == {("quantum", GPU): None, ("host_budget", None): 5}
    live.forget()
    assert not path.exists()


def damaged(content: dict[str, Any], **changes: object) -> str:
    (entry,) = content["settings"]
    return json.dumps({**content, "settings": [{**entry, **changes}]})


@pytest.mark.parametrize(
    "changes",
    [
        {"setting": "nonsense"},
        {"setting": "priority"},
        {"setting": "capacity"},
        {"value": "long"},
        {"value": -5},
        {"gpu": None},
        {"gpu": 7},
        {"process_id": "1"},
        {"slot": []},
        {"more": 1},
    ],
)
def test_a_file_that_makes_no_sense_is_said_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object]
) -> None:
    """Broken if a damaged file stopped the start, or brought a value that no request may have."""
    path = tmp_path / "live"
    LiveSettings(path).put(NODE, "quantum", 5_000_000, [GPU])
    content = json.loads(path.read_text())
    path.write_text(damaged(content))
    assert LiveSettings(path).node() == {("quantum", GPU): 5_000_000}
    path.write_text(damaged(content, **changes))
    assert LiveSettings(path).all() == []
    assert "the earlier live settings are lost" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"boot": ', b"7"])
def test_a_file_of_something_else_is_said_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """Broken if leftovers stopped the start."""
    path = tmp_path / "live"
    path.write_bytes(content)
    assert LiveSettings(path).all() == []
    assert "the earlier live settings are lost" in caplog.text


def test_nothing_outlives_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if a process of this boot were taken for one of the last."""
    path = tmp_path / "live"
    LiveSettings(path).put(NODE, "sharing", "concurrent", [GPU])
    assert LiveSettings(path).node() == {("sharing", GPU): "concurrent"}
    monkeypatch.setattr("nvshare.coordinator.daemon.control.live_settings.boot_id", lambda: b"another")
    assert LiveSettings(path).all() == []


def test_a_file_that_cannot_be_written_costs_only_what_lasts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broken if a full or vanished directory made a command fail, or the operator believed that it lasts."""
    folder = tmp_path / "gone"
    live = LiveSettings(folder / "live")
    for _ in range(3):
        live.put(NODE, "quantum", 5_000_000, [GPU])
    assert live.node() == {("quantum", GPU): 5_000_000}
    assert "cannot write" in str(live.problem())
    assert len(caplog.records) == 1
    folder.mkdir()
    live.put(NODE, "sharing", "exclusive", [GPU])
    assert live.problem() is None
    assert LiveSettings(folder / "live").node() == {("quantum", GPU): 5_000_000, ("sharing", GPU): "exclusive"}
