"""The chart under a matrix of values: every supported Kubernetes accepts it, and our programs accept their options.

Non-goals: values that must be refused (test_values.py), single documents (test_render.py).
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import helm_python
import pytest
import typer.main

from nvshare.coordinator.daemon import settings_file
from tests.chart.conftest import CHART, OLDEST, SCRIPTS, Document, Rendered, mistakes, render, versions

MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "external": {"advertise": {"mode": "external"}},
    "nri": {"advertise": {"mode": "external"}, "nri": {"enabled": True}, "extraEnv": [{"name": "ON", "value": "true"}]},
    "dra": {
        "advertise": {"mode": "dra"},
        "clients": {"memoryBoundary": "auto"},
        "cdi": {"kind": "nvidia.com/gpu"},
        "health": {"ignoredXids": [94]},
    },
    "image": {
        "image": {
            "registry": "registry.example.com:5000/team/",
            "repository": "gpu/nvshare",
            "tag": "1.2",
            "digest": "sha256:" + "a" * 64,
            "pullPolicy": "Always",
            "pullSecrets": ["login"],
        }
    },
    "names": {
        "nameOverride": "slices",
        "namespaceOverride": "elsewhere",
        "serviceAccount": {"create": False, "name": "theirs"},
    },
    "full-name": {"fullnameOverride": "a-name-of-forty-letters-that-is-long-ab"},
    "everything-on": {
        "podAnnotations": {"watch": True},
        "priorityClasses": {
            "production": {"priority": 100, "weight": 4, "class": "production"},
            "batch": {"priority": -10},
            "short": 7,
        },
        "slots": {"perGpu": 10, "preferred": "pack", "allowSeveral": True},
        "clients": {"memoryBoundary": "auto", "processes": 4},
        "metrics": {
            "serviceMonitor": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "nvshare_drain.*"}],
            },
            "prometheusRule": {"enabled": True, "namespace": "monitoring"},
            "dashboard": {"enabled": True, "namespace": "grafana", "annotations": {"grafana_folder": "GPU"}},
        },
        "criticalPodsQuota": {"enabled": True},
        "resourceQuotas": [{"namespace": "team-a", "gpus": 8}, {"namespace": "team-b", "gpus": 0}],
        "extraEnv": [{"name": "ON", "value": "true"}],
    },
    "pod-monitor": {"metrics": {"podMonitor": {"enabled": True, "interval": "1m30s"}}},
    "pod-monitor-external": {"metrics": {"podMonitor": {"enabled": True}}, "advertise": {"mode": "external"}},
    "placement": {
        "affinity": None,
        "nodeSelector": {"gpu": "true"},
        "tolerations": [],
        "runtimeClassName": "nvidia",
        "priorityClassName": "",
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "20%"}},
        "daemonPodAnnotations": {"a": "1"},
        "daemonPodLabels": {"team": "gpu"},
        "podSecurityContext": {"fsGroup": 1},
        "seLinuxOptions": {"type": "spc_t"},
    },
    "openshift": {"openshift": {"securityContextConstraints": True}, "mig": {"enabled": False}},
    "guarded": {
        "metrics": {
            "tlsSecret": "metrics-tls",
            "tlsConfig": {"ca": {"secret": {"name": "metrics-tls", "key": "ca.crt"}}, "serverName": "nvshare"},
            "podMonitor": {"enabled": True},
        },
        "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
        "cdi": {"kind": "nvidia.com/gpu"},
        "health": {"ignoredXids": [94, 95]},
        "coordinator": {"waitForDriver": ""},
    },
    "node-groups": {
        "nodeGroups": [
            {
                "name": "big",
                "label": "nvidia.com/gpu.product",
                "values": ["H200", "H100"],
                "slots": {"perGpu": 16},
                "clients": {"memoryMode": "swap"},
                "settings": {"quantum": "50ms"},
            },
            {"name": "small", "label": "size", "values": ["small"], "tolerations": [], "runtimeClassName": "nvidia"},
        ],
        "metrics": {"serviceMonitor": {"enabled": True}},
    },
    "on-delete": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}},
    "ipv6": {"metrics": {"address": "::"}},
    "mig": {"mig": {"enabled": True}},
    "parking": {"parking": {"enabled": True}, "openshift": {"securityContextConstraints": True}},
    "k0s": {"hostPaths": {"kubeletDirectory": "/var/lib/k0s/kubelet", "socketDirectory": "/run/gpu-slices"}},
    "settings": {
        "settings": {
            "policy": "priority",
            "quantum": "auto",
            "sharing": "concurrent",
            "capacity": "100GiB",
            "overdue_action": "demote",
            "idle_release": 0,
            "pacing_budget": "0",
            "max_clients": 2000,
            "gpu": {"GPU-5a1c0000-0000-0000-0000-000000000000": {"quantum": "20ms", "capacity": 1073741824}},
        }
    },
}


def pods(rendered: Rendered) -> list[Document]:
    """Specifications of all pods of the chart."""
    return [document["spec"]["template"]["spec"] for document in rendered.all("DaemonSet")]


def containers(rendered: Rendered) -> list[Document]:
    """All containers and init containers of the chart."""
    return [each for pod in pods(rendered) for each in (*pod.get("initContainers", []), *pod["containers"])]


def program(name: str) -> Any:
    """The parser of one of our programs."""
    return typer.main.get_command(importlib.import_module(SCRIPTS[name].split(":")[0]).app)


@pytest.mark.parametrize("name", MATRIX)
def test_every_version_accepts_it(name: str) -> None:
    """Broken: `helm lint --strict`, an API server or a name clash fails the installation."""
    report = helm_python.lint(CHART, MATRIX[name], strict=True, namespace="nvshare")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []
    rendered = render(MATRIX[name])
    assert rendered.documents
    tested = [version for version in versions() if name != "dra" or int(version.split(".")[1]) >= 36]
    for version, document in itertools.product(tested, rendered.documents):
        found = mistakes(document, version)
        assert found is not None, f"{document['kind']} {document['apiVersion']} is unknown to {version}"
        assert found == [], f"Kubernetes {version}: {found}"
    documents = render(MATRIX[name], name="a-release-name-that-is-rather-long-indeed-53-letters").documents
    keys = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(keys) == len(set(keys))
    assert all(len(key[2]) <= 63 for key in keys), keys


@pytest.mark.parametrize("name", MATRIX)
def test_its_pods_need_no_privileges(name: str) -> None:
    """Broken: a privileged pod, the host's network, an unused token or role, or an option that no program knows."""
    rendered = render(MATRIX[name])
    watches = MATRIX[name].get("podAnnotations", {}).get("watch", False)
    roles = rendered.all("ClusterRole") + rendered.all("Role")
    uses_api = watches or name in ("dra", "nri")
    rules: list[dict[str, list[str]]] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["watch"]}]
    if name == "nri":
        rules = [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    elif name == "dra":
        rules = [
            {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
            {
                "apiGroups": ["resource.k8s.io"],
                "resources": ["resourceslices"],
                "verbs": ["get", "watch", "create", "update"],
            },
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        ]
    assert [role["rules"] for role in roles] == ([rules] if uses_api else [])
    for pod in pods(rendered):
        assert {"hostNetwork", "hostPID", "hostIPC"} & set(pod) == ({"hostPID"} if name == "parking" else set())
        assert pod["automountServiceAccountToken"] is uses_api
    for container in containers(rendered):
        context = container["securityContext"]
        # The API server refuses SYS_ADMIN together with allowPrivilegeEscalation: false.
        mig = name == "mig"
        added = ["SYS_ADMIN"] if mig else []
        if name == "parking" and container["name"] == "coordinator":
            added = ["SYS_PTRACE", "SETUID", "SETGID"]
        assert context["capabilities"] == {"drop": ["ALL"], **({"add": added} if added else {})}
        assert context.get("allowPrivilegeEscalation") is (None if mig else False)
        assert context["readOnlyRootFilesystem"] is True
        assert "privileged" not in context
        (command,) = container["command"]
        parsed = program(command).make_context(command, list(container["args"]))
        assert not parsed.args, f"{command}: {parsed.args}"


@pytest.mark.parametrize("name", MATRIX)
def test_the_coordinator_reads_its_settings(name: str, tmp_path: Path) -> None:
    """The file of the ConfigMap is read by the coordinator itself: numbers and quotes must survive the templates."""
    rendered = render(MATRIX[name])
    found = next(d for d in rendered.all("ConfigMap") if "nvshare.toml" in d["data"])
    file = tmp_path / "nvshare.toml"
    file.write_text(found["data"]["nvshare.toml"], encoding="utf-8")
    settings = settings_file.load({}, {}, file)
    given = {"policy": "auto", "quantum": "auto"} | MATRIX[name].get("settings", {})
    assert settings.policy == given["policy"]
    assert settings.quantum_ns == (None if given["quantum"] == "auto" else 100_000_000)
    assert settings.max_clients == given.get("max_clients", 1024)
    assert settings.idle_release_ns == given.get("idle_release", 2_000_000)
    assert settings.pacing_budget_ns == (0 if "pacing_budget" in given else 10_000_000)
    for uuid, override in given.get("gpu", {}).items():
        assert settings.gpu[uuid]["quantum_ns"] == 20_000_000
        assert settings.gpu[uuid]["capacity_bytes"] == override["capacity"]
    assert json.loads(found["data"]["priority-classes.json"]) == MATRIX[name].get("priorityClasses", {})


def test_the_schemas_can_refuse() -> None:
    """A misspelt field must be found, or the tests above prove nothing."""
    for kind in ("DaemonSet", "ServiceMonitor", "PrometheusRule", "ConfigMap"):
        document = copy.deepcopy(render(MATRIX["everything-on"]).all(kind)[0])
        document["metadata"]["lables"] = {}
        for version in versions():
            assert mistakes(document, version), (kind, version)
    assert versions()[0].startswith("1.28.")
    assert len(versions()) >= 10
    assert OLDEST == (1, 28)


def test_environment_is_no_setting_by_accident() -> None:
    """A variable of the pod that a program reads as a setting would beat the file."""
    for container in render().one("DaemonSet")["spec"]["template"]["spec"]["containers"]:
        given = {entry["name"]: entry.get("value", "node-1") for entry in container["env"]}
        assert settings_file.load({}, given) == settings_file.load({}, {})
