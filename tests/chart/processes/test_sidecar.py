"""Sidecar mode, from the rendered pod to real processes: nothing of a cluster is needed.

Non-goals: the DaemonSet's way (tests/kubernetes).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from nvshare.simulated_gpu.trace import overlaps, read_trace
from tests.chart.conftest import EXAMPLES, mistakes, versions
from tests.chart.processes.pod import Pod, running
from tests.conftest import Built
from tests.waiting import eventually


def documents(chart: helm_python.Chart, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Documents that the example renders."""
    (text,) = chart.render(values or {}, name="notebook-with-worker", namespace="default").values()
    return [document for document in yaml.safe_load_all(text) if document]


def pod_of(chart: helm_python.Chart, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The example's pod."""
    (found,) = [document for document in documents(chart, values) if document["kind"] == "Pod"]
    return found


@pytest.fixture
def pod(example_chart: helm_python.Chart, built: Built, saturate: Path) -> Iterator[Pod]:
    """The example's pod, running, with programs that would use the whole GPU."""
    values = {
        "notebook": {"command": [str(saturate), "100", "200000", "4"]},
        "worker": {"command": [str(saturate), "100", "200000", "4"], "memoryLimit": "1GiB"},
        "nvshare": {"settings": {"policy": "round_robin", "quantum": "20ms"}},
    }
    with running(pod_of(example_chart, values)["spec"], built) as made:
        yield made


def busy(pod: Pod) -> set[int]:
    """Processes whose work is in the GPU's trace."""
    state = pod.directory / "gpu" / "state"
    return {entry.process_id for entry in read_trace(state)} if state.exists() else set()


def test_two_containers_take_turns_also_after_a_restart_of_the_sidecar(pod: Pod) -> None:
    """Broken: work of two containers overlaps, or a sidecar that the kubelet restarts leaves them without turns."""
    wanted = {pod.running[name].pid for name in ("notebook", "worker")}
    eventually(lambda: pod.status("nvshare")["gpus"][0]["handovers"] >= 10, "hand-overs between the containers")
    assert busy(pod) == wanted
    rows = json.loads(pod.execute("nvshare", ["nvshare-ctl", "clients", "--json"]))["clients"]
    assert {row["name"] for row in rows} == {"notebook", "worker"}
    pod.restart("nvshare")
    eventually(lambda: pod.status("nvshare")["gpus"][0]["handovers"] >= 2, "hand-overs after the restart")
    assert pod.running["notebook"].poll() is None
    assert pod.running["worker"].poll() is None
    assert pod.stop()["nvshare"] == 0
    assert overlaps(list(read_trace(pod.directory / "gpu" / "state"))) == []


def test_without_the_library_the_containers_run(example_chart: helm_python.Chart, built: Built, saturate: Path) -> None:
    """Broken: an image without the library, or where it does not load, fails instead of running unshared."""
    values = {name: {"command": [str(saturate), "0.2", "100000", "4"]} for name in ("notebook", "worker")}
    spec = pod_of(example_chart, values)["spec"]
    spec["initContainers"] = [c for c in spec["initContainers"] if c["name"] != "nvshare-library"]
    with running(spec, built) as made:
        codes = [made.running[name].wait(60) for name in ("notebook", "worker")]
        assert codes == [0, 0], [made.log(container) for container in spec["containers"]]


CASES: dict[str, dict[str, Any]] = {
    "claim": {},
    "visible devices": {"nvshare": {"gpu": {"claim": ""}}, "runtimeClassName": "nvidia"},
    "settings": {
        "nvshare": {
            "settings": {"quantum": "auto", "metrics_port": 9400, "metrics_address": "0.0.0.0"},
            "memoryMode": "swap",
        }
    },
}


@pytest.mark.parametrize(("name", "since"), [("claim", 34), ("visible devices", 29), ("settings", 34)])
def test_every_version_accepts_the_pod(example_chart: helm_python.Chart, name: str, since: int) -> None:
    """Native sidecars are on by default since 1.29; resource.k8s.io/v1 came with 1.34."""
    tested = [version for version in versions() if int(version.split(".")[1]) >= since]
    assert tested
    for version in tested:
        for document in documents(example_chart, CASES[name]):
            assert mistakes(document, version) == [], version


def test_the_pod_needs_nothing_of_the_cluster(example_chart: helm_python.Chart) -> None:
    """No path of the host, no account, no privilege: our part must be admitted under Pod Security's `restricted`."""
    spec = pod_of(example_chart)["spec"]
    assert all(set(volume) == {"name", "emptyDir"} for volume in spec["volumes"])
    assert "serviceAccountName" not in spec
    for container in spec["initContainers"]:
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert all(mount["readOnly"] for mount in container["volumeMounts"])


def test_the_plain_file_is_what_the_chart_renders(example_chart: helm_python.Chart) -> None:
    """The file for people without Helm must not fall behind: render it again with the command in its first line."""
    plain = (EXAMPLES / "notebook-with-worker.yaml").read_text(encoding="utf-8")
    assert [document for document in yaml.safe_load_all(plain) if document] == documents(example_chart)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"nvshare": {"memoryMode": "swapped"}}, "nvshare.memoryMode"),
        ({"nvshare": {"memory": "swap"}}, "nvshare.memory"),
    ],
)
def test_bad_values_are_named(example_chart: helm_python.Chart, values: dict[str, Any], name: str) -> None:
    """A library has no schema of its own: its templates must say what is wrong."""
    with pytest.raises(helm_python.HelmError, match=name):
        documents(example_chart, values)
