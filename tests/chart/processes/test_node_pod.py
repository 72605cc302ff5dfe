"""The DaemonSet's pod as real processes, in both modes.

Non-goals: the kubelet's calls to the device plugin (tests/kubernetes).
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.chart.conftest import LIBRARY, Rendered, mistakes, render, versions
from tests.chart.processes.pod import Pod, free_ports, running
from tests.conftest import Built
from tests.waiting import eventually


@contextlib.contextmanager
def node_pod(built: Built, mode: str) -> Iterator[tuple[Rendered, Pod]]:
    """The DaemonSet's pod, serving, on a node with a simulated GPU and without a kubelet."""
    coordinator, plugin = free_ports(2)
    values = {
        "metrics": {"coordinatorPort": coordinator, "devicePluginPort": plugin},
        "settings": {"policy": "priority", "quantum": "30ms"},
        "slots": {"perGpu": 3},
        "advertise": {"mode": mode},
    }
    rendered = render(values)
    (settings,) = [document for document in rendered.all("ConfigMap") if "nvshare.toml" in document["data"]]
    maps = {settings["metadata"]["name"]: settings["data"]}
    with running(rendered.one("DaemonSet")["spec"]["template"]["spec"], built, maps) as pod:
        for name in [container["name"] for container in pod.spec["containers"]]:
            text = eventually(functools.partial(probe, rendered, pod, name), f"{name}'s answer to its probe")
            assert "nvshare_" in text
        (gpu,) = json.loads(pod.execute("coordinator", ["nvshare-ctl", "status", "--json"]))["gpus"]
        assert (gpu["policy"], gpu["quantum_ns"]) == ("priority", 30_000_000)
        yield rendered, pod
        assert set(pod.stop().values()) == {0}


def probe(rendered: Rendered, pod: Pod, name: str) -> str:
    """A container's metrics, once both its probes have an answer; empty until then."""
    container = rendered.container(name)
    assert pod.running[name].poll() is None, pod.log(container)
    get = container["livenessProbe"]["httpGet"]
    paths = [container[kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe")]
    (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == get["port"]]
    text = ""
    try:
        for path in (*paths, "/metrics"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                text = str(answer.read().decode())
    except OSError:
        return ""
    return text


def test_the_nodes_pod_runs(built: Built) -> None:
    """Broken: root without capabilities, on the host's directories, cannot start, answer probes or stop in order."""
    with node_pod(built, "plugin") as (_, pod):
        library = pod.directory / "library" / "lib"
        assert (library / "current" / "libnvshare_hook.so").is_file()
        assert not any(path.stat().st_mode & 0o022 for path in library.rglob("*") if not path.is_symlink())
        pod.stop()
        assert (library / "current" / "libnvshare_hook.so").is_file(), "running pods have it mapped"


CLIENT = """
apiVersion: v1
kind: Pod
metadata:
  name: client
spec:
  containers:
    - name: main
      image: example.com/cuda:1
      command: {{ .Values.command | toJson }}
      env:
        {{- include "nvshare.node.env" (dict "root" . "name" "main" "priority" 7 "memoryLimit" "1GiB") | nindent 8 }}
      volumeMounts:
        {{- include "nvshare.node.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "nvshare.node.volumes" . | nindent 4 }}
"""
"""A pod of a chart that uses the library's templates for nodes without a device plugin."""


def client_pod(chart: Path, command: list[str]) -> dict[str, Any]:
    """The specification of a client's pod that uses the library chart."""
    (chart / "templates").mkdir(parents=True)
    dependency = {"name": "nvshare-sidecar", "version": "0.2.0", "repository": "file://../nvshare-sidecar"}
    about = {"apiVersion": "v2", "name": "client", "version": "0.1.0", "dependencies": [dependency]}
    (chart / "Chart.yaml").write_text(json.dumps(about), encoding="utf-8")
    (chart / "templates" / "pod.yaml").write_text(CLIENT, encoding="utf-8")
    shutil.copytree(LIBRARY, chart / "charts" / "nvshare-sidecar")
    with helm_python.Chart.load(chart) as loaded:
        (text,) = loaded.render({"command": command}, name="client").values()
    (document,) = yaml.safe_load_all(text)
    assert all(mistakes(document, version) == [] for version in versions())
    return {**document["spec"], "initContainers": []}


def test_external_pods_share_by_the_hosts_directories(built: Built, saturate: Path, tmp_path: Path) -> None:
    """Broken: without the plugin the library's templates name other directories than the DaemonSet's."""
    spec = client_pod(tmp_path / "client", [str(saturate), "100", "100000", "4"])
    with node_pod(built, "external") as (rendered, host):
        hosts = {volume["hostPath"]["path"]: volume["name"] for volume in host.spec["volumes"] if "hostPath" in volume}
        client = Pod(spec, host.directory / "client", built)
        client.directory.mkdir()
        try:
            client.start(state=host.directory / "gpu" / "state", places=host.directory, host_paths=hosts)

            said = client.log(spec["containers"][0])
            (row,) = eventually(lambda: host.status("coordinator")["clients"], f"the pod among the clients\n{said}")
            assert (row["name"], row["priority"]) == ("main", 7)
            leases = lambda: "nvshare_client_leases_total{" in probe(rendered, host, "coordinator")  # noqa: E731
            eventually(leases, "a lease in metrics")
        finally:
            client.stop()
