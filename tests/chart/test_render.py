"""Single documents of the chart, its notes, its package and its versions.

Non-goals: the matrix of values (test_matrix.py), values that must be refused (test_values.py).
"""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.chart.conftest import CHART, EXAMPLES, LIBRARY, Rendered, render, with_registry
from tests.chart.test_matrix import MATRIX
from tests.conftest import ROOT


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
                assert mount["mountPath"] == paths[mount["name"]] + "/usage" * ("subPath" in mount)
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


def test_the_nri_plugin_shares_the_coordinators_slots() -> None:
    """A slot that the coordinator does not find, or a path that the host does not have, leaves pods unscheduled."""
    values = MATRIX["nri"] | {"hostPaths": {"socketDirectory": "/run/other", "libraryDirectory": "/srv/nvshare"}}
    rendered = render(values)
    pod = rendered.one("DaemonSet")["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["coordinator", "nri"]
    assert "kubelet" not in json.dumps(pod)
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert "--slots-dir=/run/other/slots" in container["args"]
        for mount in container["volumeMounts"]:
            if mount["name"] in hosts:
                assert f"{hosts[mount['name']]}/{mount.get('subPath', '')}".rstrip("/") == mount["mountPath"]
    assert "--library-dir=/srv/nvshare/lib" in rendered.container("nri")["args"]
    assert 'gpu-fraction: "0.3"' in rendered.notes


def test_the_dra_driver_shares_the_coordinators_slots() -> None:
    """A slot that the coordinator does not find, or a path that the host does not have, leaves pods unscheduled."""
    paths = {"socketDirectory": "/run/o", "libraryDirectory": "/srv/n", "kubeletDirectory": "/k", "cdiDirectory": "/c"}
    rendered = render(MATRIX["dra"] | {"hostPaths": paths, "resource": {"name": "example.com/part"}})
    pod = rendered.one("DaemonSet")["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["coordinator", "dra"]
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert set(hosts.values()) == {"/run/o", "/srv/n", "/k/plugins/gpu.nvshare.com", "/k/plugins_registry", "/c"}
    driver = rendered.container("dra")
    mounted = {mount["name"]: mount["mountPath"] for mount in driver["volumeMounts"]}
    assert hosts.items() <= mounted.items()
    assert {"--kubelet-dir=/k", "--cdi-dir=/c", "--slots-dir=/run/o/slots"} <= set(driver["args"])
    assert {"--memory-boundary=auto", "--cdi-kind=nvidia.com/gpu", "--ignored-xid=94"} <= set(driver["args"])
    assert "--slots-dir=/run/o/slots" in rendered.container("coordinator")["args"]
    assert rendered.one("DeviceClass")["spec"]["extendedResourceName"] == "example.com/part"
    assert 'compute: "30"' in rendered.notes
    assert "example.com/part: 1 gets one of 4" in rendered.notes


def test_a_node_may_write_its_own_slices_alone() -> None:
    """A node that was broken into could offer GPUs of all others."""
    rendered = render(MATRIX["dra"] | {"serviceAccount": {"create": False, "name": "theirs"}})
    policy, binding = rendered.one("ValidatingAdmissionPolicy"), rendered.one("ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policy["spec"]["failurePolicy"] == "Fail"
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"] == 'request.userInfo.username == "system:serviceaccount:nvshare:theirs"'
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["resourceslices"], ["CREATE", "UPDATE", "DELETE"])
    assert "variables.slice.?nodeName.orValue('') == variables.node" in policy["spec"]["validations"][0]["expression"]


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


def selected(daemon_set: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a node with these labels is one of the DaemonSet's."""
    affinity = daemon_set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    def holds(rule: dict[str, Any]) -> bool:
        inside = labels.get(rule["key"]) in rule["values"]
        return inside if rule["operator"] == "In" else not inside

    return any(all(holds(rule) for rule in term["matchExpressions"]) for term in terms)


def test_each_node_has_one_daemon_set() -> None:
    """Two coordinators on a node would both want its cards; none would leave it unshared."""
    rendered = render(MATRIX["node-groups"])
    gpu = {"nvidia.com/gpu.present": "true"}
    nodes = {
        "gpu-nvshare": gpu | {"nvidia.com/gpu.product": "L4"},
        "gpu-nvshare-node-big": gpu | {"nvidia.com/gpu.product": "H100", "size": "small"},
        "gpu-nvshare-node-small": {"feature.node.kubernetes.io/pci-10de.present": "true", "size": "small"},
    }
    daemon_sets = rendered.all("DaemonSet")
    assert [each["metadata"]["name"] for each in daemon_sets] == list(nodes)
    for name, labels in nodes.items():
        assert [each["metadata"]["name"] for each in daemon_sets if selected(each, labels)] == [name]
    assert not any(selected(each, {"size": "small"}) for each in daemon_sets)
    everywhere = render({**MATRIX["node-groups"], "affinity": None}).all("DaemonSet")
    assert [selected(each, {"size": "small"}) for each in everywhere] == [False, False, True]


def test_a_group_of_nodes_has_its_values() -> None:
    """A group's value that stays in values.yaml is one that an administrator believes to be in force."""
    rendered = render(MATRIX["node-groups"])
    base, big, small = (each["spec"] for each in rendered.all("DaemonSet"))
    assert len({json.dumps(each["selector"], sort_keys=True) for each in (base, big, small)}) == 3

    def arguments(spec: dict[str, Any]) -> list[str]:
        (plugin,) = [each for each in spec["template"]["spec"]["containers"] if each["name"] == "device-plugin"]
        return list(plugin["args"])

    assert {"--slots-per-gpu=16", "--memory=swap"} <= set(arguments(big))
    assert {"--slots-per-gpu=4", "--memory=auto"} <= set(arguments(base)) & set(arguments(small))
    assert small["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert "tolerations" not in small["template"]["spec"]
    assert "tolerations" in big["template"]["spec"]
    configs = {d["metadata"]["name"]: d["data"]["nvshare.toml"] for d in rendered.all("ConfigMap")}
    assert 'quantum = "50ms"' in configs["gpu-nvshare-node-big"]
    assert 'quantum = "auto"' in configs["gpu-nvshare"]
    for spec, name in ((base, "gpu-nvshare"), (big, "gpu-nvshare-node-big")):
        volumes = spec["template"]["spec"]["volumes"]
        assert [each["configMap"]["name"] for each in volumes if "configMap" in each] == [name]
    wanted = rendered.one("Service")["spec"]["selector"].items()
    assert all(wanted <= spec["template"]["metadata"]["labels"].items() for spec in (base, big, small))


def test_guarded_metrics() -> None:
    """Broken: probes speak plain HTTP to a port with TLS; a policy that forgets a port hides it from Prometheus."""
    rendered = render(MATRIX["guarded"])
    for name in ("coordinator", "device-plugin"):
        container = rendered.container(name)
        assert "--metrics-tls-dir=/etc/nvshare-metrics/tls" in container["args"]
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/etc/nvshare-metrics/tls" in paths
        for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"]["path"] == path
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert "--wait-for-driver=5m" in render().container("coordinator")["args"]
    assert not [word for word in rendered.container("coordinator")["args"] if word.startswith("--wait")]
    for endpoint in rendered.one("PodMonitor")["spec"]["podMetricsEndpoints"]:
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == "nvshare"
    policy, template = rendered.one("NetworkPolicy")["spec"], rendered.one("DaemonSet")["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"] for each in template["spec"]["containers"] for port in each["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
