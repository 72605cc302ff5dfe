"""The examples: what they ask for exists, every Kubernetes accepts them, and their programs are Python.

Non-goals: the sidecar's processes (test_sidecar.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nvshare.coordinator.kubernetes.cluster.annotations import Rules, findings
from tests.chart.conftest import CHART, EXAMPLES, mistakes, versions

FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def documents(name: str) -> list[dict[str, Any]]:
    """Documents that `kubectl apply -f` would read."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    return [{**d, "metadata": {"namespace": "default", **d["metadata"]}} for d in yaml.safe_load_all(text) if d]


def pods(name: str) -> Iterator[dict[str, Any]]:
    """Pods and templates of pods."""
    for document in documents(name):
        if document["kind"] == "Pod":
            yield document
        elif "template" in document.get("spec", {}):
            yield document["spec"]["template"]


@pytest.mark.parametrize("name", FILES)
def test_every_version_accepts_it(name: str) -> None:
    """An example that the API server refuses is the first thing that a user sees of us."""
    claims = "resourceClaims" in (EXAMPLES / name).read_text(encoding="utf-8")
    tested = [version for version in versions() if not claims or int(version.split(".")[1]) >= 34]
    for version in tested:
        for document in documents(name):
            assert mistakes(document, version) == [], version


@pytest.mark.parametrize("name", FILES)
def test_it_asks_for_what_there_is(name: str) -> None:
    """A resource or annotation of another name leaves the pod pending, or does nothing."""
    ours = {VALUES["resource"]["name"]}
    for pod in pods(name):
        assert findings(pod, Rules()) == []
        part = "gpu-fraction" in pod["metadata"].get("annotations", {})
        assert (pod["spec"].get("schedulerName") == "kai-scheduler") == part
        for container in pod["spec"]["containers"]:
            resources = container.get("resources", {})
            asked = {key for key in resources.get("limits", {}) if "/" in key}
            assert asked <= ours
            assert asked or resources.get("claims") or part


@pytest.mark.parametrize("name", FILES)
def test_its_programs_are_python(name: str) -> None:
    """Nobody runs these on a card in CI; a mistake of syntax at least must not be in them."""
    programs = [
        word
        for pod in pods(name)
        for container in pod["spec"]["containers"]
        for word in container["command"]
        if "\n" in word
    ]
    programs += [text for d in documents(name) if d["kind"] == "ConfigMap" for text in d["data"].values()]
    for text in programs:
        compile(text, name, "exec")
    assert programs
