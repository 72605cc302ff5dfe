"""A worker node of a cluster for the tests of the plugin; the runtime is a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Built
from tests.kubernetes.containerd.fixture import containerd
from tests.kubernetes.containerd.runtime import Containerd
from tests.kubernetes.nri.worker import Worker, new_worker

__all__ = ["containerd"]


@pytest.fixture
def worker(containerd: Containerd, built: Built) -> Iterator[Worker]:
    """A coordinator with slots, the hook's library, and a plugin that is connected."""
    with new_worker(Worker, containerd, built) as made:
        made.start_plugin()
        yield made
