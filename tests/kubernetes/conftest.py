"""Fixtures of a Kubernetes node.

May not go here: what a node is (node_rig.py).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Built
from tests.kubernetes.node_rig import Node, new_node


@pytest.fixture
def bare_node(built: Built) -> Iterator[Node]:
    """A kubelet and nothing else."""
    with new_node(built.hook) as node:
        yield node


@pytest.fixture
def node(bare_node: Node) -> Node:
    """With library and coordinator; the plugin is started by the test, with its options."""
    bare_node.install()
    bare_node.start_coordinator()
    return bare_node


@pytest.fixture(scope="session")
def saturate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C program that keeps a GPU busy: SECONDS KERNEL_NS DEPTH (bench/programs/saturate.c)."""
    program = tmp_path_factory.mktemp("programs") / "saturate"
    compiler = os.environ.get("CC", "cc")
    source = str(ROOT / "bench" / "programs" / "saturate.c")
    subprocess.run([compiler, "-std=gnu11", "-O2", "-o", str(program), source, "-ldl"], check=True)
    return program
