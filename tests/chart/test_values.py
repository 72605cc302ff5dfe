"""Values that must be refused, each with a message that names the value; and what values become for our own programs.

Non-goals: whether Kubernetes accepts what is rendered (test_render.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import yaml

from nvshare.coordinator.kubernetes.node import plugin_main
from nvshare.scheduler_policies import registry
from tests.chart import values_table
from tests.chart.conftest import CHART, refusal, render
from tests.chart.test_matrix import MATRIX

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown value": ({"slotsPerGpu": 4}, "slotsPerGpu"),
    "no slots": ({"slots": {"perGpu": 0}}, "/slots/perGpu"),
    "mode": ({"advertise": {"mode": "both"}}, "/advertise/mode"),
    "digest": ({"image": {"digest": "latest"}}, "/image/digest"),
    "memory mode": ({"clients": {"memoryMode": "swapped"}}, "/clients/memoryMode"),
    "quantum": ({"settings": {"quantum": "100"}}, "/settings/quantum"),
    "unknown setting": ({"settings": {"quanta": "1s"}}, "quanta"),
    "resource without a domain": ({"resource": {"name": "gpu"}}, "/resource/name"),
    "relative path": ({"hostPaths": {"kubeletDirectory": "var/lib/kubelet"}}, "/hostPaths/kubeletDirectory"),
    "dots in a path": ({"hostPaths": {"libraryDirectory": "/var/../lib"}}, "hostPaths.libraryDirectory"),
    "nested paths": ({"hostPaths": {"libraryDirectory": "/run/nvshare/lib"}}, "hostPaths.libraryDirectory"),
    "label of a number": ({"nodeSelector": {"gpu": True}}, "/nodeSelector/gpu"),
    "label of the chart's": ({"daemonPodLabels": {"app.kubernetes.io/component": "x"}}, "app.kubernetes.io/component"),
    "toleration of nothing": ({"tolerations": [{"kee": "a"}]}, "kee"),
    "name that YAML reads as a number": ({"priorityClassName": "123"}, "/priorityClassName"),
    "policy of no image": ({"settings": {"policy": "nope"}}, "settings.policy: nope"),
    "a GPU's policy of no image": ({"settings": {"gpu": {"GPU-1": {"policy": "nope"}}}}, "settings.policy: nope"),
    "one port twice": ({"metrics": {"devicePluginPort": 9400}}, "metrics.devicePluginPort"),
    "two monitors": (
        {"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}},
        "metrics.podMonitor.enabled",
    ),
    "unknown alert": (
        {"metrics": {"prometheusRule": {"enabled": True, "disabled": ["NvshareNothing"]}}},
        "metrics.prometheusRule.disabled",
    ),
    "watching without plugin": (
        {"advertise": {"mode": "external"}, "podAnnotations": {"watch": True}},
        "podAnnotations.watch",
    ),
    "two plugins for one container": ({"nri": {"enabled": True}}, "nri.enabled"),
    "watching without rights": ({"rbac": {"create": False}, "podAnnotations": {"watch": True}}, "serviceAccount.name"),
    "group without label": ({"nodeGroups": [{"name": "a", "values": ["b"]}]}, "label"),
    "two groups of one name": (
        {"nodeGroups": [{"name": "a", "label": "l", "values": ["1"]}, {"name": "a", "label": "l", "values": ["2"]}]},
        "nodeGroups[1].name",
    ),
    "policy for nobody": ({"networkPolicy": {"enabled": True}}, "networkPolicy.metricsFrom"),
    "certificate that nobody checks": (
        {"metrics": {"tlsSecret": "a", "podMonitor": {"enabled": True}}},
        "metrics.tlsConfig",
    ),
    "quota of nothing": ({"resourceQuotas": [{"namespace": "a"}]}, "/resourceQuotas/0"),
    "two quotas of one namespace": (
        {"resourceQuotas": [{"namespace": "a", "gpus": 1}, {"namespace": "a", "gpus": 2}]},
        "resourceQuotas[1].namespace",
    ),
    "class": ({"priorityClasses": {"a": {"class": "urgent"}}}, "/priorityClasses/a"),
    "nobody who may write slices": (
        {"advertise": {"mode": "dra"}, "rbac": {"create": False}},
        "serviceAccount.name",
    ),
    "range": ({"podAnnotations": {"priorityRange": {"min": 5, "max": 1}}}, "podAnnotations.priorityRange.min"),
    "useless strategy": (
        {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {"maxUnavailable": 2}}},
        "updateStrategy.rollingUpdate",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_values_are_named(what: str) -> None:
    """An operator who mistypes a value must read which one, not a failure on some node an hour later."""
    values, name = BAD[what]
    message = refusal(values)
    assert name in message, message


def test_policies_are_the_coordinators() -> None:
    """Broken: a policy that the coordinator offers, or that the image brings, cannot be set."""
    assert f"the image has {', '.join(sorted(registry.BUILT_IN))};" in refusal({"settings": {"policy": "nope"}})
    render({"settings": {"policy": "my_policy"}, "image": {"policies": ["my_policy"]}})


def test_the_device_plugins_defaults_are_the_charts() -> None:
    """Broken: a device plugin that is tried by hand behaves in another way than an installed one."""
    arguments = render().container("device-plugin")["args"]
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)
    defaults = {
        name.replace("_", "-"): parameter.default for name, parameter in signature(plugin_main.run).parameters.items()
    }
    own = {"library-dir", "metrics-port"}  # paths and ports of the pod
    compared = {name: str(defaults[name]) for name in given if name not in own}
    assert compared == {name: value for name, value in given.items() if name not in own}


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the schema that has fixed properties, by its path."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" in schema:
        yield path, schema
        for name, inner in schema["properties"].items():
            yield from leaves(inner, f"{path}.{name}" if path else name)


def test_schema_knows_every_value() -> None:
    """A value without a schema takes anything; an object that is open swallows misspelt names."""
    for path, schema in leaves(SCHEMA):
        assert path == "global" or schema["additionalProperties"] is False, path
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    def missing(given: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if "properties" not in schema:
            return
        for name, inner in schema["properties"].items():
            where = f"{path}.{name}".strip(".")
            if name not in given:
                yield where
            elif isinstance(given[name], dict) and given[name]:
                yield from missing(given[name], inner, where)

    absent = {name for name in missing(values, SCHEMA, "") if not name.startswith("settings.")}
    assert not absent, "values.yaml shows every value with its default"


def test_image_names() -> None:
    """Registry, repository, tag and digest in the order that container runtimes read."""
    image = render(MATRIX["image"]).container("coordinator")["image"]
    assert image == "registry.example.com:5000/team/gpu/nvshare:1.2@sha256:" + "a" * 64
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert render().container("device-plugin")["image"] == f"registry.example.com/nvshare:{chart['appVersion']}"
    secrets = render(MATRIX["image"]).one("DaemonSet")["spec"]["template"]["spec"]["imagePullSecrets"]
    assert secrets == [{"name": "login"}]
    parent = {"imageRegistry": "mirror.example.com", "imagePullSecrets": ["a", {"name": "b"}]}
    mirrored = render({"image": {"pullSecrets": ["login"]}, "global": {**parent, "other": 1}})
    assert mirrored.container("coordinator")["image"].startswith("mirror.example.com/nvshare:")
    pod = mirrored.one("DaemonSet")["spec"]["template"]["spec"]
    assert [each["name"] for each in pod["imagePullSecrets"]] == ["a", "b", "login"]


def test_pods_are_parked_only_where_the_coordinator_may() -> None:
    """Broken: `park_after` is set, and no pod is ever parked."""
    for name in ("park_after", "park_after_interactive", "park_after_best_effort"):
        assert f"settings.{name}: needs parking.enabled: true" in refusal({"settings": {name: "10m"}})
        render({"settings": {name: "10m"}, "parking": {"enabled": True}})
        render({"settings": {name: "0"}})
    render({"settings": {"park_after_interactive": "common"}})


def test_an_image_that_no_node_can_pull_is_refused() -> None:
    """Installing with the defaults must not end in pods that wait for an image for ever."""
    assert "image.registry: empty" in refusal({"image": {"registry": ""}})
    for image in ({"pullPolicy": "Never"}, {"repository": "localhost:5000/nvshare"}, {"repository": "team/nvshare"}):
        rendered = render({"image": {"registry": "", **image}})
        name = image.get("repository", "nvshare")
        assert str(rendered.container("coordinator")["image"]).startswith(f"{name}:")


def test_the_table_of_values_is_current() -> None:
    """A page that lacks a value hides it; write it anew with `python -m tests.chart.values_table`."""
    assert values_table.PAGE.read_text(encoding="utf-8") == values_table.page()
