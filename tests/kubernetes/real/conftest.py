"""Fixtures of a real control plane; without its programs these tests are skipped, which is what CI does.

Non-goals: what a control plane or a node is (control_plane.py, real_node.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.real.control_plane import ASSETS, ControlPlane, control_plane, program


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for all tests: each works in namespaces of its own."""
    missing = [name for name in ("etcd", "kube-apiserver") if program(ASSETS, name) is None]
    if missing:
        pytest.skip(f"{ASSETS} names no folder with {' and '.join(missing)}; see docs/reference/kubernetes-tested.md")
    with control_plane(tmp_path_factory.mktemp("plane")) as made:
        yield made
