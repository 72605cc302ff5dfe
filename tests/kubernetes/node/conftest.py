"""A Kubernetes node for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Built
from tests.kubernetes.node.processes import Node, new_node


@pytest.fixture
def node(built: Built) -> Iterator[Node]:
    """A kubelet, the library and a coordinator; the test starts the plugin with its options."""
    with new_node(built.hook) as made:
        made.install()
        made.start_coordinator()
        yield made
