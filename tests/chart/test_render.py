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
