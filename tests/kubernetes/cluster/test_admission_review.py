"""Reviews and their answers: recorded ones, made-up ones, and some that are none.

Non-goals: HTTP, TLS; CEL (test_admission_policy.py).
"""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.cluster.admission_review import (
    MAX_WARNING_CHARACTERS,
    MAX_WARNINGS,
    MalformedReviewError,
    Settings,
    merged_preload,
    mutate,
    pod_patch,
    validate,
)
from nvshare.coordinator.kubernetes.cluster.annotations import HOOK_IN_CONTAINER
from tests.kubernetes.cluster.pod_shapes import RULES, Json, container, environment, pod, pods, review

SETTINGS = Settings(RULES)
STRICT = Settings(RULES, enforce=True)
RECORDED = Path(__file__).with_name("reviews")


def patched(original: Json) -> Json:
    """The pod after the API server has applied the answer."""
    answer = mutate(review(original), SETTINGS).body["response"]
    assert answer["allowed"] is True
    if "patch" not in answer:
        return original
    assert answer["patchType"] == "JSONPatch"
    changed: Json = jsonpatch.apply_patch(original, json.loads(base64.b64decode(answer["patch"])))
    return changed


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_reviews(path: Path) -> None:
    """Reviews as API servers send them, each with the environment and the warnings that must come out."""
    case = json.loads(path.read_text(encoding="utf-8"))
    original = case["review"]["request"]["object"]
    answer = mutate(case["review"], SETTINGS).body
    assert answer["apiVersion"] == "admission.k8s.io/v1"
    assert answer["kind"] == "AdmissionReview"
    assert answer["response"]["uid"] == case["review"]["request"]["uid"]
    patch = json.loads(base64.b64decode(answer["response"].get("patch", "W10=")))
    after = jsonpatch.apply_patch(original, patch)
    for name, variables in case["environment"].items():
        assert environment(after, name) == variables
    checked = validate(case["review"], SETTINGS).body["response"]
    said = [*answer["response"].get("warnings", []), *checked.get("warnings", [])]
    assert len(said) == len(case["warnings"])
    for text, part in zip(said, case["warnings"], strict=True):
        assert part in text
    assert validate(case["review"], STRICT).body["response"]["allowed"] is case["allowed_when_enforced"]


def test_there_are_recorded_reviews() -> None:
    """The test above is empty when its files are not found."""
    assert len(list(RECORDED.glob("*.json"))) >= 4


@given(pods())
def test_patch_is_idempotent(made: Json) -> None:
    """The API server asks again when a later webhook has changed the pod."""
    once = patched(made)
    assert pod_patch(once, SETTINGS)[0] == []


@given(pods())
def test_only_what_asks_for_a_slot_is_changed(made: Json) -> None:
    """A webhook that touches other containers breaks pods that have nothing to do with us."""
    after = patched(made)
    ours = {"LD_PRELOAD", "NVSHARE_PRIORITY", "NVSHARE_CLASS", "NVSHARE_MEMORY_LIMIT"}
    ours |= {"NVSHARE_SHARE_REQUEST", "NVSHARE_SHARE_LIMIT"}
    for kind in ("containers", "initContainers"):
        before_list, after_list = made["spec"].get(kind, []), after["spec"].get(kind, [])
        assert len(before_list) == len(after_list)
        for before, now in zip(before_list, after_list, strict=True):
            rest = [{key: value for key, value in entry.items() if key != "env"} for entry in (before, now)]
            assert rest[0] == rest[1]
            if "nvshare.com/gpu" not in before["resources"]["limits"]:
                assert before == now
            others = [[e for e in entry.get("env", []) if e["name"] not in ours] for entry in (before, now)]
            assert others[0] == others[1]
            from_elsewhere = [e for e in before.get("env", []) if "valueFrom" in e]
            assert all(entry in now["env"] for entry in from_elsewhere)
    assert after["metadata"] == made["metadata"]


@given(st.text(alphabet="ab/.: ", max_size=20))
def test_merged_preload_keeps_every_entry_in_order(value: str) -> None:
    """The pod's own libraries must load as before, and the hook once, behind them."""
    entries = value.replace(" ", ":").split(":")
    merged = merged_preload(value, HOOK_IN_CONTAINER).replace(" ", ":").split(":")
    assert [entry for entry in merged if entry] == [*(entry for entry in entries if entry), HOOK_IN_CONTAINER]
    assert merged_preload(":".join(merged), HOOK_IN_CONTAINER) == ":".join(merged)


def test_of_a_doubled_variable_the_last_counts() -> None:
    """That is the one the container gets."""
    env = [{"name": "LD_PRELOAD", "value": "a.so"}, {"name": "LD_PRELOAD", "value": "b.so"}]
    after = patched(pod(container(env=env)))
    assert [entry["value"] for entry in after["spec"]["containers"][0]["env"]] == ["a.so", f"b.so:{HOOK_IN_CONTAINER}"]


def test_without_an_own_preload_none_is_written() -> None:
    """The device plugin sets it; writing it here too would keep an old path in the pod's specification."""
    assert patched(pod()) == pod()


def test_preload_from_elsewhere_is_said() -> None:
    """It cannot be merged: its value is not in the pod.  Silence would leave the GPU shared without the hook."""
    env = [{"name": "LD_PRELOAD", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]
    made = review(pod(container(env=env)))
    answer = mutate(made, SETTINGS)
    (warning,) = answer.body["response"]["warnings"]
    assert "spec.containers.0.env[LD_PRELOAD]" in warning
    assert "without the hook" in warning
    assert answer.outcome == "warned"
    assert "patch" not in answer.body["response"]


def test_updates_are_not_patched() -> None:
    """A running pod's environment cannot be changed: the API server would refuse the whole update."""
    made = pod(container(env=[{"name": "LD_PRELOAD", "value": "a.so"}]))
    assert "patch" not in mutate(review(made, operation="UPDATE", old=made), SETTINGS).body["response"]


def test_enforce_refuses_with_every_reason() -> None:
    """Whoever is refused must be able to correct everything at once."""
    bad = {"nvshare.com/priority": "high", "nvshare.com/memory-limit": "8G"}
    answer = validate(review(pod(annotations=bad)), STRICT)
    assert answer.outcome == "refused"
    response = answer.body["response"]
    assert response["allowed"] is False
    assert response["status"]["reason"] == "Invalid"
    for key in bad:
        assert f"metadata.annotations[{key}]" in response["status"]["message"]


def test_without_enforce_it_warns() -> None:
    """The default must not keep a pod from starting for a typing mistake."""
    answer = validate(review(pod(annotations={"nvshare.com/priority": "high"})), SETTINGS)
    assert answer.outcome == "warned"
    assert answer.body["response"]["allowed"] is True
    (warning,) = answer.body["response"]["warnings"]
    assert "metadata.annotations[nvshare.com/priority]" in warning
    assert warning.endswith("it is ignored")


def test_an_update_answers_for_what_it_brings_only() -> None:
    """A pod that was admitted before `enforce` must still be able to lose its finalizers and end."""
    bad = pod(annotations={"nvshare.com/priority": "high"})
    worse = pod(annotations={"nvshare.com/priority": "higher"})
    assert validate(review(bad, operation="UPDATE", old=copy.deepcopy(bad)), STRICT).body["response"]["allowed"]
    assert not validate(review(worse, operation="UPDATE", old=bad), STRICT).body["response"]["allowed"]


def test_a_pod_without_slots_is_not_judged() -> None:
    """Its annotations have no effect, so nothing about them is wrong."""
    made = pod(container(gpu=False), annotations={"nvshare.com/priority": "high"})
    assert validate(review(made), STRICT).body["response"]["allowed"]


def test_warnings_are_bounded() -> None:
    """API servers cut long headers, and with them the useful part."""
    bad = {f"nvshare.com/unknown-{number}": "x" * 1000 for number in range(100)}
    warnings = validate(review(pod(annotations=bad)), SETTINGS).body["response"]["warnings"]
    assert len(warnings) == MAX_WARNINGS
    assert max(map(len, warnings)) <= MAX_WARNING_CHARACTERS
    message = validate(review(pod(annotations=bad)), STRICT).body["response"]["status"]["message"]
    assert len(message) < 4096


OTHERS: dict[str, Any] = {
    "another kind": {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
    "a kind of the same name elsewhere": {"kind": {"group": "other.example", "version": "v1", "kind": "Pod"}},
    "a subresource": {"subResource": "ephemeralcontainers"},
    "a deletion": {"operation": "DELETE", "object": None},
    "no object": {"object": None},
    "no kind": {"kind": None},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_a_new_pod_is_let_through(change: dict[str, Any]) -> None:
    """A webhook configuration that asks too much must not break anything."""
    made = review(pod(container(env=[{"name": "LD_PRELOAD", "value": "a.so"}]), annotations={"nvshare.com/class": "x"}))
    made["request"] |= change
    for answer in (mutate(made, STRICT), validate(made, STRICT)):
        assert answer.body["response"] == {"uid": made["request"]["uid"], "allowed": True}


MALFORMED: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "another kind": {"apiVersion": "admission.k8s.io/v1", "kind": "Pod"},
    "v1beta1": {"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": {"uid": "1"}},
    "no request": {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"},
    "no uid": {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {}},
    "a long uid": {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "x" * 129}},
}


@pytest.mark.parametrize("made", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_reviews_are_said_to_be(made: Any) -> None:
    """An answer without the request's uid would be taken for a broken webhook."""
    for answer in (mutate, validate):
        with pytest.raises(MalformedReviewError):
            answer(made, SETTINGS)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "env", "resources", "limits", "nvshare.com/gpu", "value"]), inner)
    ),
    max_leaves=10,
)


@given(_JUNK, _JUNK, _JUNK)
def test_any_pod_is_answered(containers: Any, env: Any, annotations: Any) -> None:
    """The API server has not validated the pod yet when it asks."""
    hostile = {"name": "main", "env": env, "resources": {"limits": {"nvshare.com/gpu": "1"}}}
    for made in (
        {"metadata": {"annotations": annotations}, "spec": {"containers": containers, "initContainers": [hostile]}},
        {"metadata": annotations, "spec": {"containers": [containers, hostile, env]}},
        {"metadata": {"annotations": {"nvshare.com/priority": annotations}}, "spec": containers},
    ):
        assert mutate(review(made), SETTINGS).body["response"]["allowed"] is True
        assert isinstance(validate(review(made), STRICT).body["response"]["allowed"], bool)
