"""A coordinator with slots, and clients that a test plays by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.daemon.conftest import coordinators  # noqa: F401 (a fixture)
from tests.daemon.processes import Coordinators, Running


@pytest.fixture
def base(coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A directory whose sockets fit, and which all users may enter; `nvshare-ctl slot` uses its `slots`."""
    coordinators.base.chmod(0o755)
    monkeypatch.setenv("NVSHARE_SLOTS_DIR", str(coordinators.base / "slots"))
    return coordinators.base


@pytest.fixture
def running(coordinators: Coordinators, base: Path) -> Running:  # noqa: F811
    """Two made-up GPUs, slots in base/slots."""
    return coordinators.start("--slots-dir", str(base / "slots"), gpus=2)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """For hooks."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)
