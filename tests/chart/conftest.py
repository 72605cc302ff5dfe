"""Rendering with Helm's own engine, and Kubernetes' schemas of every version that the chart supports.

Invariants: nothing contacts a cluster or a network; what a test sees is what `helm template` prints, read as
YAML 1.1, as Kubernetes reads it.

Non-goals: what the documents should say.
"""

from __future__ import annotations

import functools
import json
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml
from kubernetes_validate.utils import all_versions, schema_contents
from referencing import Registry, Resource

from tests.conftest import ROOT

CHARTS = ROOT / "charts"
CHART = CHARTS / "nvshare"
LIBRARY = CHARTS / "nvshare-sidecar"
EXAMPLES = CHARTS / "examples"
SCHEMAS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "schemas.yaml").read_text(encoding="utf-8"))
OLDEST = (1, 28)
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
"""Our programs: name -> module:function."""
Document = dict[str, Any]


def versions() -> list[str]:
    """Every minor version of Kubernetes from the oldest that the chart supports to the newest that has schemas."""
    minors = {tuple(int(part) for part in version.split(".")[:2]): version for version in all_versions()}
    return [version for minor, version in sorted(minors.items()) if minor >= OLDEST]


class Rendered:
    """Result of one `helm template`."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self.notes = "".join(text for name, text in files.items() if name.endswith("NOTES.txt"))
        self.documents: list[Document] = [
            document
            for name, text in sorted(files.items())
            if not name.endswith("NOTES.txt")
            for document in yaml.load_all(text, yaml.CSafeLoader)
            if document
        ]

    def all(self, kind: str) -> list[Document]:
        """Documents of one kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str) -> Document:
        """The only document of a kind."""
        (found,) = self.all(kind)
        return found

    def container(self, name: str) -> Document:
        """A container of the DaemonSet's pod, of whichever sort."""
        pod = self.one("DaemonSet")["spec"]["template"]["spec"]
        (found,) = [each for each in (*pod["initContainers"], *pod["containers"]) if each["name"] == name]
        return dict(found)


def render(values: Mapping[str, Any] | None = None, name: str = "gpu", namespace: str = "nvshare") -> Rendered:
    """The chart under these values, and a registry where they name none; do not change it.  Raises HelmError."""
    return _render(json.dumps(values or {}), name, namespace)


@functools.cache
def _render(values: str, name: str, namespace: str) -> Rendered:
    given = json.loads(values)
    chart = _chart()
    chart.validate_schema(given)
    return Rendered(chart.render(with_registry(given), name=name, namespace=namespace))


@functools.cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def with_registry(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, and the one that an installation cannot do without."""
    return {**values, "image": {"registry": "registry.example.com", **values.get("image", {})}}


def refusal(values: Mapping[str, Any]) -> str:
    """Helm's message for values that must not render."""
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    return str(caught.value)


@functools.cache
def _validator(version: str, kind: str, api: str) -> jsonschema.Draft202012Validator | None:
    """Strict schema of one kind of one version; None where that version has no such kind."""
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    group, _, release = api.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0]}-{release}" if group else f"{kind.lower()}-{release}"
    try:
        schema = schema_contents(f"{folder}/{name}.json", version)
    except FileNotFoundError:
        return None
    registry: Registry[Any] = Resource.from_contents(_definitions(version)) @ (
        Resource.from_contents(schema) @ Registry()
    )
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> Any:
    return schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)


@functools.cache
def own_schema(name: str) -> jsonschema.Draft202012Validator:
    """A schema of ours, for kinds that Kubernetes itself does not have."""
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    return jsonschema.Draft202012Validator(SCHEMAS[name])


def mistakes(document: Document, version: str) -> list[str] | None:
    """Mistakes that a version's API server would refuse; None when it does not know the kind."""
    kind, api = document["kind"], document["apiVersion"]
    if kind.lower() in SCHEMAS and "k8s.io" not in api and "." in api:
        validator: jsonschema.Draft202012Validator | None = own_schema(kind.lower())
    else:
        validator = _validator(version, kind, api)
    if validator is None:
        return None
    where = f"{kind} {document['metadata'].get('name')}"
    return [f"{where} {error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)]


@pytest.fixture(scope="session")
def example_chart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[helm_python.Chart]:
    """The example that uses the library, with its dependency where `helm dependency update` puts it."""
    place = tmp_path_factory.mktemp("example") / "notebook-with-worker"
    shutil.copytree(EXAMPLES / "notebook-with-worker", place)
    shutil.copytree(LIBRARY, place / "charts" / "nvshare-sidecar")
    with helm_python.Chart.load(place) as chart:
        yield chart
