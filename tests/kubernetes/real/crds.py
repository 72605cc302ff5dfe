"""The kinds that the chart uses and Kubernetes does not bring: those of Prometheus' operator.

The real definitions are taken from the folder NVSHARE_TEST_CRDS, where there is one; they check every field.  Without
it the kinds are there and take any field, and it is the schemas of tests/chart that check them.

Non-goals: what the chart says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import yaml

from tests.kubernetes.real.control_plane import ControlPlane, Json
from tests.waiting import eventually

FOLDER: Final = "NVSHARE_TEST_CRDS"
_KINDS: Final = {
    "ServiceMonitor": "monitoring.coreos.com",
    "PodMonitor": "monitoring.coreos.com",
    "PrometheusRule": "monitoring.coreos.com",
}


def _definition(kind: str, group: str) -> Json:
    plural = f"{kind.lower()}s"
    anything: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def install_crds(plane: ControlPlane) -> None:
    """Returns when the kinds are served."""
    folder = os.environ.get(FOLDER)
    documents = [_definition(kind, group) for kind, group in _KINDS.items()]
    if folder:
        texts = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.yaml"))]
        documents = [each for text in texts for each in yaml.safe_load_all(text) if each]
    for document in documents:
        reply = plane.admin.apply(document)
        assert reply.status < 300, reply.message
        spec = document["spec"]
        served = next(version["name"] for version in spec["versions"] if version["served"])
        path = f"/apis/{spec['group']}/{served}/{spec['names']['plural']}"
        eventually(lambda path=path: plane.admin.request("GET", path).status == 200, f"{path} is served")  # type: ignore[misc]
