"""The chart under a matrix of values: what Helm renders, every supported Kubernetes must accept.

May not go here: values that must be refused (test_values.py), monitoring (test_monitoring.py).
"""

from __future__ import annotations

import itertools
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.chart.conftest import (
    CHART,
    EXAMPLES,
    LIBRARY,
    OLDEST,
    Document,
    Rendered,
    mistakes,
    render,
    versions,
    with_registry,
)
from tests.conftest import ROOT

WEBHOOK = {"mode": "webhook", "webhook": {"certManager": {"enabled": True}}}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "external": {"advertise": {"mode": "external"}},
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
    "names": {"nameOverride": "slices", "serviceAccount": {"create": False, "name": "theirs"}},
    "full-name": {"fullnameOverride": "a-name-of-forty-letters-that-is-long-ab"},
    "everything-on": {
        "podAnnotations": {"watch": True},
        "priorityClasses": {
            "production": {"priority": 100, "weight": 4, "class": "production"},
            "batch": {"priority": -10},
            "short": 7,
        },
        "resource": {"memory": {"enabled": True}},
        "slots": {"perGpu": 10, "preferred": "pack", "allowSeveral": True},
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
        "resourceQuotas": [{"namespace": "team-a", "gpus": 8, "memory": 256}, {"namespace": "team-b", "gpus": 0}],
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
    "on-delete": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}},
    "ipv6": {"metrics": {"address": "::"}},
    "mig": {"mig": {"enabled": True}},
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
    "webhook": {
        "admission": {**WEBHOOK, "enforce": True},
        "priorityClasses": {"high": {"priority": 5}},
        "metrics": {"podMonitor": {"enabled": True}},
    },
    "webhook-own-certificate": {
        "admission": {
            "mode": "webhook",
            "webhook": {
                "tlsSecret": "theirs",
                "caBundle": "Q0E=",
                "podDisruptionBudget": {"enabled": False},
                "priorityClassName": "high",
                "nodeSelector": {"a": "b"},
            },
        }
    },
    "webhook-issuer": {
        "admission": {
            "mode": "webhook",
            "webhook": {"certManager": {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "ca"}}},
        }
    },
}
MUTATING = {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
NEW_KINDS = {*MUTATING, "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
"""Kinds that the oldest versions do not have."""


@pytest.mark.parametrize("name", MATRIX)
def test_lint_finds_nothing(name: str) -> None:
    """`helm lint --strict` is what a platform team runs first."""
    report = helm_python.lint(CHART, MATRIX[name], strict=True, namespace="nvshare")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("name", MATRIX)
def test_every_version_accepts_it(name: str) -> None:
    """A field that one API server does not know, or has in another shape, would fail the installation there."""
    rendered = render(MATRIX[name])
    assert rendered.documents
    for version, document in itertools.product(versions(), rendered.documents):
        found = mistakes(document, version)
        assert found is not None, f"{document['kind']} {document['apiVersion']} is unknown to {version}"
        assert found == [], f"Kubernetes {version}: {found}"


def test_the_schemas_can_refuse() -> None:
    """A misspelt field must be found, or the tests above prove nothing."""
    for kind in ("DaemonSet", "ServiceMonitor", "PrometheusRule", "ConfigMap"):
        document = render(MATRIX["everything-on"]).all(kind)[0]
        document["metadata"]["lables"] = {}
        for version in versions():
            assert mistakes(document, version), (kind, version)
    assert versions()[0].startswith("1.28.")
    assert len(versions()) >= 10
    assert OLDEST == (1, 28)


@pytest.mark.parametrize("api", ["admissionregistration.k8s.io/v1", "admissionregistration.k8s.io/v1beta1"])
def test_the_policy_is_valid_where_it_exists(api: str) -> None:
    """The admission policy must be accepted by each version that has it in that API."""
    rendered = render({"admission": {"mode": "policy", "policy": {"apiVersion": api}}})
    kinds = {document["kind"] for document in rendered.documents if document["apiVersion"] == api}
    assert kinds >= MUTATING
    seen = 0
    for version, document in itertools.product(versions(), rendered.documents):
        found = mistakes(document, version)
        if found is None:
            assert document["kind"] in NEW_KINDS
            continue
        seen += document["kind"] in MUTATING
        assert found == [], f"Kubernetes {version}: {found}"
    assert seen > 0


@pytest.mark.parametrize("name", MATRIX)
def test_names_fit_and_are_unique(name: str) -> None:
    """Two objects of one name overwrite each other; a name that is too long is refused."""
    documents = render(MATRIX[name], name="a-release-name-that-is-rather-long-indeed-53-letters").documents
    keys = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(keys) == len(set(keys))
    assert all(len(key[2]) <= 63 for key in keys), keys


def pods(rendered: Rendered) -> list[Document]:
    """Specifications of all pods that the chart makes."""
    kinds = ("DaemonSet", "Deployment")
    return [document["spec"]["template"]["spec"] for kind in kinds for document in rendered.all(kind)]


@pytest.mark.parametrize("name", [name for name in MATRIX if name != "mig"])
def test_pods_have_no_privileges(name: str) -> None:
    """A GPU tool is no reason for a privileged pod, the host's network, or a token that nobody uses."""
    rendered = render(MATRIX[name])
    for pod in pods(rendered):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        watches = MATRIX[name].get("podAnnotations", {}).get("watch", False)
        assert pod["automountServiceAccountToken"] is (watches and pod["containers"][0]["name"] == "coordinator")
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert "privileged" not in context


def test_mig_needs_one_capability() -> None:
    """The API server refuses SYS_ADMIN together with allowPrivilegeEscalation: false."""
    context = render(MATRIX["mig"]).container("coordinator")["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert "allowPrivilegeEscalation" not in context
    assert context["readOnlyRootFilesystem"] is True


def test_roles_only_when_needed() -> None:
    """Without annotations nothing of ours talks to the API server; with them it may list and watch pods, no more."""
    for name in MATRIX:
        rendered = render(MATRIX[name])
        roles = rendered.all("ClusterRole") + rendered.all("Role")
        if name != "everything-on":
            assert roles == [], name
    (role,) = render(MATRIX["everything-on"]).all("ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]


def test_a_change_of_settings_restarts_the_coordinator() -> None:
    """The file is read at the start: without a checksum, `helm upgrade --set settings...` would do nothing."""

    def checksum(values: dict[str, Any]) -> str:
        template = render(values).one("DaemonSet")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    seen = [
        checksum(values)
        for values in (
            {},
            {"settings": {"quantum": "50ms"}},
            {"settings": {"gpu": {"GPU-1": {"quantum": "20ms"}}}},
            {"priorityClasses": {"a": {"priority": 1}}},
        )
    ]
    assert len(set(seen)) == len(seen)
    assert checksum({"metrics": {"dashboard": {"enabled": True}}}) == seen[0]


def test_hostpaths_are_mounted_where_they_are() -> None:
    """The plugin tells the kubelet paths of the host; inside they must be the same, or pods get empty directories."""
    values = {"hostPaths": {"socketDirectory": "/run/s", "libraryDirectory": "/opt/l", "kubeletDirectory": "/k"}}
    values["hostPaths"]["devicePluginDirectory"] = "/d/plugins"
    rendered = render(values)
    pod = rendered.one("DaemonSet")["spec"]["template"]["spec"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert set(paths.values()) == {"/run/s", "/opt/l", "/d/plugins", "/k/pod-resources"}
    for container in (*pod["initContainers"], *pod["containers"]):
        for mount in container["volumeMounts"]:
            if mount["name"] in paths:
                assert mount["mountPath"] == paths[mount["name"]]
    text = json.dumps(pod)
    assert not [default for default in ("/run/nvshare", "/var/lib/nvshare", "/var/lib/kubelet") if default in text]


def test_the_device_plugins_stay_where_every_kubelet_has_them() -> None:
    """A kubelet's --root-dir moves everything but this directory: it is a constant of the kubelet."""
    rendered = render({"hostPaths": {"kubeletDirectory": "/var/lib/k0s/kubelet"}})
    arguments = rendered.container("device-plugin")["args"]
    assert "--plugin-dir=/var/lib/kubelet/device-plugins" in arguments
    assert "--pod-resources-socket=/var/lib/k0s/kubelet/pod-resources/kubelet.sock" in arguments


def test_external_advertises_nothing() -> None:
    """Two plugins for the same cards would hand each of them out twice."""
    rendered = render(MATRIX["external"])
    pod = rendered.one("DaemonSet")["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["coordinator"]
    assert "kubelet" not in json.dumps(pod)
    assert "advertise.mode: external" in rendered.notes


def test_external_serves_every_user() -> None:
    """Only in /run/nvshare the coordinator's socket is open to all users, so that is where it must be mounted."""
    for directory in ("/run/nvshare", "/run/other"):
        values = {"advertise": {"mode": "external"}, "hostPaths": {"socketDirectory": directory}}
        rendered = render(values)
        container = rendered.container("coordinator")
        assert "--runtime-dir=/run/nvshare" in container["args"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "sockets"]
        assert mount["mountPath"] == "/run/nvshare"
        volumes = rendered.one("DaemonSet")["spec"]["template"]["spec"]["volumes"]
        assert [v["hostPath"]["path"] for v in volumes if v["name"] == "sockets"] == [directory]


def test_notes_name_what_pods_ask_for() -> None:
    """After the installation the first question is what to write into a pod."""
    notes = render({"resource": {"name": "example.com/slice"}, "slots": {"perGpu": 7}}).notes
    assert "example.com/slice: 1" in notes
    assert "7 slots" in notes
    assert "allocatable.example\\.com/slice" in notes


def test_the_package_is_the_chart(tmp_path: Path) -> None:
    """A file that .helmignore leaves out is missing only for those who install the package."""
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as packed:
        files = packed.render(with_registry(MATRIX["everything-on"]), name="gpu", namespace="nvshare")
    assert Rendered(files).documents == render(MATRIX["everything-on"]).documents


def test_the_versions_agree() -> None:
    """Chart, library and package are one release: the image's tag and the library's default come from these."""
    about = [yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8")) for chart in (CHART, LIBRARY)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {each["version"] for each in about} | {each["appVersion"] for each in about} == {project["version"]}
    template = (LIBRARY / "templates" / "_sidecar.tpl").read_text(encoding="utf-8")
    assert f'default "{project["version"]}"' in template
    needed = yaml.safe_load((EXAMPLES / "notebook-with-worker" / "Chart.yaml").read_text(encoding="utf-8"))
    assert [each["version"] for each in needed["dependencies"]] == [project["version"]]


def test_the_library_and_its_example_are_clean(tmp_path: Path) -> None:
    """`helm lint` of what people copy from."""
    place = tmp_path / "notebook-with-worker"
    shutil.copytree(EXAMPLES / "notebook-with-worker", place)
    shutil.copytree(LIBRARY, place / "charts" / "nvshare-sidecar")
    for path in (LIBRARY, place):
        report = helm_python.lint(path, {}, strict=True, namespace="default")
        assert report["errors"] == [], path
