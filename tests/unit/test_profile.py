"""A program's profile: one table of settings, and the one reader of the words that set them."""

from __future__ import annotations

import dataclasses
from dataclasses import field, make_dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.client_hook.launcher import client_environment
from nvshare.coordinator.cli import ctl_slot, run
from nvshare.coordinator.daemon import dispatch
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.kubernetes.cluster.annotations import Rules, settings_of
from nvshare.coordinator.kubernetes.slots.slot import Slot
from nvshare.coordinator.model import profile
from nvshare.coordinator.model.profile import PROFILE, TIME, Facts, ProgramSetting
from nvshare.coordinator.protocol import messages
from tests.docs import generated
from tests.unit.daemon.test_rank import dispatcher_for

MOST_FILES = 3


def everything_generated() -> dict[Path, str]:
    pages = {generated.REFERENCE / page: generated.generate(page) for page, _ in generated.TABLES.values()}
    return pages | {path: make() for path, make in generated.FILES.items()}


@pytest.fixture
def nap(monkeypatch: pytest.MonkeyPatch) -> ProgramSetting:
    """A new setting: what one would write into model/profile.py."""
    made = ProgramSetting(
        word="nap", field="nap_ns", kind=TIME, metavar="TIME", help="how long it naps",
        within=lambda slot, own: own if slot is None else min(own or slot, slot),
    )  # fmt: skip
    facts = make_dataclass("Facts", [("nap_ns", int, field(default=0))], bases=(Facts,), frozen=True, slots=True)
    monkeypatch.setitem(PROFILE, "nap", made)
    monkeypatch.setattr(dispatch, "Facts", facts)
    return made


def test_a_new_setting_touches_few_files(nap: ProgramSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a new setting needs a place of its own in each thing that can set it, and somebody forgets one."""
    with_it = everything_generated()
    monkeypatch.delitem(PROFILE, "nap")
    changed = {path for path, text in everything_generated().items() if text != with_it[path]}
    assert changed == {generated.HEADER, generated.REFERENCE / "commands.md"}
    assert len({Path(profile.__file__), *changed}) <= MOST_FILES


def test_a_new_setting_can_be_said_everywhere(nap: ProgramSetting, tmp_path: Path) -> None:
    """Broken: a new setting has a flag or an annotation without an effect."""
    options = run.make_parser().parse_args(["--nap", "5s"])
    launched = client_environment({}, hook=Path("/h.so"), runtime_dir=tmp_path, options=run.profile_of(options))
    assert launched["NVSHARE_NAP"] == "5s"

    pod = {"metadata": {"annotations": {"nvshare.com/nap": "3s"}}}
    policy = settings_of(pod, "main", Rules())
    assert policy == {"nap": "3s"}
    record = {"slot": "a", "allocation": "1", "allocated_at_s": 0, "gpus": ["G"], "device_ids": ["G::0"]}
    assert Slot.model_validate({**record, "policy": policy}).policy == policy
    assert "nap_ns" in ctl_slot.with_profile(lambda **_: None).__annotations__

    for slot, nap_ns in (("", 5 * 10**9), ("s", 3 * 10**9)):
        dispatcher, _ = dispatcher_for(Peer(7, 0, slot), policy)
        hello = messages.Hello(messages.PROTOCOL_VERSION, "job", "python", 1, 0, profile="nap=5s\n")
        dispatcher.frame(1, messages.encode(hello), 1)
        assert dispatcher.facts(1).nap_ns == nap_ns  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", [row for row in PROFILE.values() if row.field], ids=lambda row: row.word)
def test_each_setting_is_a_fact_and_has_one_name(row: ProgramSetting) -> None:
    """Broken: what a program says ends in no record, or two settings share a variable."""
    names = {each.name for each in dataclasses.fields(Facts)} | {each.name for each in dataclasses.fields(Facts().rank)}
    assert row.field in names
    for name in ("option", "variable", "annotation", "field"):
        assert [getattr(other, name) for other in PROFILE.values()].count(getattr(row, name)) == 1


def test_a_container_only_lowers_what_takes_from_others() -> None:
    """Broken: a pod without annotations has by its own environment what its neighbours then lack."""
    greedy, _ = profile.read(
        {"priority": "9", "weight": "9", "class": "interactive", "share_request": "0.9", "share_limit": "0.95"}
    )
    assert Facts().having(**greedy).within({}) == Facts().having(share_limit=0.95)


@given(st.text(max_size=600), st.sampled_from([*PROFILE, "other", ""]))
def test_any_text_is_read_or_told(text: str, word: str) -> None:
    """Broken: a program's text raises in the coordinator, or a mistake is neither used nor told."""
    words = profile.of_text(f"{word}={text}\n{text}")
    values, mistakes = profile.read(words)
    Facts().having(**values)
    assert len(values) + len(mistakes) == len(words)
    assert all(len(why) < 300 for why in mistakes.values())
