"""The watch of a node's pods against a real API server, as the chart's account, with the rights that the chart gives.

Non-goals: what annotations mean (test_annotations.py).
"""

from __future__ import annotations

import http.client
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nvshare.coordinator.kubernetes.cluster.pods import ApiAccess, ApiError, PodWatch, Timing
from nvshare.coordinator.kubernetes.slots.slot import SlotPolicy
from tests.chart.conftest import render
from tests.kubernetes.cluster.pod_shapes import RULES, Json, container, pod
from tests.kubernetes.real.control_plane import ControlPlane, control_plane, free_port
from tests.waiting import eventually

NODE = "node-1"
QUICK = Timing(first_pause_s=0.05, longest_pause_s=0.2)


@pytest.fixture(scope="module")
def own_plane(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One that a test may stop.  `plane`: only to be skipped where there is none."""
    with control_plane(tmp_path_factory.mktemp("own")) as made:
        yield made


def install(plane: ControlPlane, namespace: str) -> str:
    """The chart's account and rights; returns the account's token."""
    plane.namespace(namespace)
    rendered = render({"podAnnotations": {"watch": True}}, name="gpu", namespace=namespace)
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        reply = plane.admin.apply(rendered.one(kind))
        assert reply.status < 300, reply.message
    return plane.admin.token_for(namespace, rendered.one("ServiceAccount")["metadata"]["name"])


def access(plane: ControlPlane, folder: Path, token: str) -> ApiAccess:
    """As a pod of the chart has it."""
    file = folder / "token"
    file.write_text(token, encoding="ascii")
    return ApiAccess("127.0.0.1", plane.port, file, plane.ca_file)


@contextmanager
def watching(api: ApiAccess, timing: Timing = QUICK) -> Iterator[PodWatch]:
    """A watch that runs."""
    watch = PodWatch(node_name=NODE, changed=lambda: None, rules=RULES, api=api, timing=timing)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def placed(name: str, annotations: dict[str, str], node: str = NODE) -> Json:
    """A pod on a node."""
    made = pod(container(), annotations={f"nvshare.com/{key}": value for key, value in annotations.items()})
    del made["status"]
    made["metadata"] = {"name": name, "annotations": made["metadata"]["annotations"]}
    made["spec"]["nodeName"] = node
    return made


def priority(watch: PodWatch, namespace: str, name: str) -> int | None:
    """Priority that the pod's slot would get."""
    found: SlotPolicy | None = watch.policy(namespace, name, "main")
    return None if found is None else found.priority


def annotate(plane: ControlPlane, namespace: str, name: str, **annotations: str | None) -> None:
    """As `kubectl annotate --overwrite` does it."""
    change = {"metadata": {"annotations": {f"nvshare.com/{key}": value for key, value in annotations.items()}}}
    reply = plane.admin.patch(f"/api/v1/namespaces/{namespace}/pods/{name}", change)
    assert reply.status == http.client.OK, reply.message


def test_annotations_are_followed_live(plane: ControlPlane, tmp_path: Path) -> None:
    """A pod that was there, one that comes, one that changes and one that goes: slots follow all of them."""
    namespace = "watch-live"
    token = install(plane, namespace)
    create = plane.admin.create
    assert create(placed("first", {"priority": "3"}), namespace).status == http.client.CREATED
    assert create(placed("elsewhere", {"priority": "9"}, "node-2"), namespace).status == http.client.CREATED
    with watching(access(plane, tmp_path, token)) as watch:
        eventually(lambda: priority(watch, namespace, "first") == 3, "what was there")
        assert create(placed("second", {"class": "best-effort"}), namespace).status == http.client.CREATED
        eventually(lambda: priority(watch, namespace, "second") == -100, "what came")
        annotate(plane, namespace, "second", priority="7")
        eventually(lambda: priority(watch, namespace, "second") == 7, "what changed")
        annotate(plane, namespace, "second", priority="high")
        eventually(lambda: watch.counts().bad_annotations == 1, "what is wrong is counted")
        assert plane.admin.delete(f"/api/v1/namespaces/{namespace}/pods/first", 0).status == http.client.OK
        eventually(lambda: priority(watch, namespace, "first") is None, "what went")
        assert priority(watch, namespace, "elsewhere") is None
        counts = watch.counts()
        assert (counts.pods, counts.lists, counts.failures) == (1, 1, 0)


def test_the_role_is_enough_and_no_more(plane: ControlPlane) -> None:
    """More rights than the watch needs would be a reason not to install it."""
    client = plane.user(install(plane, "watch-role"))
    assert client.request("GET", "/api/v1/pods").status == http.client.OK
    for path in ("/api/v1/secrets", "/api/v1/nodes", "/api/v1/namespaces/watch-role/configmaps"):
        assert client.request("GET", path).status == http.client.FORBIDDEN, path
    path = "/api/v1/namespaces/watch-role/pods"
    assert client.request("POST", path, placed("mine", {})).status == http.client.FORBIDDEN


def test_without_the_role_it_says_what_is_missing(
    plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`rbac.create: false` and nothing in its place must not look like pods without annotations."""
    plane.namespace("watch-nobody")
    token = plane.admin.token_for("watch-nobody", "default")
    with caplog.at_level(logging.WARNING, "nvshare.pods"), watching(access(plane, tmp_path, token)) as watch:
        eventually(lambda: watch.counts().failures > 1, "it fails, and tries again")
    (said,) = caplog.messages
    assert "403" in said
    assert "the service account needs list and watch for pods" in said


def test_watches_that_end_are_taken_up_where_they_were(plane: ControlPlane, tmp_path: Path) -> None:
    """The API server ends each watch after a time: a list for each would be a load on it, a gap would lose changes."""
    namespace = "watch-ends"
    token = install(plane, namespace)
    assert plane.admin.create(placed("steady", {"priority": "0"}), namespace).status == http.client.CREATED
    with watching(access(plane, tmp_path, token), Timing(0.01, 0.02, watch_s=1)) as watch:
        for number in range(1, 40):
            annotate(plane, namespace, "steady", priority=str(number))
            eventually(lambda n=number: priority(watch, namespace, "steady") == n, f"change {number}")  # type: ignore[misc]
        counts = watch.counts()
        assert (counts.lists, counts.failures) == (1, 0)


def test_what_happened_while_the_server_was_away(own_plane: ControlPlane, tmp_path: Path) -> None:
    """Then the watch has nobody to ask, keeps what it knew, and lists anew: nothing may be lost or kept wrongly."""
    plane, namespace = own_plane, "watch-gone"
    token = install(plane, namespace)
    for name in ("stays", "goes"):
        assert plane.admin.create(placed(name, {"priority": "1"}), namespace).status == http.client.CREATED
    with watching(access(plane, tmp_path, token)) as watch:
        eventually(lambda: priority(watch, namespace, "goes") == 1, "both are known")
        plane.stop("kube-apiserver")
        eventually(lambda: watch.counts().failures > 0, "it is missed")
        assert priority(watch, namespace, "stays") == 1
        other = plane.start_server("other-apiserver", free_port())
        change = {"metadata": {"annotations": {"nvshare.com/priority": "2"}}}
        assert other.patch(f"/api/v1/namespaces/{namespace}/pods/stays", change).status == http.client.OK
        assert other.delete(f"/api/v1/namespaces/{namespace}/pods/goes", 0).status == http.client.OK
        plane.start_server()
        eventually(lambda: priority(watch, namespace, "stays") == 2, "what changed meanwhile")
        assert priority(watch, namespace, "goes") is None
        annotate(plane, namespace, "stays", priority="5")
        eventually(lambda: priority(watch, namespace, "stays") == 5, "and what changes later")
        plane.stop("other-apiserver")


def test_a_version_that_is_gone_is_known_as_that(own_plane: ControlPlane) -> None:
    """A server that was started anew has forgotten older versions: that must lead to a fresh list, not to a failure."""
    plane = own_plane
    plane.namespace("watch-old")
    made = plane.admin.create(placed("early", {}), "watch-old")
    annotate(plane, "watch-old", "early", priority="1")
    plane.stop("kube-apiserver")
    plane.start_server()
    version = made.body["metadata"]["resourceVersion"]
    said = plane.admin.request("GET", "/api/v1/pods", watch="1", resourceVersion=version, timeoutSeconds="5")
    watch = PodWatch(node_name=NODE, changed=lambda: None, rules=RULES)
    with pytest.raises(ApiError, match="too old resource version") as caught:
        watch._event(said.body)
    assert caught.value.code == http.client.GONE
