"""Events for containers that run without the hook, against a double of the API server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest

from nvshare.coordinator.kubernetes.cluster.api import ApiAccess
from nvshare.coordinator.kubernetes.nri import pod_events
from nvshare.coordinator.kubernetes.nri.plugin import AWAY
from nvshare.coordinator.kubernetes.nri.pod_events import PodEvents
from tests.kubernetes.cluster.api_server import ApiServer, Reply
from tests.kubernetes.nri.test_plugin import UID, container, sandbox
from tests.waiting import eventually

PLACE = "/api/v1/namespaces/team/events"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def test_an_event_names_pod_container_and_reason(server: ApiServer) -> None:
    """Broken: `kubectl describe pod` shows nothing, or the API server refuses the event."""
    PodEvents().tell(sandbox(), container("c0ffee"), AWAY)
    eventually(lambda: server.state.created, "the event")
    ((place, event),) = server.state.created.items()
    kubernetes_validate.validate(event, "1.36", strict=True)
    assert place == f"{PLACE}/pod.c0ffee"
    assert event["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "namespace": "team", "name": "pod", "uid": UID,
        "fieldPath": "spec.containers{main}",
    }  # fmt: skip
    assert (event["type"], event["reason"]) == ("Warning", "WithoutHook")
    assert event["message"].endswith("without the hook, out of turn and without a limit: " + AWAY)


def test_one_event_for_each_container(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    """Broken: each restart of the plugin adds an event, a known one counts as a failure, or a long name is refused."""
    for events in (PodEvents(), PodEvents()):
        events.tell(sandbox(), container("1"), AWAY)
        events.tell(sandbox(name="a" * 199 + "-b"), container("2"), AWAY)
        events.tell(sandbox(name="last"), container("3"), AWAY)
    eventually(lambda: server.state.refused == 3, "the events of both, those of the second known")
    assert server.state.created.keys() == {f"{PLACE}/{name}" for name in ("pod.1", "a" * 199 + ".2", "last.3")}
    assert not caplog.records


def test_without_rights_it_is_said_once(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    """Broken: each container without the hook adds a warning, or no event comes after the right was given."""
    forbidden = json.dumps({"message": "events is forbidden"}).encode()
    server.state.replies.extend(Reply(403, forbidden) for _ in range(3))
    events = PodEvents()
    for number in range(4):
        events.tell(sandbox(), container(str(number)), AWAY)
    eventually(lambda: server.state.created, "the fourth event")
    (record,) = caplog.records
    assert "events is forbidden" in record.getMessage()


def test_nobody_waits_for_the_api_server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Broken: the runtime cuts the plugin off while the API server is away, or memory grows meanwhile."""
    monkeypatch.setattr(pod_events, "MAX_WAITING", 3)
    asked: list[int] = []
    go = threading.Event()

    def hangs() -> None:
        asked.append(1)
        go.wait()
        raise OSError("away")

    monkeypatch.setattr(ApiAccess, "from_cluster", hangs)
    events = PodEvents()
    events.tell(sandbox(), container("first"), AWAY)
    eventually(lambda: asked, "the first event is under way")
    for number in range(10):
        events.tell(sandbox(), container(str(number)), AWAY)
    go.set()
    eventually(lambda: len(asked) == 1 + 3, "those that have waited")
    assert "no events for pods without the hook: away" in caplog.text
