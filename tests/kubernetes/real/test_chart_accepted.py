"""A real API server takes what the chart renders: each object, and the pods that its controllers would make of it.

Non-goals: what admission does to pods (test_admission_live.py).
"""

from __future__ import annotations

import copy
import http.client
from typing import Any

import pytest
import yaml

from tests.chart.conftest import EXAMPLES, render
from tests.chart.test_matrix import MATRIX
from tests.kubernetes.real.control_plane import ControlPlane, Json, collection
from tests.kubernetes.real.crds import install_crds

NAMESPACE = "chart"
VALUES: dict[str, dict[str, Any]] = {
    **MATRIX,
    "policy": {"admission": {"mode": "policy"}, "priorityClasses": {"production": {"priority": 10, "weight": 4}}},
    "policy-enforced": {"admission": {"mode": "policy", "enforce": True, "priorityRange": {"min": -7, "max": 0}}},
    "memory-gib": {"resource": {"memory": {"enabled": True, "name": "example.com/gpu-memory-gib"}}},
}


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane) -> ControlPlane:
    """With what the values refer to."""
    install_crds(plane)
    for name in (NAMESPACE, "team-a", "team-b", "monitoring", "grafana"):
        plane.namespace(name)
    plane.namespace("restricted", **{"pod-security.kubernetes.io/enforce": "restricted"})
    for document in (
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1000},
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
    ):
        assert plane.admin.apply(document).status < 300
    return plane


def dry_run(plane: ControlPlane, document: Json, namespace: str = NAMESPACE) -> tuple[int, str, tuple[str, ...]]:
    """Result of a dry run: status, message, warnings."""
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    reply = plane.admin.request("POST", collection(document, namespace), document, **query)
    return reply.status, reply.message, reply.warnings


@pytest.mark.parametrize("name", VALUES)
def test_every_object_is_accepted(cluster: ControlPlane, name: str) -> None:
    """An object that the API server refuses, or takes with a warning, fails or spoils the installation."""
    documents = render(VALUES[name], namespace=NAMESPACE).documents
    assert documents
    for document in documents:
        answer = dry_run(cluster, document)
        assert answer == (http.client.CREATED, "", ()), (document["kind"], document["metadata"]["name"])


@pytest.mark.parametrize("name", VALUES)
def test_the_pods_are_accepted(cluster: ControlPlane, name: str) -> None:
    """What a template says is checked again when a pod is made of it: accounts, classes, Pod Security."""
    rendered = render(VALUES[name], namespace=NAMESPACE)
    for account in rendered.all("ServiceAccount"):
        assert cluster.admin.apply(account).status < 300
    theirs = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "theirs", "namespace": NAMESPACE}}
    assert cluster.admin.apply(theirs).status < 300
    for owner in (*rendered.all("DaemonSet"), *rendered.all("Deployment")):
        template = owner["spec"]["template"]
        made = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": "made"}}
        assert dry_run(cluster, made) == (http.client.CREATED, "", ())


def test_an_unknown_field_is_refused(cluster: ControlPlane) -> None:
    """If it were not, the tests above would prove less than they say."""
    document = copy.deepcopy(render(namespace=NAMESPACE).one("DaemonSet"))
    document["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 1
    status, message, _ = dry_run(cluster, document)
    assert status == http.client.BAD_REQUEST
    assert "periodSecond" in message


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_examples_are_accepted(cluster: ControlPlane, file: str) -> None:
    """Where Pod Security is enforced at its strictest, our part of a pod must not be what is refused."""
    for document in yaml.safe_load_all((EXAMPLES / file).read_text(encoding="utf-8")):
        if document is None:
            continue
        if document["kind"] == "PriorityClass":
            assert cluster.admin.apply(document).status < 300
            continue
        answer = dry_run(cluster, document)
        assert answer == (http.client.CREATED, "", ()), document["metadata"]["name"]
        if document["kind"] == "Pod":
            status, message, _ = dry_run(cluster, document, "restricted")
            ours = [each["name"] for each in document["spec"].get("initContainers", ()) if "nvshare" in each["name"]]
            assert status == http.client.FORBIDDEN or not message
            assert not [name for name in ours if f'"{name}"' in message], message
            assert "volume" not in message, message


def test_the_quota_counts_slots(cluster: ControlPlane) -> None:
    """A ResourceQuota on a name that pods do not ask by would limit nothing."""
    values = {**VALUES["everything-on"], "resourceQuotas": [{"namespace": "team-a", "gpus": 1, "memory": 8}]}
    (quota,) = [
        each
        for each in render(values, namespace=NAMESPACE).all("ResourceQuota")
        if each["metadata"]["namespace"] == "team-a"
    ]
    assert cluster.admin.apply(quota).status < 300
    path = f"{collection(quota, 'team-a')}/{quota['metadata']['name']}"
    # A controller counts what is there; there is none here, so the count begins with nothing by our word.
    status = {"status": {"hard": quota["spec"]["hard"], "used": dict.fromkeys(quota["spec"]["hard"], "0")}}
    assert cluster.admin.patch(f"{path}/status", status).status < 300

    def pod(name: str, slots: str, units: str) -> Json:
        limits = {"nvshare.com/gpu": slots, "nvshare.com/gpu-memory-256mib": units}
        container = {"name": "main", "image": "a", "resources": {"limits": limits}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}

    assert cluster.admin.create(pod("first", "1", "4"), "team-a").status == http.client.CREATED
    refused = cluster.admin.create(pod("second", "1", "4"), "team-a")
    assert refused.status == http.client.FORBIDDEN
    assert "exceeded quota" in refused.message
    assert "requests.nvshare.com/gpu" in refused.message
    fraction = cluster.admin.create(pod("half", "500m", "1"), "team-b")
    assert fraction.status == http.client.UNPROCESSABLE_ENTITY
    assert "must be an integer" in fraction.message
