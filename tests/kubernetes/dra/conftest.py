"""A node with the driver as a real process; the cluster is a double, the container runtime a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Built
from tests.kubernetes.containerd.fixture import containerd
from tests.kubernetes.containerd.runtime import Containerd
from tests.kubernetes.dra.worker import Worker
from tests.kubernetes.nri.worker import new_worker

__all__ = ["containerd"]


@pytest.fixture
def worker(containerd: Containerd, built: Built) -> Iterator[Worker]:
    """A coordinator with slots, the hook's library, and a driver that is registered."""
    with new_worker(Worker, containerd, built) as made:
        made.start_driver()
        yield made
