"""Admission as an API server really does it: the policies that it evaluates itself, and our server that it asks.

The pods are made up, and what comes back is compared with what the code says in Python; so policy, webhook and code
cannot drift apart, and the evaluator in test_admission_policy.py is checked by the real one.

Non-goals: other people's ways of calling the server (test_admission_server.py).
"""

from __future__ import annotations

import base64
import copy
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonpatch
import pytest
import trustme
from hypothesis import HealthCheck, given, settings

from nvshare.coordinator.kubernetes.cluster.admission_review import Settings, pod_patch
from nvshare.coordinator.kubernetes.cluster.annotations import HOOK_IN_CONTAINER, findings, pod_asks_for
from tests.chart.conftest import render
from tests.conftest import ROOT
from tests.kubernetes.cluster.pod_shapes import PRIORITY_CLASS_VALUES, RULES, Json, container, environment, pod, pods
from tests.kubernetes.real.control_plane import ControlPlane, Reply
from tests.waiting import eventually

SETTINGS = Settings(RULES)
BAD = {
    "nvshare.com/priority": "high",
    "nvshare.com/weight": "0",
    "nvshare.com/class": "gold",
    "nvshare.com/gang": "No Name",
    "nvshare.com/memory-limit": "8G",
    "nvshare.com/memory-limit.nobody": "8Gi",
    "nvshare.com/priorty": "1",
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """A namespace in which admission acts."""

    plane: ControlPlane
    namespace: str

    def create(self, made: Json, *, dry_run: bool = True) -> Reply:
        """The pod as the API server would take it."""
        document = copy.deepcopy(made)
        document.pop("status", None)
        document["metadata"] = {key: value for key, value in made["metadata"].items() if key == "annotations"}
        document["metadata"]["name"] = "train"
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self.plane.admin.request("POST", f"/api/v1/namespaces/{self.namespace}/pods", document, **query)

    def await_effect(self) -> None:
        """Policies and webhooks are in force a moment after they were made."""
        probe = pod(annotations={"nvshare.com/priority": "3"})
        wrong = pod(annotations={"nvshare.com/priority": "3", "nvshare.com/weight": "0"})
        eventually(lambda: environment(self.create(probe).body).get("NVSHARE_PRIORITY") == "3", "pods are changed")
        eventually(lambda: self.create(wrong).warnings or self.create(wrong).status >= 300, "annotations are judged")


class Server:
    """`nvshare-admission` as a process, with a certificate of its own."""

    def __init__(self, folder: Path, values: Path, *options: str) -> None:
        authority = trustme.CA()
        made = authority.issue_cert("127.0.0.1")
        (folder / "tls.key").write_bytes(made.private_key_pem.bytes())
        (folder / "tls.crt").write_bytes(made.cert_chain_pems[0].bytes())
        self.ca_bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
        words = [
            sys.executable,
            "-m",
            "nvshare.coordinator.kubernetes.cluster.admission",
            "--certificate-dir",
            str(folder),
        ]
        words += ["--port", "0", "--metrics-port", "0", "--address", "127.0.0.1", "--priority-classes", str(values)]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            environ = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen([*words, *options], stderr=log, cwd=ROOT, env=environ)
        self.port = eventually(self._port, "the port in its log")

    def _port(self) -> int:
        text = self._log.read_text(encoding="utf-8")
        assert self.process.poll() is None, text
        found = re.search(r"reviews on port (\d+)", text)
        return int(found[1]) if found else 0

    def close(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait(30)


def install(plane: ControlPlane, namespace: str, ways: dict[str, object], server: Server | None = None) -> Admitted:
    """The chart's admission objects for one namespace.  A server is called by its address, for nothing here routes to
    services."""  # fmt: skip
    plane.namespace(namespace, **{"nvshare.com/admission": namespace})
    selector = {"matchLabels": {"nvshare.com/admission": namespace}}
    values = {"admission": {**ways, "namespaceSelector": selector}, "priorityClasses": PRIORITY_CLASS_VALUES}
    rendered = render(values, name=namespace, namespace=namespace)
    for document in rendered.documents:
        for webhook in document.get("webhooks", ()):
            assert server is not None
            where = webhook["clientConfig"].pop("service")
            webhook["clientConfig"]["url"] = f"https://127.0.0.1:{server.port}{where['path']}"
        if "admissionregistration" in document["apiVersion"]:
            reply = plane.admin.apply(document)
            assert reply.status < 300, reply.message
            assert not reply.warnings
    return Admitted(plane, namespace)


@pytest.fixture(scope="module")
def prepared(plane: ControlPlane) -> ControlPlane:
    """With the priority classes that the pods name."""
    for name in (*PRIORITY_CLASS_VALUES, "other"):
        document = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        assert plane.admin.apply({**document, "value": 1}).status < 300
    return plane


@pytest.fixture(scope="module", params=["policy", "webhook"])
def admitted(
    request: pytest.FixtureRequest, prepared: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Admitted]:
    """Bad annotations are warned about."""
    yield from admission(request.param, prepared, tmp_path_factory.mktemp("server"), enforce=False)


@pytest.fixture(scope="module", params=["policy", "webhook"])
def enforced(
    request: pytest.FixtureRequest, prepared: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Admitted]:
    """Bad annotations are refused."""
    yield from admission(request.param, prepared, tmp_path_factory.mktemp("server"), enforce=True)


def admission(way: str, plane: ControlPlane, folder: Path, *, enforce: bool) -> Iterator[Admitted]:
    """One way of admission in a namespace of its own."""
    namespace = f"{way}-{'enforced' if enforce else 'warned'}"
    if way == "policy":
        made = install(plane, namespace, {"mode": "policy", "enforce": enforce})
        made.await_effect()
        yield made
        return
    values = folder / "priority-classes.json"
    values.write_text(json.dumps(PRIORITY_CLASS_VALUES), encoding="utf-8")
    server = Server(folder, values, *(["--enforce"] if enforce else []))
    try:
        webhook = {"tlsSecret": "unused", "caBundle": server.ca_bundle, "timeoutSeconds": 10}
        made = install(plane, namespace, {"mode": "webhook", "enforce": enforce, "webhook": webhook}, server)
        made.await_effect()
        yield made
    finally:
        server.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=pods())
def test_pods_become_what_the_code_says(admitted: Admitted, made: Json) -> None:
    """Else the same pod would have one priority or limit here and another there, or lose its own LD_PRELOAD."""
    reply = admitted.create(made)
    assert reply.status == http.client.CREATED, reply.message
    patch, _ = pod_patch(made, SETTINGS)
    expected = jsonpatch.apply_patch(made, patch)
    for kind in ("containers", "initContainers"):
        wanted = {each["name"]: _variables(each) for each in expected["spec"].get(kind, ())}
        assert {each["name"]: _variables(each) for each in reply.body["spec"].get(kind, ())} == wanted
    wrong = findings(made, RULES) if pod_asks_for(made, RULES.resource) else []
    judged = [text for text in reply.warnings if "metadata.annotations" in text]
    assert bool(judged) == bool(wrong), (reply.warnings, wrong)
    named = {match for text in judged for match in re.findall(r"metadata\.annotations\[([^\]]+)\]", text)}
    assert named <= {finding.annotation for finding in wrong}


def _variables(each: Json) -> dict[str, object]:
    """By name; where somebody else's value comes from is kept whole."""
    return {entry["name"]: entry.get("valueFrom") or entry.get("value", "") for entry in each.get("env", ())}


def test_messages_reach_people(admitted: Admitted) -> None:
    """What `kubectl` prints must name the annotation, its value, and what to write instead."""
    reply = admitted.create(pod(annotations=BAD))
    assert reply.status == http.client.CREATED
    for key, value in list(BAD.items())[:5]:
        text = f'metadata.annotations[{key}]: "{value}" is not allowed: write '
        assert any(text in warning for warning in reply.warnings), (key, reply.warnings)
    for key, text in (("memory-limit.nobody", "the pod has no "), ("priorty", "there is no such annotation")):
        assert any(f"[nvshare.com/{key}]" in warning and text in warning for warning in reply.warnings), reply.warnings


def test_bad_annotations_are_refused(enforced: Admitted) -> None:
    """With `enforce` a pod that asks for nonsense must not start, and its owner must read why."""
    for key, value in BAD.items():
        reply = enforced.create(pod(annotations={key: value}))
        assert reply.status == http.client.UNPROCESSABLE_ENTITY, (key, reply.message)
        assert f"metadata.annotations[{key}]" in reply.message
    assert enforced.create(pod(annotations={"nvshare.com/priority": "5"})).status == http.client.CREATED
    plain = pod(container(gpu=False), annotations=BAD)
    assert enforced.create(plain).status == http.client.CREATED


def test_an_update_is_judged_by_what_it_changes(enforced: Admitted) -> None:
    """A pod that has its mistake from before admission was on must still get other labels, and end."""
    plane, outside = enforced.plane, f"{enforced.namespace}-later"
    plane.namespace(outside)
    path = f"/api/v1/namespaces/{outside}/pods/train"
    assert Admitted(plane, outside).create(pod(annotations=BAD), dry_run=False).status == http.client.CREATED
    plane.namespace(outside, **{"nvshare.com/admission": enforced.namespace})
    worse = {"metadata": {"annotations": {"nvshare.com/priority": "higher"}}}
    eventually(lambda: plane.admin.patch(path, worse).status == http.client.UNPROCESSABLE_ENTITY, "it is in force")
    assert plane.admin.patch(path, {"metadata": {"annotations": {"other.example/key": "new"}}}).status == http.client.OK
    better = {"metadata": {"annotations": {"nvshare.com/priority": "5"}}}
    assert plane.admin.patch(path, better).status == http.client.OK
    assert plane.admin.delete(path, 0).status == http.client.OK


def test_namespaces_that_did_not_opt_in_are_left_alone(admitted: Admitted) -> None:
    """Nobody is touched who has not asked for it."""
    admitted.plane.namespace("somebody-else")
    env = [{"name": "LD_PRELOAD", "value": "/usr/lib/libjemalloc.so.2"}]
    reply = Admitted(admitted.plane, "somebody-else").create(pod(container(env=env), annotations=BAD))
    assert reply.status == http.client.CREATED
    assert environment(reply.body) == {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}
    assert reply.warnings == ()
    inside = admitted.create(pod(container(env=env)))
    assert environment(inside.body) == {"LD_PRELOAD": f"/usr/lib/libjemalloc.so.2:{HOOK_IN_CONTAINER}"}


def test_pods_start_when_the_server_is_away(prepared: ControlPlane, tmp_path: Path) -> None:
    """Failing open: admission that is down must not keep a cluster's pods from starting."""
    values = tmp_path / "priority-classes.json"
    values.write_text("{}", encoding="utf-8")
    server = Server(tmp_path, values)
    webhook = {"tlsSecret": "unused", "caBundle": server.ca_bundle}
    made = install(prepared, "server-away", {"mode": "webhook", "enforce": True, "webhook": webhook}, server)
    try:
        made.await_effect()
    finally:
        server.close()
    reply = made.create(pod(annotations=BAD))
    assert reply.status == http.client.CREATED
    assert environment(reply.body) == {}
