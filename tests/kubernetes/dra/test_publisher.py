"""The node's slice on an API server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nvshare.coordinator.kubernetes.cluster.api import ApiError
from nvshare.coordinator.kubernetes.dra import publisher as publisher_module
from nvshare.coordinator.kubernetes.dra.publisher import ClusterError, Publisher
from nvshare.coordinator.kubernetes.node.health import State
from tests.kubernetes.dra.cluster import SLICE, Api
from tests.kubernetes.dra.test_slices import CARD, PART
from tests.waiting import eventually


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    yield made
    made.close()


class Published:
    """A publisher of a node whose GPUs a test changes."""

    def __init__(self, api: Api) -> None:
        self.state = State((CARD, PART))
        self.publisher = Publisher(api.access, "node-1", lambda: self.state, 4)


@pytest.fixture
def node(api: Api) -> Published:
    made = Published(api)
    made.publisher.check()
    return made


def test_a_slice_is_written_only_when_it_changes(api: Api, node: Published) -> None:
    """Each node would load the API server and the scheduler for ever, or claims be placed by an old list."""
    for _ in range(3):
        node.publisher.reconcile()
    assert [each["spec"]["pool"]["generation"] for each in api.writes] == [1]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "uid-node", "controller": True}
    assert api.objects[SLICE]["metadata"]["ownerReferences"] == [owner]

    node.state = replace(node.state, problems=((PART.uuid, "lost"),))
    for _ in range(3):
        node.publisher.reconcile()
    spec = api.objects[SLICE]["spec"]
    assert [each["spec"]["pool"]["generation"] for each in api.writes] == [1, 2]
    assert [device.get("taints", [{}])[0].get("effect") for device in spec["devices"]] == [None, "NoSchedule"]
    node.state = replace(node.state, problems=())
    node.publisher.reconcile()
    assert not any("taints" in device for device in api.objects[SLICE]["spec"]["devices"])


def test_a_restarted_driver_keeps_the_slice(api: Api, node: Published) -> None:
    """Every restart would change all nodes' slices, or go back to an earlier generation, which schedulers ignore."""
    node.publisher.reconcile()
    again = Published(api)
    again.publisher.check()
    again.publisher.reconcile()
    assert len(api.writes) == 1
    again.state = State((CARD,))
    again.publisher.reconcile()
    assert api.objects[SLICE]["spec"]["pool"]["generation"] == 2


def test_a_slice_of_another_hand_is_put_right(api: Api, node: Published) -> None:
    """Claims would be placed on GPUs that are not there."""
    node.publisher.reconcile()
    api.objects[SLICE] = {**api.objects[SLICE], "spec": {**api.objects[SLICE]["spec"], "devices": []}}
    node.publisher.reconcile()
    assert len(api.objects[SLICE]["spec"]["devices"]) == 2


@pytest.fixture
def following(node: Published) -> Iterator[Published]:
    """Its publisher runs."""
    thread = threading.Thread(target=node.publisher.run, args=(node.publisher.follow,))
    thread.start()
    yield node
    node.publisher.stop()
    thread.join()


def test_a_wiped_slice_comes_back(api: Api, following: Published) -> None:
    """After a restart of the kubelet, which removes slices, no GPU could be had until the watch ends after minutes."""
    eventually(lambda: "watch" in api.asked, "a watch")
    assert SLICE in api.objects
    for generation in (2, 3):
        del api.objects[SLICE]
        eventually(lambda: SLICE in api.objects, "the slice again")
        assert api.objects[SLICE]["spec"]["pool"]["generation"] == generation
    emptied = {**api.objects[SLICE]["spec"], "devices": []}
    api.objects[SLICE] = {**api.objects[SLICE], "metadata": {"resourceVersion": "99"}, "spec": emptied}
    eventually(lambda: len(api.writes) == 4, "the slice put right")
    assert api.asked.count("watch") == 1


def test_a_change_of_the_gpus_ends_the_watch(api: Api, following: Published) -> None:
    """A broken GPU would be given out until the watch ends after minutes."""
    eventually(lambda: "watch" in api.asked, "a watch")
    following.state = State((CARD,))
    following.publisher.wake()
    eventually(lambda: len(api.objects[SLICE]["spec"]["devices"]) == 1, "the slice without the GPU")
    eventually(lambda: api.asked.count("watch") == 2, "a watch again")


def test_a_slice_that_does_not_change_costs_a_watch(api: Api, following: Published) -> None:
    """A thousand nodes would load the API server for nothing."""
    eventually(lambda: "watch" in api.asked, "a watch")
    version = api.objects[SLICE]["metadata"]["resourceVersion"]
    api.objects[SLICE] = {**api.objects[SLICE], "metadata": {"resourceVersion": version}}  # an event of our own write
    del api.objects[SLICE]
    eventually(lambda: len(api.writes) == 2, "the slice again")
    assert api.asked.count("GET") <= 4  # before the first write, at the start of the watch, after the wipe


def test_what_changes_while_the_server_is_away_is_put_right(
    api: Api, following: Published, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart of the control plane would end the watch for good, or the right to watch be needed to publish."""
    assert publisher_module.PERIOD_S < 5
    caplog.set_level("INFO")
    monkeypatch.setattr(publisher_module, "PERIOD_S", 0.02)
    eventually(lambda: "watch" in api.asked, "a watch")
    api.away = True
    del api.objects[SLICE]
    api.end_watches()
    api.may_watch = False
    eventually(lambda: "cannot be published" in caplog.text, "the failure")
    api.away = False
    eventually(lambda: "resourceslices is forbidden" in caplog.text, "the right that is missing")
    assert SLICE in api.objects
    api.may_watch = True
    eventually(lambda: "the API server answers again" in caplog.text, "a watch")
    assert caplog.text.count("resourceslices is forbidden") == 1


@pytest.mark.parametrize(
    ("minor", "said"), [("35", "is Kubernetes 1.35, and the DRA driver needs 1.36"), ("9+", "1.9")]
)
def test_an_old_cluster_is_refused(api: Api, minor: str, said: str) -> None:
    """Pods would stay pending without a reason."""
    api.minor = minor
    with pytest.raises(ClusterError, match=said):
        Published(api).publisher.check()


def test_a_cluster_without_the_gate_is_refused(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """Each GPU would go to one claim alone; and without taints a broken GPU to many, of which the log says nothing."""
    api.minor = "36+"
    api.gates = {"DRAConsumableCapacity"}
    Published(api).publisher.check()
    assert "DRADeviceTaints is off" in caplog.text
    api.gates = set()
    with pytest.raises(ClusterError, match="feature gate DRAConsumableCapacity"):
        Published(api).publisher.check()
    assert not api.writes


def test_an_api_server_that_is_away_is_waited_for(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart of the control plane would end the drivers of all nodes."""
    monkeypatch.setattr(publisher_module, "PERIOD_S", 0.02)
    publisher = Published(api).publisher
    api.away = True
    tries = 0

    def check() -> None:
        nonlocal tries
        tries += 1
        api.away = tries < 4
        publisher.check()

    publisher.run(check, once=True)
    assert tries == 4
    assert caplog.text.count("the server is shutting down") == 1
    api.away = True
    with pytest.raises(ApiError):
        publisher.check()
