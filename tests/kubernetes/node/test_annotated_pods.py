"""Annotations on a whole node: from the API server's double to processes that share a simulated GPU.

Non-goals: the watch by itself (test_pods.py), slots without annotations (test_node.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster.api_server import ApiServer
from tests.kubernetes.cluster.pod_shapes import PRIORITY_CLASS_VALUES, Json, pod
from tests.kubernetes.node.processes import GPU, Node
from tests.waiting import eventually

HOLD = str(Path(__file__).parent / "hold_memory.py")


@pytest.fixture
def server(node: Node, tmp_path: Path) -> Iterator[ApiServer]:
    """The API server that the node's plugin watches."""
    made = ApiServer(tmp_path)
    classes = tmp_path / "priority-classes.json"
    classes.write_text(json.dumps(PRIORITY_CLASS_VALUES), encoding="utf-8")
    node.plugin_environment = {
        "KUBERNETES_SERVICE_HOST": made.access.host,
        "KUBERNETES_SERVICE_PORT": str(made.access.port),
        "NVSHARE_SERVICE_ACCOUNT_DIR": str(tmp_path),
    }
    node.start_plugin("--watch-pods", "--node-name=node-1", f"--priority-classes={classes}")
    node.kubelet.await_devices(GPU, 10)
    yield made
    made.close()


def annotated(version: str, annotations: dict[str, str], **spec: Any) -> Json:
    """The pod as the API server shows it."""
    made = pod(annotations={f"nvshare.com/{key}": value for key, value in annotations.items()}, **spec)
    made["metadata"] |= {"name": "train", "namespace": "default", "resourceVersion": version}
    return made


def client(node: Node) -> Json:
    """The only one; empty while there is none."""
    clients = node.status()["clients"]
    return clients[0] if clients else {}


def test_annotations_bind_running_pods(node: Node, server: ApiServer) -> None:
    """Broken: a pod's priority and limit do not follow its annotations."""
    server.event("ADDED", annotated("101", {"memory-limit": "1Gi"}, priorityClassName="production"))
    grant = node.kubelet.admit("train", {GPU: 1})
    eventually(lambda: node.slots().get("train", {}).get("limit_bytes") == 1 << 30, f"a limit\n{node.log('plugin')}")
    grant.environment["NVSHARE_PRIORITY"] = "1000"  # what a greedy pod would write
    running = node.contain(grant, [sys.executable, HOLD, "640", "1024", "stay"])
    assert running.stdout is not None
    assert json.loads(running.stdout.readline())["total_mib"] == 1024
    assert client(node)["priority"] == 10
    server.event(
        "MODIFIED", annotated("102", {"memory-limit": "2Gi", "priority": "-3"}, priorityClassName="production")
    )
    eventually(lambda: client(node).get("priority") == -3, f"the new priority\n{node.log('plugin')}")
    eventually(lambda: node.slots()["train"]["limit_bytes"] == 2 << 30, "the new limit")
