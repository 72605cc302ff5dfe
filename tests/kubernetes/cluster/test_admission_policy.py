"""The chart's policies in CEL follow the rules of annotations.py: their expressions are evaluated and compared.

The evaluator is CEL's own (cel-cpp).  What Kubernetes adds to the language is put in place here: constructors of
objects (`Object.spec{...}`) are read as maps, and the configuration that comes out is merged as server-side apply does
it: containers and variables by their names.

Non-goals: schemas of the rendered objects (tests of the chart).
"""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel
from helm_python import Chart, HelmRenderError
from hypothesis import example, given, settings

from nvshare.coordinator.kubernetes.cluster.annotations import Rules, findings, pod_asks_for, rules_from
from tests.conftest import ROOT
from tests.kubernetes.cluster.pod_shapes import PRIORITY_CLASS_VALUES, RULES, Json, container, pod, pods, with_settings

CHART = ROOT / "charts" / "nvshare"
SHORT = {"high": 1000000, "low": -1000000}
EXAMPLES = 80
IMAGE: Json = {"image": {"registry": "registry.example.com"}}


def render(**admission: Any) -> list[Json]:
    """The admission objects of the chart under these values."""
    values = {**IMAGE, "admission": {"mode": "policy", **admission}, "priorityClasses": PRIORITY_CLASS_VALUES}
    with Chart.load(CHART) as chart:
        rendered = chart.render(values=values, name="demo", namespace="gpu")
    texts = [text for path, text in rendered.items() if "/admission-" in path]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


class Policy:
    """One policy's expressions, compiled once."""

    def __init__(self, document: Json) -> None:
        config = cel.NewEnvConfigFromYaml("name: kubernetes\nextensions:\n- name: optional\n- name: strings\n")
        types = dict.fromkeys(("object", "oldObject", "variables"), cel.Type.DYN)
        self._env = cel.NewEnv(config=config, variables=types)
        self.spec = document["spec"]
        self._compiled: dict[str, Any] = {}

    def evaluate(self, expression: str, **data: object) -> Any:
        if expression not in self._compiled:
            text = re.sub(r"\bObject(\.\w+)*\{", "{", expression)
            text = re.sub(r"\b(spec|containers|initContainers|name|env|value): ", r'"\1": ', text)
            self._compiled[expression] = self._env.compile(text)
        value = self._compiled[expression].eval(data=data)
        assert value.type() != cel.Type.ERROR, f"{expression}: {value.value()}"
        return value.plain_value()

    def matches(self, new: Json, old: Json | None = None) -> bool:
        """Whether all match conditions hold."""
        return all(
            self.evaluate(condition["expression"], object=new, oldObject=old)
            for condition in self.spec["matchConditions"]
        )

    def variables(self, new: Json, old: Json | None = None) -> Json:
        """All of them, in order: each may use those before it."""
        found: Json = {}
        for variable in self.spec["variables"]:
            data = {"object": new, "oldObject": old, "variables": found}
            found[variable["name"]] = self.evaluate(variable["expression"], **data)
        return found

    def mutate(self, new: Json) -> Json:
        """The pod after this policy."""
        if not self.matches(new):
            return new
        (mutation,) = self.spec["mutations"]
        assert mutation["patchType"] == "ApplyConfiguration"
        variables = self.variables(new)
        wanted = self.evaluate(mutation["applyConfiguration"]["expression"], object=new, variables=variables)
        return merged(new, wanted)

    def messages(self, new: Json, old: Json | None = None) -> list[str]:
        """Messages of a validating policy."""
        if not self.matches(new, old):
            return []
        data = {"object": new, "oldObject": old, "variables": self.variables(new, old)}
        return [
            self.evaluate(validation["messageExpression"], **data)
            for validation in self.spec["validations"]
            if not self.evaluate(validation["expression"], **data)
        ]


def merged(original: Json, configuration: Json) -> Json:
    """Server-side apply's merge of a configuration of containers' variables; an unknown key fails the test."""
    result = copy.deepcopy(original)
    assert set(configuration) == {"spec"}
    assert set(configuration["spec"]) == {"containers", "initContainers"}
    for kind, entries in configuration["spec"].items():
        for entry in entries:
            assert set(entry) == {"name", "env"}
            (target,) = (found for found in result["spec"][kind] if found["name"] == entry["name"])
            for variable in entry["env"]:
                assert set(variable) == {"name", "value"}
                same = [found for found in target.get("env", []) if found["name"] == variable["name"]]
                assert len(same) <= 1, "server-side apply cannot merge into a name that is there twice"
                if same:
                    same[0]["value"] = variable["value"]
                else:
                    target.setdefault("env", []).append(dict(variable))
    return result


@pytest.fixture(scope="module")
def mutating() -> Policy:
    (document,) = (found for found in render() if found["kind"] == "MutatingAdmissionPolicy")
    return Policy(document)


@pytest.fixture(scope="module")
def validating() -> Policy:
    (document,) = (found for found in render() if found["kind"] == "ValidatingAdmissionPolicy")
    return Policy(document)


@settings(max_examples=EXAMPLES)
@given(pods())
@example(pod(container(env=[{"name": "LD_PRELOAD", "value": "a.so"}]), annotations={"nvshare.com/memory-limit": "8Gi"}))
def test_settings_reach_the_environment(mutating: Policy, made: Json) -> None:
    """Broken: a pod gets another priority, class, share or limit than its annotations say, or loses a variable."""
    assert mutating.mutate(made) == with_settings(made, RULES)


WRITTEN = {
    "priority": ("0", "-0", "00", "+1", "-1", "1000", "1001", "-1000", "-1001", "999999999", "1" * 10, "1.0", "", "x"),
    "weight": ("0", "1", "01", "999", "1000", "1001", "-1", "", "x"),
    "class": ("interactive", "batch", "best-effort", "best_effort", "production", "standard", "opportunistic", "x"),
    "share-request": (
        "0", "0.0", "0.3", "0.3333", ".3", "1", "1.0", "1.1", "30%", "0%", "100%", "101%", "030%", "", "x",
    ),
    "share-limit": ("0", "0.000", "0%", "0.001", "1%", "0.3", "1.000", "1.001", "30 %", "1e-1", "", "x"),
    "park-after": ("0", "00", "10m", "90s", "2h", "999h", "1000h", "99999m", "100000s", "10", "10 m", "1.5h", "", "x"),
    "gang": ("a", "0", "a-b", "-a", "a-", "A", "", "a.b", "x" * 63, "x" * 64, "a\n"),
    "memory-limit": ("1", "0", "9" * 18, "9" * 19, "8Gi", "8GiB", "8GB", "8G", "8gi", "1.5Gi", "1.1234Gi", ".5Gi"),
    "memory-limit.main": (
        "1Ki", f"{10**9 - 1}Ki", "9999999999Ki", "999999Ti", "1000000Ti", "1TB", "1TiB", "1T", "1.Gi",
    ),
    "memory-limit.nobody": ("8Gi", "", "8 Gi"),
    "memory-limits": ("8Gi",),
    "memory-limit.": ("8Gi",),
    "": ("x",),
}  # fmt: skip


@pytest.mark.parametrize("key", WRITTEN)
def test_one_annotation_agrees(mutating: Policy, validating: Policy, key: str) -> None:
    """The same value must be good and bad, and mean the same, in every cluster; refusals say what to write instead."""
    for value in WRITTEN[key]:
        made = pod(annotations={f"nvshare.com/{key}": value})
        said, expected = validating.messages(made), [finding.text for finding in findings(made, RULES)]
        assert len(said) == len(expected), value
        for text, of_code in zip(said, expected, strict=True):  # the policy knows no names but those of the pod
            assert text.startswith(f"metadata.annotations[nvshare.com/{key}]: "), text
            assert "no such " in text or text.replace("\n", r"\n") == of_code
        assert mutating.mutate(made) == with_settings(made, RULES), value


@pytest.mark.parametrize(("request_", "limit"), [("30%", "0.3"), ("0.4", "0.3"), ("0.4", "x"), ("31%", "30%")])
def test_two_shares_agree(mutating: Policy, validating: Policy, request_: str, limit: str) -> None:
    """A request above its limit is as none in every cluster, and both say so alike."""
    made = pod(annotations={"nvshare.com/share-request": request_, "nvshare.com/share-limit": limit})
    assert validating.messages(made) == [finding.text for finding in findings(made, RULES)]
    assert mutating.mutate(made) == with_settings(made, RULES)


@settings(max_examples=EXAMPLES)
@given(pods())
def test_validation_agrees(validating: Policy, made: Json) -> None:
    """Else an annotation would be good in one cluster and refused in another."""
    expected = (
        {finding.annotation for finding in findings(made, RULES)} if pod_asks_for(made, RULES.resource) else set()
    )
    said = validating.messages(made)
    assert bool(said) == bool(expected)
    named = {match for text in said for match in re.findall(r"metadata\.annotations\[([^\]]+)\]", text)}
    assert named <= expected


def test_update_with_an_old_mistake_is_let_through(validating: Policy) -> None:
    """A pod that was admitted before must be able to lose its finalizers."""
    bad = pod(annotations={"nvshare.com/priority": "high"})
    assert validating.messages(bad, None)
    assert not validating.messages(bad, copy.deepcopy(bad))
    assert not validating.messages(pod(annotations={"nvshare.com/priority": "high", "other.example/key": "new"}), bad)
    assert validating.messages(bad, pod())
    assert validating.messages(bad, pod(annotations={"nvshare.com/priority": "higher"}))
    assert validating.messages(pod(annotations={"nvshare.com/priority": ""}), pod())


def test_one_of_two_mistakes_may_be_mended(validating: Policy) -> None:
    """Who corrects a pod annotation by annotation must not be refused for those that are still to come."""
    both = pod(annotations={"nvshare.com/priority": "high", "nvshare.com/weight": "0"})
    (said,) = validating.messages(pod(annotations={"nvshare.com/priority": "higher", "nvshare.com/weight": "0"}), both)
    assert "nvshare.com/priority" in said
    assert not validating.messages(pod(annotations={"nvshare.com/priority": "5", "nvshare.com/weight": "0"}), both)


def test_doubled_variable_is_left_alone(mutating: Policy) -> None:
    """Server-side apply cannot merge into it; an error would switch the whole policy off for that pod."""
    env = [{"name": "NVSHARE_PRIORITY", "value": "1"}, {"name": "NVSHARE_PRIORITY", "value": "2"}]
    made = pod(container(env=env), annotations={"nvshare.com/priority": "5"})
    assert mutating.mutate(made) == with_settings(made, RULES) == made


def test_pods_without_a_slot_are_not_matched(mutating: Policy, validating: Policy) -> None:
    """A policy that fires for every pod of a cluster is a cost and a danger."""
    plain = pod(container(gpu=False), annotations={"nvshare.com/priority": "5"})
    assert not mutating.matches(plain)
    assert not validating.matches(plain)


def test_opt_in_and_failing_open() -> None:
    """Neither policy may touch a namespace without the label, nor keep a pod from starting when it fails."""
    documents = {document["kind"]: document for document in render()}
    for kind in ("MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"):
        assert documents[kind]["spec"]["failurePolicy"] == "Ignore"
        binding = documents[f"{kind}Binding"]["spec"]
        assert binding["policyName"] == documents[kind]["metadata"]["name"]
        assert binding["matchResources"]["namespaceSelector"]["matchLabels"] == {"nvshare.com/admission": "enabled"}
    assert documents["ValidatingAdmissionPolicyBinding"]["spec"]["validationActions"] == ["Warn", "Audit"]
    (strict,) = (found for found in render(enforce=True) if found["kind"] == "ValidatingAdmissionPolicyBinding")
    assert strict["spec"]["validationActions"] == ["Deny"]


def test_api_version_follows_the_value() -> None:
    """A cluster of 1.34 or 1.35 knows v1beta1 only."""
    for version in ("admissionregistration.k8s.io/v1", "admissionregistration.k8s.io/v1beta1"):
        kinds = {found["kind"]: found["apiVersion"] for found in render(policy={"apiVersion": version})}
        assert kinds["MutatingAdmissionPolicy"] == kinds["MutatingAdmissionPolicyBinding"] == version
        assert kinds["ValidatingAdmissionPolicy"] == "admissionregistration.k8s.io/v1"


OTHER_VALUES: dict[str, tuple[Json, Rules]] = {
    "no priority classes": ({}, Rules()),
    "another resource": ({"resource": {"name": "gpu.example/slots"}}, Rules(resource="gpu.example/slots")),
    "a range without classes": (
        {"admission": {"priorityRange": {"min": 1, "max": 2}}},
        Rules(priority_min=1, priority_max=2),
    ),
    "a narrow range": ({"admission": {"priorityRange": {"min": -7, "max": 0}}}, Rules(priority_min=-7, priority_max=0)),
    "short classes": ({"priorityClasses": SHORT}, rules_from(priority_classes=SHORT)),
}


@pytest.mark.parametrize(("values", "rules"), OTHER_VALUES.values(), ids=OTHER_VALUES.keys())
def test_other_values_reach_the_expressions(values: Json, rules: Rules) -> None:
    """Broken: the policy follows other priority classes, bounds or resources than the device plugin."""
    with Chart.load(CHART) as chart:
        merged_values = {**IMAGE, **values, "admission": {"mode": "policy", **values.get("admission", {})}}
        rendered = chart.render(values=merged_values, name="demo", namespace="gpu")
    (text,) = (text for path, text in rendered.items() if path.endswith("/admission-policy.yaml"))
    documents = {document["kind"]: document for document in yaml.safe_load_all(text) if document}
    mutating, validating = (Policy(documents[f"{kind}AdmissionPolicy"]) for kind in ("Mutating", "Validating"))
    for priority, priority_class in (("0", "high"), ("-7", "low"), ("-8", "low"), ("1", "high"), ("1001", "other")):
        made = pod(annotations={"nvshare.com/priority": priority}, priorityClassName=priority_class)
        made["spec"]["containers"][0]["resources"]["limits"] = {rules.resource: "1"}
        assert mutating.mutate(made) == with_settings(made, rules)
        assert validating.messages(made) == [finding.text for finding in findings(made, rules)]
        made["metadata"]["annotations"] = {"nvshare.com/class": "opportunistic" if priority == "0" else "production"}
        assert validating.messages(made) == [finding.text for finding in findings(made, rules)]
        assert mutating.mutate(made) == with_settings(made, rules)


def test_none_renders_nothing() -> None:
    """Admission is off unless somebody asks for it."""
    assert render(mode="none") == []


def test_old_cluster_is_told_to_use_the_watch(tmp_path: Path) -> None:
    """An object of an unknown kind would fail the whole installation with a message about kinds."""
    copied = shutil.copytree(CHART, tmp_path / "nvshare")  # Helm's engine renders for its own newest version only
    template = copied / "templates" / "admission-policy.yaml"
    text = template.read_text(encoding="utf-8")
    for version, expected in (("v1.36.2", "v1"), ("v1.35.0-gke.1", "v1beta1"), ("v1.33.0", None)):
        template.write_text(text.replace(".Capabilities.KubeVersion.Version", f'"{version}"'), encoding="utf-8")
        with Chart.load(copied) as chart:
            if expected is None:
                with pytest.raises(HelmRenderError, match=r"policy needs Kubernetes 1\.34 .* podAnnotations\.watch"):
                    chart.render(values={**IMAGE, "admission": {"mode": "policy"}}, name="demo", namespace="gpu")
            else:
                made = chart.render(values={**IMAGE, "admission": {"mode": "policy"}}, name="demo", namespace="gpu")
                policy = next(value for key, value in made.items() if key.endswith("/admission-policy.yaml"))
                assert f"apiVersion: admissionregistration.k8s.io/{expected}\nkind: MutatingAdmissionPolicy\n" in policy
