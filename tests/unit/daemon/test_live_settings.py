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
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import JobClass, Rank

GPU, OTHER = "GPU-0", "GPU-1"


def hello(client: int = 1, process_id: int | None = None, **more: object) -> events.ClientRegistered:
    pid = os.getpid() if process_id is None else process_id
    made = events.ClientRegistered(
        client, messages.Hello(messages.PROTOCOL_VERSION, "train", "python", MemoryMode.SWAP, 1 << 30), pid, 0
    )
    return replace(made, **more)  # type: ignore[arg-type]


def set_for(live: LiveSettings, client: int, setting: str, value: float | str, gpu: str | None = None) -> None:
    live.put(live.owner(client), setting, value, (gpu,))
    live.save()


def registered(live: LiveSettings, client: events.ClientRegistered, **own: Any) -> Facts:
    """What is in force for a client that has just come and says this of itself."""
    live.registered(client)
    return live.over(client.client, Facts().having(**own))


def test_a_process_that_comes_back_has_what_was_set_for_it(tmp_path: Path) -> None:
    """Broken if a restart, or a connection that broke, undid a pause, a limit, a weight or a priority."""
    path = tmp_path / "live"
    before = LiveSettings(path)
    assert registered(before, hello(), weight=3) == Facts().having(weight=3)
    for setting, value in (("paused", True), ("priority", -7), ("weight", 9), ("limit", 5)):
        set_for(before, 1, setting, value)
    set_for(before, 1, "limit", 6, GPU)
    for live in (before, LiveSettings(path)):
        if live is before:
            live.gone(1)
        facts = registered(live, hello(2), weight=3, limit_bytes=1 << 30)
        assert facts == Facts(Rank(-7, 9), limit_bytes=5, limits_of_gpus=((GPU, 6),), paused=True)
        assert (facts.limit_on(GPU), facts.limit_on(OTHER)) == (6, 5)


def test_a_live_class_and_share_replace_what_the_program_says_of_itself(tmp_path: Path) -> None:
    """Broken if a program that connects again undid the operator's class, or unset did not restore its own."""
    live = LiveSettings(tmp_path / "live")
    own = {"job_class": JobClass.INTERACTIVE, "share_request": 0.4, "share_limit": 0.9}
    assert registered(live, hello(), **own) == Facts().having(**own)
    set_for(live, 1, "class", "best_effort")
    set_for(live, 1, "share_limit", 0.5)
    said = Facts().having(**own)
    assert live.over(1, said) == said.having(job_class=JobClass.BEST_EFFORT, share_limit=0.5)
    assert len(live.drop(live.owner(1), None, None)) == 2
    assert live.over(1, said) == said


def test_nobody_inherits_from_a_process_that_is_gone(tmp_path: Path) -> None:
    """Broken if a program were paused because its process id had belonged to a paused one."""
    path = tmp_path / "live"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        live = LiveSettings(path)
        live.registered(hello(1, child.pid))
        set_for(live, 1, "paused", True)
        live.put(Owner(os.getpid(), 1), "paused", True)  # as if this process's id had been another's before
        assert [each.owner.process_id for each in live.all()] == [child.pid]
        live.save()
        assert registered(LiveSettings(path), hello(2, child.pid)).paused
        assert not registered(LiveSettings(path), hello(2)).paused
        child.kill()
    assert live.all() == []
    assert LiveSettings(path).all() == []
    live.put(NODE, "quantum", 5_000_000, [GPU])
    live.save()
    assert len(json.loads(path.read_text())["settings"]) == 1, "those of the dead are dropped"


def test_a_slot_keeps_what_was_set_until_it_is_allocated_anew(tmp_path: Path) -> None:
    """Broken if the next pod in a slot were paused, or a process of this pod that comes later were not."""
    path = tmp_path / "live"
    present = {"slot-0": "first"}
    live = LiveSettings(path, present.get)
    for client in (1, 2):
        assert not registered(live, hello(client, -client, group="slot-0", allocation=present["slot-0"])).paused
    assert live.clients_of(live.owner(1)) == [1, 2]
    set_for(live, 1, "paused", True)
    after = LiveSettings(path, present.get)
    assert registered(after, hello(3, -3, group="slot-0", allocation=present["slot-0"])).paused
    assert not registered(after, hello(4, -4, group="slot-1")).paused
    present["slot-0"] = "second"
    assert not registered(after, hello(5, -5, group="slot-0", allocation=present["slot-0"])).paused
    assert after.all() == []


def test_what_cannot_be_identified_does_not_last(tmp_path: Path) -> None:
    """Broken if the settings of one process of a foreign PID namespace went to another, or outlived its connection."""
    live = LiveSettings(tmp_path / "live")
    for client in (1, 2):
        live.registered(hello(client, -1 - client))
    set_for(live, 1, "paused", True)
    assert [live.over(client, Facts()).paused for client in (1, 2)] == [True, False]
    assert LiveSettings(tmp_path / "live").all() == []
    live.gone(1)
    assert live.all() == []


def test_one_for_all_gpus_takes_the_place_of_those_for_some(tmp_path: Path) -> None:
    """Broken if an old setting of one GPU came back after a restart."""
    path = tmp_path / "live"
    live = LiveSettings(path)
    live.registered(hello())
    set_for(live, 1, "limit", 6, GPU)
    set_for(live, 1, "limit", 5)
    assert registered(LiveSettings(path), hello()) == Facts(limit_bytes=5)
    set_for(live, 1, "limit", 7, GPU)
    live.drop(live.owner(1), "limit", None)
    assert live.over(1, Facts(limit_bytes=9)) == Facts(limit_bytes=9)
    live.put(NODE, "quantum", None, [GPU, OTHER])
    live.put(NODE, "host_budget", 5)
    live.save()
    assert [each.owner for each in LiveSettings(path).all()] == [NODE] * 3
    assert LiveSettings(path).node() == {("quantum", GPU): None, ("quantum", OTHER): None, ("host_budget", None): 5}
    live.drop(None, "quantum", OTHER)
    live.save()
    assert LiveSettings(path).node() == {("quantum", GPU): None, ("host_budget", None): 5}
    live.forget()
    assert not path.exists()


def put(path: Path, setting: str, value: float | str) -> None:
    live = LiveSettings(path)
    live.put(NODE, setting, value, [GPU])
    live.save()


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
        *(b"", b"\xff", b"[]", b"{}", b'{"boot": ', b"7"),
    ],
)
def test_a_file_that_makes_no_sense_is_said_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object] | bytes
) -> None:
    """Broken if leftovers or a damaged file stopped the start, or brought a value that no request may have."""
    path = tmp_path / "live"
    put(path, "quantum", 5_000_000)
    content = json.loads(path.read_text())
    path.write_text(damaged(content))
    assert LiveSettings(path).node() == {("quantum", GPU): 5_000_000}
    path.write_bytes(changes if isinstance(changes, bytes) else damaged(content, **changes).encode())
    assert LiveSettings(path).all() == []
    assert "the earlier live settings are lost" in caplog.text


def test_nothing_outlives_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if a process of this boot were taken for one of the last."""
    path = tmp_path / "live"
    put(path, "sharing", "concurrent")
    assert LiveSettings(path).node() == {("sharing", GPU): "concurrent"}
    monkeypatch.setattr("nvshare.coordinator.daemon.control.live_settings.boot_id", lambda: b"another")
    assert LiveSettings(path).all() == []


def test_a_file_that_cannot_be_written_costs_only_what_lasts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broken if a full or vanished directory made a command fail, or the operator believed that it lasts."""
    folder = tmp_path / "gone"
    live = LiveSettings(folder / "live")
    for _ in range(3):
        live.put(NODE, "quantum", 5_000_000, [GPU])
        live.save()
    assert live.node() == {("quantum", GPU): 5_000_000}
    assert "cannot write" in str(live.problem())
    assert len(caplog.records) == 1
    folder.mkdir()
    live.put(NODE, "sharing", "exclusive", [GPU])
    live.save()
    assert live.problem() is None
    assert LiveSettings(folder / "live").node() == {("quantum", GPU): 5_000_000, ("sharing", GPU): "exclusive"}
