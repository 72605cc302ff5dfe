"""Annotations and priority classes: what they mean, who wins, and what is said about those that cannot be used.

Non-goals: the API server, reviews.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.cluster.annotations import (
    Rules,
    RulesError,
    annotations_of,
    findings,
    rules_from,
    settings_of,
)
from nvshare.coordinator.kubernetes.slots.slot import Slot
from tests.kubernetes.cluster.pod_shapes import PRIORITY_CLASS_VALUES, RULES, annotation_maps, container, pod


def said(values: dict[str, str], container_name: str = "main", **spec: Any) -> dict[str, str]:
    """Settings of a container of a pod with these annotations of ours."""
    made = pod(annotations={f"nvshare.com/{key}": value for key, value in values.items()}, **spec)
    return settings_of(made, container_name, RULES)


def test_nothing_said_is_nothing_set() -> None:
    """A pod without annotations must get the operator's defaults, not ours."""
    assert settings_of(pod(), "main", RULES) == {}


def test_all_of_them() -> None:
    """Each annotation must reach its setting."""
    shares = {"share-request": "30%", "share-limit": "0.5", "park-after": "2h"}
    found = said({"priority": "5", "weight": "3", "class": "batch", "gang": "pair", "memory-limit": "8Gi", **shares})
    assert found == {
        "priority": "5", "weight": "3", "class": "batch", "share_request": "30%", "share_limit": "0.5",
        "gang": "ml/pair", "memory_limit": str(8 << 30), "park_after": "2h",
    }  # fmt: skip


def test_a_slot_takes_what_annotations_say() -> None:
    """A slot whose file its coordinator refuses is gone with all its programs."""
    most = {"gang": "g" * 63, "weight": "1000", "priority": "-1000", "class": "best-effort", "memory-limit": "999999TB"}
    made = pod(annotations={f"nvshare.com/{key}": value for key, value in most.items()})
    made["metadata"]["namespace"] = "n" * 63
    found = settings_of(made, "main", RULES)
    slot = {"slot": "a", "allocation": "1", "allocated_at_s": 0, "gpus": ["G"], "device_ids": ["G::0"]}
    assert Slot.model_validate({**slot, "policy": found}).policy == found
    assert found["gang"] == "n" * 63 + "/" + "g" * 63


def test_older_class_names_keep_their_priority() -> None:
    """Pods of an earlier version must keep their place when the chart is upgraded."""
    older = {"production": ("batch", 100), "standard": ("batch", 0), "opportunistic": ("best-effort", -100)}
    for name, (job_class, priority) in older.items():
        found = said({"class": name})
        assert (found["class"], found["priority"]) == (job_class, str(priority))


def test_a_request_above_the_limit_is_none() -> None:
    """Two shares that contradict each other must not depend on which is read first."""
    values = {"share-request": "50%", "share-limit": "0.3"}
    found = said(values)
    assert found == {"share_limit": "0.3"}
    (finding,) = findings(pod(annotations={f"nvshare.com/{key}": value for key, value in values.items()}), RULES)
    assert finding.text.endswith("it is above nvshare.com/share-limit, 0.3")


PRECEDENCE = {
    "annotation over class and priority class": ({"priority": "7", "class": "production"}, "production", 7),
    "class over priority class": ({"class": "best-effort"}, "production", -100),
    "priority class alone": ({}, "production", 10),
    "priority class that only has a class": ({}, "batch", -100),
    "priority class that only has a weight": ({}, "heavy", None),
    "unknown priority class": ({}, "system-node-critical", None),
    "bad annotation is as none": ({"priority": "high"}, "production", 10),
    "out of the operator's range is as none": ({"priority": "1001"}, "production", 10),
}


@pytest.mark.parametrize(("values", "priority_class", "priority"), PRECEDENCE.values(), ids=PRECEDENCE.keys())
def test_who_wins(values: dict[str, str], priority_class: str, priority: int | None) -> None:
    """An order that differs from the documented one gives somebody else's turns away."""
    found = said(values, priorityClassName=priority_class).get("priority")
    assert found == (None if priority is None else str(priority))


def test_a_class_cannot_say_what_a_number_may_not() -> None:
    """An operator who lets pods step back only must not be overruled by `class: interactive`."""
    rules = Rules(priority_min=-1000, priority_max=0, priority_classes=RULES.priority_classes)
    made = pod(annotations={"nvshare.com/class": "interactive"})
    assert settings_of(made, "main", rules) == {}
    (finding,) = findings(made, rules)
    assert finding.text.endswith("write one of batch, best-effort")
    assert settings_of(pod(priorityClassName="production"), "main", rules)["priority"] == "10"


def test_container_s_own_limit_wins() -> None:
    """A notebook and its worker in one pod have different limits."""
    values = {"memory-limit": "1Gi", "memory-limit.main": "2Gi", "memory-limit.other": "3Gi"}
    assert said(values)["memory_limit"] == str(2 << 30)
    assert said(values, "third")["memory_limit"] == str(1 << 30)
    assert said({**values, "memory-limit.main": "much"})["memory_limit"] == str(1 << 30)


SIZES = {"8Gi": 8 << 30, "512Mi": 512 << 20, "1.5GiB": 3 << 29, "8GB": 8 * 10**9, "1Ti": 1 << 40, "1073741824": 1 << 30}


@pytest.mark.parametrize(("text", "expected"), SIZES.items())
def test_sizes(text: str, expected: int) -> None:
    """Kubernetes' units and ours both work."""
    assert said({"memory-limit": text})["memory_limit"] == str(expected)


@pytest.mark.parametrize(
    "text", ["20", "8G", "8M", "8k", "0", "-8Gi", "8 Gi", "8gi", "0.5Gi", "1e9", "", "9999999Ti", "٨Gi"]
)
def test_sizes_that_could_mean_two_things_are_refused(text: str) -> None:
    """`8G` is 8 000 000 000 to Kubernetes and 8 GiB to CUDA's users: guessing would be wrong for one of them."""
    made = pod(annotations={"nvshare.com/memory-limit": text})
    assert settings_of(made, "main", RULES) == {}
    (finding,) = findings(made, RULES)
    assert "8Gi" in finding.text


MESSAGES = {
    "priority": ("high", "write a whole number from -1000 to 1000"),
    "weight": ("0", "write a whole number from 1 to 1000"),
    "class": ("gold", "write one of interactive, batch, best-effort"),
    "share-request": ("1.5", "write 0.3 or 30%"),
    "share-limit": ("0", "write 0.3 or 30%"),
    "park-after": ("soon", "write 10m, 2h, or 0 for never"),
    "gang": ("My Gang", "small letters, digits and dashes"),
    "memory-limit": ("8G", "write a size such as 8Gi"),
    "memory-limit.nobody": ("8Gi", 'no container "nobody"; its containers are main, warm-up'),
    "memory-limit.": ("8Gi", "no container"),
    "priorty": ("1", "did you mean nvshare.com/priority?"),
    "zzz": ("1", "known are nvshare.com/class, nvshare.com/gang"),
}


@pytest.mark.parametrize(("key", "value", "allowed"), [(key, *rest) for key, rest in MESSAGES.items()])
def test_findings_name_annotation_value_and_what_is_allowed(key: str, value: str, allowed: str) -> None:
    """A message that leaves one of the three out costs its reader an hour."""
    made = pod(annotations={f"nvshare.com/{key}": value}, init=[container("warm-up", gpu=False)])
    (finding,) = findings(made, RULES)
    assert finding.text.startswith(f'metadata.annotations[nvshare.com/{key}]: "{value}" is not allowed: ')
    assert allowed in finding.text


def test_messages_are_short_and_have_no_control_characters() -> None:
    """An annotation may hold 256 KiB of anything; it ends in a log and in somebody's terminal."""
    (finding,) = findings(pod(annotations={"nvshare.com/class": "\x1b[2J\n" + "x" * 200_000}), RULES)
    assert len(finding.text) < 300
    assert finding.text.isprintable()


def test_other_people_s_annotations_are_none_of_ours() -> None:
    """A pod carries annotations of a dozen projects."""
    made = pod(annotations={"other.example/priority": "high", "nvshare.community/priority": "high"})
    assert annotations_of(made) == {}
    assert findings(made, RULES) == []


@given(annotation_maps(), st.sampled_from([*PRIORITY_CLASS_VALUES, "other"]))
def test_what_is_found_is_not_used(annotations: dict[str, str], priority_class: str) -> None:
    """A setting that is both refused and applied would make the message a lie."""
    made = pod(container(), container("helper"), annotations=annotations, priorityClassName=priority_class)
    bad = {finding.annotation for finding in findings(made, RULES)}
    without = {key: text for key, text in annotations_of(made).items() if key not in bad}
    clean = {**made, "metadata": {**made["metadata"], "annotations": without}}
    assert findings(clean, RULES) == []
    for name in ("main", "helper"):
        assert settings_of(clean, name, RULES) == settings_of(made, name, RULES)


def test_rules_from_the_chart_s_values() -> None:
    """The chart writes its values into a file; what they say must arrive."""
    values = {**PRIORITY_CLASS_VALUES, "short": 3}
    rules = rules_from(priority_range="-5:5", priority_classes=values)
    assert (rules.priority_min, rules.priority_max) == (-5, 5)
    assert {name: entry for name, entry in rules.priority_classes.items() if name != "short"} == RULES.priority_classes
    assert rules.priority_classes["short"].priority == 3


BAD_RULES: dict[str, tuple[dict[str, Any], str]] = {
    "range": ({"priority_range": "5"}, '--priority-range: "5": write MIN:MAX'),
    "turned range": ({"priority_range": "5:-5"}, "--priority-range"),
    "resource": ({"resource": "gpu"}, '--resource: "gpu": write DOMAIN/NAME'),
    "no object": ({"priority_classes": [1]}, "--priority-classes: Input should be a valid dictionary"),
    "class": ({"priority_classes": {"a": {"class": "gold"}}}, '--priority-classes: a.class: "gold" is none of'),
    "weight": ({"priority_classes": {"a": {"weight": 0}}}, '--priority-classes: a.weight: Input should be'),
    "truth": ({"priority_classes": {"a": {"priority": True}}}, "--priority-classes: a.priority"),
    "truth for short": ({"priority_classes": {"a": True}}, "--priority-classes: a.priority"),
    "text": ({"priority_classes": {"a": "10"}}, "--priority-classes: a: Input should be a valid dictionary"),
    "unknown": ({"priority_classes": {"a": {"wieght": 1}}}, "--priority-classes: a.wieght: Extra inputs"),
}


@pytest.mark.parametrize(("options", "text"), BAD_RULES.values(), ids=BAD_RULES.keys())
def test_bad_rules_name_the_entry(options: dict[str, Any], text: str) -> None:
    """An operator's mistake must be said at the start, with its place."""
    with pytest.raises(RulesError) as raised:
        rules_from(**options)
    assert str(raised.value).startswith(text)
