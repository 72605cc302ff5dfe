"""The watch of the node's pods, against a double of the API server over TLS.

Non-goals: what annotations mean.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from nvshare.coordinator.kubernetes.cluster.api import ApiAccess, NotInClusterError
from nvshare.coordinator.kubernetes.cluster.pods import PodWatch, Timing
from tests.kubernetes.cluster.api_server import TOKEN, ApiServer, Reply
from tests.kubernetes.cluster.pod_shapes import RULES, Json, container, pod
from tests.waiting import eventually

QUICK = Timing(first_pause_s=0.01, longest_pause_s=0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path)
    yield made
    made.close()


class Watching:
    """A watch, and how often it said that something changed."""

    def __init__(self, server: ApiServer, **options: Any) -> None:
        self.changes = 0
        self.watch = PodWatch(
            node_name="node-1", changed=self._changed, rules=RULES, **{"api": server.access, "timing": QUICK, **options}
        )

    def _changed(self) -> None:
        self.changes += 1

    def priority(self, name: str = "train-0") -> int | None:
        found = self.watch.policy("ml", name, "main")
        return int(found["priority"]) if found and "priority" in found else None


@pytest.fixture
def watching(server: ApiServer) -> Iterator[Watching]:
    made = Watching(server)
    yield made
    made.watch.stop()


def versioned(version: str, priority: str | None = "5", name: str = "train-0", **status: Any) -> Json:
    """A pod as the API server shows it."""
    made = pod(annotations=None if priority is None else {"nvshare.com/priority": priority, "other.example/a": "b"})
    made["metadata"] |= {"resourceVersion": version, "name": name}
    made["status"] = status
    return made


def test_listed_and_followed(server: ApiServer, watching: Watching) -> None:
    """The annotations of running pods must reach their slots, also those that change while it runs."""
    server.state.items = [versioned("90")]
    watching.watch.start()
    eventually(lambda: watching.priority() == 5, "the first event")
    server.event("MODIFIED", versioned("101", "7"))
    eventually(lambda: watching.priority() == 7, "a change")
    server.event("ADDED", versioned("102", "9", "other"))
    eventually(lambda: watching.priority("other") == 9, "a new pod")
    server.event("DELETED", versioned("103", "9", "other"))
    eventually(lambda: watching.priority("other") is None, "a pod that went")
    eventually(lambda: watching.changes == 4, "each change told")


def test_asks_for_this_node_only(server: ApiServer, watching: Watching) -> None:
    """A node that watches the cluster's pods would load the API server with everybody's changes."""
    watching.watch.start()
    eventually(lambda: server.state.asked, "a watch")
    asked = server.state.asked[0]
    assert asked.path == "/api/v1/pods"
    assert asked.query["watch"] == "1"
    assert asked.query["fieldSelector"] == "spec.nodeName=node-1"
    assert asked.authorization == f"Bearer {TOKEN}"
    assert asked.query["resourceVersion"] == "0"
    assert asked.query["allowWatchBookmarks"] == "true"
    assert 300 <= int(asked.query["timeoutSeconds"]) <= 600


def bookmark(server: ApiServer, version: str) -> None:
    server.event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": version}})


def test_goes_on_from_the_bookmark(server: ApiServer, watching: Watching) -> None:
    """All pods again in each watch would be the expensive thing that versions are there to spare."""
    watching.watch.start()
    bookmark(server, "250")
    server.end_watch()
    eventually(lambda: len(server.state.asked) == 2, "the second watch")
    assert server.state.asked[1].query["resourceVersion"] == "250"


def test_a_watch_that_ends_before_its_bookmark_begins_again(server: ApiServer, watching: Watching) -> None:
    """The pods that exist come in no order of versions: a watch from one of these could miss the older ones."""
    server.state.items = [versioned("90")]
    watching.watch.start()
    eventually(lambda: watching.priority() == 5, "the first event")
    server.end_watch()
    eventually(lambda: len(server.state.asked) == 2, "the second watch")
    assert server.state.asked[1].query["resourceVersion"] == "0"


@pytest.mark.parametrize("by_status", [True, False])
def test_gone_begins_afresh(server: ApiServer, watching: Watching, by_status: bool) -> None:
    """After 410 the version before would lead to the same 410 for ever."""
    server.state.items = [versioned("90")]
    watching.watch.start()
    eventually(lambda: watching.priority() == 5, "the pod")
    bookmark(server, "95")
    if by_status:
        server.state.replies.append(Reply(410, b'{"kind": "Status", "code": 410, "message": "too old"}'))
        server.end_watch()
    else:
        server.event("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
    begun = ["0", "95", "0"] if by_status else ["0", "0"]
    eventually(lambda: [each.query["resourceVersion"] for each in server.state.asked] == begun, "a beginning")
    assert watching.priority() == 5
    assert watching.watch.counts.failures == 0


def test_a_pod_that_went_meanwhile_is_forgotten(server: ApiServer, watching: Watching) -> None:
    """Broken: pods that end while the API server is away stay for ever; or all are forgotten for a moment."""
    server.state.items = [versioned("90"), versioned("91", "9", "other")]
    watching.watch.start()
    eventually(lambda: watching.priority("other") == 9, "both")
    server.state.items = [versioned("90")]
    server.state.replies.append(Reply(410, b'{"kind": "Status", "code": 410, "message": "too old"}'))
    server.end_watch()
    eventually(lambda: len(server.state.asked) == 3, "a watch from the beginning")
    assert watching.priority("other") == 9
    bookmark(server, "250")
    eventually(lambda: watching.priority("other") is None, "the bookmark")
    assert watching.priority() == 5
    assert watching.watch.counts.pods == 1


def test_forbidden_is_said_once_and_tried_again(
    server: ApiServer, watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    """Without RBAC the plugin must go on; and take the annotations when an administrator has added it."""
    text = json.dumps({"kind": "Status", "code": 403, "message": "pods is forbidden"}).encode()
    server.state.replies.extend(Reply(403, text) for _ in range(3))
    server.state.items = [versioned("90")]
    watching.watch.start()
    eventually(lambda: watching.priority() == 5, "the pod, at last")
    said = [record.getMessage() for record in caplog.records if "interrupted" in record.getMessage()]
    assert len(said) == 1
    assert "pods is forbidden" in said[0]
    assert "rbac.create" in said[0]
    assert watching.watch.counts.failures == 3


BROKEN = {
    "a page of a proxy": Reply(200, b"<html>bad gateway</html>"),
    "no event": Reply(200, b'{"kind": "Status"}\n'),
    "deep": Reply(200, b"[" * 200_000 + b"\n"),
    "busy": Reply(429, b"{}", (("Retry-After", "7200"),)),
    "an error without text": Reply(500),
    "a redirect": Reply(302, b"", (("Location", "https://elsewhere.example/"),)),
}


@pytest.mark.parametrize("reply", BROKEN.values(), ids=BROKEN.keys())
def test_broken_answers_cost_nothing_but_time(server: ApiServer, watching: Watching, reply: Reply) -> None:
    """Whatever stands between us and the API server, the plugin lives and the watch comes back."""
    server.state.replies.append(reply)
    server.state.items = [versioned("90")]
    watching.watch.start()
    eventually(lambda: watching.priority() == 5, "the pod")
    assert watching.watch.counts.failures == 1


@pytest.mark.parametrize(
    "line", [b"not json\n", b'{"type": "ADDED"}\n', b'{"type": "ADDED", "object": {}}\n', b"[]\n"], ids=str
)
def test_broken_events_cost_nothing_but_time(server: ApiServer, watching: Watching, line: bytes) -> None:
    """The same for a watch; what is known stays known meanwhile."""
    server.state.items = [versioned("90")]
    watching.watch.start()
    eventually(lambda: watching.priority() == 5, "the pod")
    server.raw(line)
    eventually(lambda: len(server.state.asked) == 2, "a new watch")
    assert watching.priority() == 5
    assert watching.watch.counts.failures == 1


def test_cut_off_line_is_no_event(server: ApiServer, watching: Watching) -> None:
    """Half an event must not be taken for one."""
    watching.watch.start()
    server.raw(json.dumps({"type": "ADDED", "object": versioned("101")}).encode()[:-1])
    server.end_watch()
    eventually(lambda: len(server.state.asked) == 2, "the next watch")
    assert server.state.asked[1].query["resourceVersion"] == "0"
    assert watching.priority() is None


def test_status_changes_are_not_told(server: ApiServer, watching: Watching) -> None:
    """A pod's status changes all the time; rewriting slots for it would be work for nothing."""
    server.state.items = [versioned("90")]
    watching.watch.start()
    server.event("MODIFIED", versioned("101", phase="Running"))
    server.event("MODIFIED", versioned("102", "6"))
    eventually(lambda: watching.priority() == 6, "the second event")
    eventually(lambda: watching.changes == 2, "first and second event")


def test_pods_without_slots_are_not_kept(server: ApiServer, watching: Watching) -> None:
    """A node has hundreds of pods that do not concern us."""
    plain = versioned("90", name="plain")
    plain["spec"]["containers"] = [container(gpu=False)]
    server.state.items = [plain, versioned("91")]
    watching.watch.start()
    eventually(lambda: watching.priority() == 5, "the other pod")
    assert watching.watch.policy("ml", "plain", "main") is None
    assert watching.watch.counts.pods == 1


def test_bad_annotations_are_left_out_and_counted(
    server: ApiServer, watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    """A typing mistake must be findable, and must not take the pod's other settings with it."""
    made = versioned("90", "high")
    made["metadata"]["annotations"]["nvshare.com/memory-limit"] = "8Gi"
    server.state.items = [made]
    watching.watch.start()
    eventually(lambda: watching.changes, "the first event")
    found = watching.watch.policy("ml", "train-0", "main")
    assert found is not None
    assert found == {"memory_limit": str(8 << 30)}
    assert watching.watch.counts.bad_annotations == 1
    assert 'pod ml/train-0: metadata.annotations[nvshare.com/priority]: "high" is not allowed' in caplog.text


def test_everything_reaches_the_slot(server: ApiServer, watching: Watching) -> None:
    """A setting, or a priority class, that is read but not passed on would be documented and do nothing."""
    said = {"weight": "3", "gang": "pair", "share-limit": "40%", "park-after": "10m", "memory-limit": "1Gi"}
    said["memory-limit.main"] = "2Gi"
    made = versioned("90")
    made["spec"]["priorityClassName"] = "batch"
    made["metadata"]["annotations"] = {f"nvshare.com/{key}": value for key, value in said.items()}
    server.state.items = [made]
    watching.watch.start()
    eventually(lambda: watching.changes, "the first event")
    found = watching.watch.policy("ml", "train-0", "main")
    assert found is not None
    assert found == {
        "priority": "-100", "weight": "3", "class": "best-effort", "share_limit": "40%", "gang": "ml/pair",
        "memory_limit": str(2 << 30), "park_after": "10m",
    }  # fmt: skip


def test_stop_ends_an_open_watch(server: ApiServer, watching: Watching) -> None:
    """A plugin that is told to end must not wait for the API server."""
    watching.watch.start()
    eventually(lambda: server.state.asked, "a watch")
    watching.watch.stop()
    assert not any(thread.name == "pod-watch" for thread in threading.enumerate())
    assert watching.watch.counts.failures == 0


def test_a_callback_that_raises_is_survived(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk under slot.json must not end the watch."""

    def fail() -> None:
        raise OSError("no space left")

    watch = PodWatch(node_name="node-1", changed=fail, rules=RULES, api=server.access, timing=QUICK)
    server.state.items = [versioned("90")]
    watch.start()
    try:
        server.event("MODIFIED", versioned("101", "7"))
        eventually(lambda: watch.policy("ml", "train-0", "main") == {"priority": "7"}, "the next event")
    finally:
        watch.stop()
    assert "no space left" in caplog.text


def test_token_goes_to_the_api_server_only(server: ApiServer, tmp_path: Path) -> None:
    """A server with another certificate must not be given our token."""
    other = tmp_path / "other.crt"
    trustme.CA().cert_pem.write_to_path(str(other))
    access = ApiAccess(server.access.host, server.access.port, server.access.token_file, other)
    watching = Watching(server, api=access)
    watching.watch.start()
    eventually(lambda: watching.watch.counts.failures >= 2, "refusals")
    watching.watch.stop()
    assert server.state.asked == []


def test_token_is_read_again(server: ApiServer, watching: Watching) -> None:
    """Tokens of service accounts are renewed each hour."""
    watching.watch.start()
    eventually(lambda: server.state.asked, "a watch")
    server.access.token_file.write_text("renewed", encoding="ascii")
    server.end_watch()
    eventually(lambda: len(server.state.asked) == 2, "the next watch")
    assert server.state.asked[1].authorization == "Bearer renewed"


def test_outside_of_a_cluster_it_says_so(tmp_path: Path) -> None:
    """The message must name what is missing: there are three ways to get it wrong."""
    with pytest.raises(NotInClusterError, match="KUBERNETES_SERVICE_HOST"):
        ApiAccess.from_cluster({})
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    env["NVSHARE_SERVICE_ACCOUNT_DIR"] = str(tmp_path)
    with pytest.raises(NotInClusterError, match="automountServiceAccountToken"):
        ApiAccess.from_cluster(env)
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x", encoding="ascii")
    assert ApiAccess.from_cluster(env).host == "10.0.0.1"
    with pytest.raises(NotInClusterError, match="NODE_NAME"):
        PodWatch(node_name="", changed=lambda: None).start()
