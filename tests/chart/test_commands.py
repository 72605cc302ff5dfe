"""What the chart's containers run: options that the programs know, and the node's pod as real processes.

May not go here: what a kubelet asks of the device plugin (tests/kubernetes).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import typer
import typer.main
import yaml

from nvshare.coordinator.daemon import settings_file
from tests.chart.conftest import LIBRARY, Rendered, mistakes, render, versions
from tests.chart.pod import SCRIPTS, Pod
from tests.chart.test_render import MATRIX, pods
from tests.conftest import Built
from tests.waiting import eventually


def program(name: str) -> Any:
    """The parser of one of our programs."""
    module = "nvshare.coordinator.daemon.main" if name == "nvshare-coordinator" else SCRIPTS[name].split(":")[0]
    return typer.main.get_command(importlib.import_module(module).app)


@pytest.mark.parametrize("name", MATRIX)
def test_programs_know_their_options(name: str) -> None:
    """A misspelt option is a pod that restarts for ever, on every node at once."""
    for pod in pods(render(MATRIX[name])):
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            (command,) = container["command"]
            context = program(command).make_context(command, list(container["args"]))
            assert not context.args, f"{command}: {context.args}"


def test_an_unknown_option_is_noticed() -> None:
    """The test above can fail."""
    with pytest.raises(Exception, match="No such option"):
        program("nvshare-device-plugin").make_context("nvshare-device-plugin", ["--slots=4"])


def test_environment_is_no_setting_by_accident() -> None:
    """A variable of the pod that a program reads as a setting would beat the file."""
    for container in render().one("DaemonSet")["spec"]["template"]["spec"]["containers"]:
        given = {entry["name"]: entry.get("value", "node-1") for entry in container["env"]}
        assert settings_file.load({}, given) == settings_file.load({}, {})


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below those that the system gives out; others for each of xdist's workers."""
    found: list[int] = []
    for port in range(10_000 + os.getpid() * 37 % 20_000, 32_000):
        with socket.socket() as probing:
            try:
                probing.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            break
    return found


@pytest.fixture(params=["plugin", "external"])
def node(built: Built, request: pytest.FixtureRequest) -> Iterator[tuple[Rendered, Pod]]:
    """The DaemonSet's pod on a node with a simulated GPU and a kubelet that has not come yet."""
    coordinator, plugin = free_ports(2)
    values = {
        "metrics": {"coordinatorPort": coordinator, "devicePluginPort": plugin},
        "settings": {"policy": "priority", "quantum": "30ms"},
        "slots": {"perGpu": 3},
        "advertise": {"mode": request.param},
    }
    rendered = render(values)
    (settings,) = [document for document in rendered.all("ConfigMap") if "nvshare.toml" in document["data"]]
    spec = rendered.one("DaemonSet")["spec"]["template"]["spec"]
    pod = Pod(
        spec, Path(tempfile.mkdtemp(prefix="nvs-")), built, config_maps={settings["metadata"]["name"]: settings["data"]}
    )
    try:
        pod.start()
        yield rendered, pod
    finally:
        pod.stop()
        shutil.rmtree(pod.directory, ignore_errors=True)


def probe(rendered: Rendered, pod: Pod, name: str) -> str:
    """The answer to a container's liveness probe; empty while there is none."""
    container = rendered.container(name)
    assert pod.running[name].poll() is None, pod.log(container)
    get = container["livenessProbe"]["httpGet"]
    (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == get["port"]]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{get['path']}", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_the_nodes_pod_runs(node: tuple[Rendered, Pod]) -> None:
    """Root without a capability, on directories of the host: both containers must come up, answer, leave in order."""
    rendered, pod = node
    for name in [container["name"] for container in pod.spec["containers"]]:
        text = eventually(functools.partial(probe, rendered, pod, name), f"{name}'s answer to its probe")
        assert "nvshare_" in text
    status = json.loads(pod.execute("coordinator", ["nvshare-ctl", "status", "--json"]))
    (gpu,) = status["gpus"]
    assert (gpu["policy"], gpu["quantum_ns"]) == ("priority", 30_000_000)
    library = pod.directory / "library" / "lib"
    assert (library / "current" / "libnvshare_hook.so").is_file()
    assert not any(path.stat().st_mode & 0o022 for path in library.rglob("*") if not path.is_symlink())
    assert set(pod.stop().values()) == {0}
    assert (library / "current" / "libnvshare_hook.so").is_file(), "running pods have it mapped: it must stay"


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


@pytest.mark.parametrize("node", ["external"], indirect=True)
def test_external_pods_share_by_the_hosts_directories(
    node: tuple[Rendered, Pod], built: Built, saturate: str, tmp_path: Path
) -> None:
    """Without the plugin nobody mounts anything for a pod: the library's templates must name the right directories."""
    chart = tmp_path / "client"
    (chart / "templates").mkdir(parents=True)
    dependency = {"name": "nvshare-sidecar", "version": "0.1.0", "repository": "file://../nvshare-sidecar"}
    about = {"apiVersion": "v2", "name": "client", "version": "0.1.0", "dependencies": [dependency]}
    (chart / "Chart.yaml").write_text(json.dumps(about), encoding="utf-8")
    (chart / "templates" / "pod.yaml").write_text(CLIENT, encoding="utf-8")
    shutil.copytree(LIBRARY, chart / "charts" / "nvshare-sidecar")
    with helm_python.Chart.load(chart) as loaded:
        (text,) = loaded.render({"command": [saturate, "100", "100000", "4"]}, name="client").values()
    (document,) = yaml.safe_load_all(text)
    assert all(mistakes(document, version) == [] for version in versions())

    rendered, host = node
    eventually(functools.partial(probe, rendered, host, "coordinator"), "the coordinator's answer to its probe")
    spec = {**document["spec"], "initContainers": []}
    hosts = {volume["hostPath"]["path"]: volume["name"] for volume in host.spec["volumes"] if "hostPath" in volume}
    client = Pod(spec, host.directory / "client", built)
    client.directory.mkdir()
    try:
        client.start(state=host.directory / "gpu" / "state", places=host.directory, host_paths=hosts)

        def clients() -> list[dict[str, Any]]:
            found = json.loads(host.execute("coordinator", ["nvshare-ctl", "clients", "--json"]))
            return list(found["clients"] if isinstance(found, dict) else found)

        (row,) = eventually(clients, f"the pod among the clients\n{client.log(spec['containers'][0])}")
        assert (row["name"], row["priority"]) == ("main", 7)
        eventually(lambda: "nvshare_client_leases_total{" in probe(rendered, host, "coordinator"), "a lease in metrics")
    finally:
        client.stop()
