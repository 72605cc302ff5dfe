"""A node with the driver as a real process; the cluster is a double, the container runtime a real one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.kubernetes.containerd.fixture import containerd
from tests.kubernetes.containerd.runtime import Containerd
from tests.kubernetes.dra.worker import Worker

__all__ = ["containerd"]


@pytest.fixture
def worker(containerd: Containerd, built: Built) -> Iterator[Worker]:
    """A coordinator with slots, the hook's library, and a driver that is registered."""
    made = Worker(Path(tempfile.mkdtemp(prefix="nvs-")), containerd, built)
    try:
        made.install()
        made.start_coordinator("--slots-dir", str(made.slots_dir), variables={"NVSHARE_POLICY": "fair_share"})
        made.start_driver()
        yield made
    finally:
        made.close()
        shutil.rmtree(made.directory, ignore_errors=True)
