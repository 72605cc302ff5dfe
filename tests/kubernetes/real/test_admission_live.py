"""Admission as an API server really does it, by the policies that it evaluates.

The pods are made up, and what comes back is compared with what the code says in Python; so policy and code cannot drift
apart, and the evaluator in test_admission_policy.py is checked by the real one.
"""

from __future__ import annotations

import copy
import http.client
import re
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings

from nvshare.coordinator.kubernetes.cluster.annotations import findings, pod_asks_for
from tests.chart.conftest import render
from tests.kubernetes.cluster.pod_shapes import (
    PRIORITY_CLASS_VALUES,
    RULES,
    Json,
    container,
    environment,
    pod,
    pods,
    with_settings,
)
from tests.kubernetes.real.control_plane import ControlPlane, Reply
from tests.waiting import eventually

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
        """Policies are in force a moment after they were made."""
        probe = pod(annotations={"nvshare.com/priority": "3"})
        wrong = pod(annotations={"nvshare.com/priority": "3", "nvshare.com/weight": "0"})
        eventually(lambda: environment(self.create(probe).body).get("NVSHARE_PRIORITY") == "3", "pods are changed")
        eventually(lambda: self.create(wrong).warnings or self.create(wrong).status >= 300, "annotations are judged")


def install(plane: ControlPlane, namespace: str, *, enforce: bool) -> Admitted:
    """The chart's policies, in force for one namespace."""
    plane.namespace(namespace, **{"nvshare.com/admission": namespace})
    selector = {"matchLabels": {"nvshare.com/admission": namespace}}
    admission = {"mode": "policy", "enforce": enforce, "namespaceSelector": selector}
    values = {"admission": admission, "priorityClasses": PRIORITY_CLASS_VALUES}
    for document in render(values, name=namespace, namespace=namespace).documents:
        if "admissionregistration" in document["apiVersion"]:
            reply = plane.admin.apply(document)
            assert reply.status < 300, reply.message
            assert not reply.warnings
    made = Admitted(plane, namespace)
    made.await_effect()
    return made


@pytest.fixture(scope="module")
def prepared(plane: ControlPlane) -> ControlPlane:
    """With the priority classes that the pods name."""
    for name in (*PRIORITY_CLASS_VALUES, "other"):
        document = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        assert plane.admin.apply({**document, "value": 1}).status < 300
    return plane


@pytest.fixture(scope="module")
def admitted(prepared: ControlPlane) -> Admitted:
    """Bad annotations are warned about."""
    return install(prepared, "policy-warned", enforce=False)


@pytest.fixture(scope="module")
def enforced(prepared: ControlPlane) -> Admitted:
    """Bad annotations are refused."""
    return install(prepared, "policy-enforced", enforce=True)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=pods())
def test_pods_become_what_the_code_says(admitted: Admitted, made: Json) -> None:
    """Else the same pod would have one priority or limit here and another there, or lose its own variables."""
    reply = admitted.create(made)
    assert reply.status == http.client.CREATED, reply.message
    expected = with_settings(made, RULES)
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
    outside = Admitted(admitted.plane, "somebody-else")
    reply = outside.create(pod(annotations=BAD))
    assert reply.status == http.client.CREATED
    assert reply.warnings == ()
    good = pod(annotations={"nvshare.com/priority": "5"})
    assert environment(outside.create(good).body) == {}
    assert environment(admitted.create(good).body) == {"NVSHARE_PRIORITY": "5"}
