"""A picture of the core on the control socket."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.control.server import Administration, plain
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.engine.snapshot import Snapshot
from nvshare.coordinator.model.settings import Sharing
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.system.devices import Device
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import Plan, Progress
from tests.harness import GPU, Harness, one_gpu

RIGHTS = Rights(own_user=0, max_priority=0, max_weight=100, hide_other_users=False)


def names(record: Any) -> Iterator[str]:
    """The fields of a record, those of records in it included."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Progress):
            yield from ("progress_normalised", *(f"progress_{each}" for each in names(value)))
        elif dataclasses.is_dataclass(value):
            yield from names(value)
        else:
            yield field.name


def test_every_value_arrives_in_msgpack_and_json() -> None:
    """Broken if a new field of a picture could not be sent, or an enumeration came as a number."""
    harness = one_gpu(sharing=Sharing.AUTO)
    harness.client(wanted=True, mode=MemoryMode.SWAP)
    snapshot = harness.scheduler.snapshot(harness.clock.now_ns)
    records: list[Any] = [*snapshot.gpus, *snapshot.clients]
    for record in records:
        values = plain(record)
        assert sorted(values) == sorted(names(record)), "each name stands for one value"
        assert msgpack.unpackb(msgpack.packb(values)) == json.loads(json.dumps(values))
    gpu, client = plain(snapshot.gpus[0]), plain(snapshot.clients[0])
    assert gpu["sharing"] == "auto"
    assert client["memory_mode"] == "swap"
    assert client["seats"][0]["phase"] == "holding"


def test_a_sum_beyond_64_bits_is_sent_as_the_largest_number() -> None:
    """Broken: two clients' counts together end every `nvshare-ctl status`, and the coordinator with it."""
    answer = api.decode_reply(api.encode_result({"seats": [{"submissions": 1 << 65, "used_ns": 5}], "phase": "idle"}))
    assert answer == {"seats": [{"submissions": (1 << 64) - 1, "used_ns": 5}], "phase": "idle"}
    assert api.decode_event(api.encode_event(1, 2, "moved", {"bytes": 1 << 65, "hidden": True})) == {
        "seq": 1,
        "at_ns": 2,
        "kind": "moved",
        "bytes": (1 << 64) - 1,
        "hidden": True,
    }


class Unreadable(Scheduler):
    """Its picture cannot be taken."""

    def snapshot(self, now_ns: int) -> Snapshot:
        raise ValueError("no picture")


def test_a_request_that_only_reads_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Broken: whatever is wrong with a picture ends the coordinator, with all leases."""
    dispatcher = Dispatcher(Unreadable(registry.create), None, None, RIGHTS, max_clients=1)  # type: ignore[arg-type]
    administration = Administration(dispatcher, [], registry.create, {}, None, dict, list, RIGHTS)  # type: ignore[arg-type]
    with pytest.raises(api.ControlError, match="log"):
        api.decode_reply(administration.answer(api.encode_request(api.Status()), 0, 5))
    assert "status failed" in caplog.text


@pytest.mark.parametrize(
    ("request_fields", "sentence"),
    [
        ({"ask": "place", "name": "x", "apart": "a\nb"}, "place.apart: has more than 63 bytes, or a control character"),
        ({"ask": "place", "name": "x", "count": 0}, "place.count: must be at least 1"),
        ({"ask": "place"}, "place.name: is missing"),
        ({"ask": "pause", "client": ""}, "pause.client: is empty"),
        ({"ask": "pause", "client": "x" * 64}, "pause.client: has more than 63 characters"),
        ({"ask": "pause", "client": 5}, "pause.client: is of another type"),
        ({"ask": "set_share", "client": "x", "limit": 0.0}, "set_share.limit: must be above 0.0"),
        ({"ask": "set_share", "client": "x", "limit": 2.0}, "set_share.limit: must be at most 1.0"),
        ({"ask": "ping", "more": 1}, "ping.more: is unknown"),
        ({"ask": "set", "setting": "nothing", "value": 1}, "set: 'nothing' is no setting"),
        ({"ask": "{tag.x}"}, "unknown request {tag.x}"),
        ({}, "no request"),
    ],
)
def test_a_refused_request_is_explained_in_words(request_fields: dict[str, Any], sentence: str) -> None:
    """Broken: a user reads the patterns and types of the library that checks requests."""
    with pytest.raises(api.ControlError) as refused:
        api.decode_request(msgpack.packb({"version": api.CONTROL_VERSION, **request_fields}))
    assert refused.value.text == sentence


def administration(hide: bool) -> Administration:
    """One whose GPU's policy fails, with a program that waits."""

    class Failing:
        def decide(self, *_: Any) -> Plan:
            raise ValueError("train.py is too large")

    def make(name: str, uuid: str) -> Any:
        return Failing() if name == "auto" else registry.create(name, uuid)

    rights = Rights(own_user=0, max_priority=0, max_weight=100, hide_other_users=hide)
    harness = Harness(make, policy="auto")
    harness.gpu()
    harness.client(wanted=True)
    dispatcher = Dispatcher(harness.scheduler, None, None, rights, max_clients=1)  # type: ignore[arg-type]
    live: Any = type("NoneLive", (), {"all": lambda self: []})()
    return Administration(dispatcher, [Device(3, GPU, "card", 8 << 30)], make, {}, live, dict, list, rights)


def test_a_failed_policy_is_a_problem_of_its_gpu() -> None:
    """Broken: only who reads the log learns that another policy decides; or names hidden from users are in its text."""

    def problems(user: int, *, hide: bool) -> list[str]:
        reply = administration(hide).answer(api.encode_request(api.Status()), user, 5)
        return list(api.decode_reply(reply)["problems"])

    (problem,) = problems(1000, hide=False)
    assert problem.startswith("GPU 3: the policy auto failed (decide: ValueError: train.py is too large); round_robin")
    (hidden,) = problems(0, hide=True)
    assert hidden.startswith("GPU 3: the policy auto failed; round_robin")


def test_a_request_is_logged_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """Broken: the log has the values of a request as Python writes them."""
    caplog.set_level("INFO")
    made = administration(hide=False)
    made.answer(api.encode_request(api.Place(count=1, gpus="", name="train.py", memory_bytes=1 << 20)), 1000, 5)
    assert "user 1000: place " in caplog.text
    assert "name=train.py" in caplog.text
    assert "{" not in caplog.text
