"""A coordinator with slots, and clients that a test plays by hand."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.daemon.processes import Coordinators, Running


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose sockets fit, and which all users may enter; `nvshare-ctl slot` uses its `slots`."""
    place = Path(tempfile.mkdtemp(prefix="nvp-"))
    place.chmod(0o755)
    monkeypatch.setenv("NVSHARE_SLOTS_DIR", str(place / "slots"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def running(base: Path) -> Iterator[Running]:
    """Two made-up GPUs, slots in base/slots."""
    coordinators = Coordinators(base)
    yield coordinators.start("--slots-dir", str(base / "slots"), gpus=2)
    for each in coordinators.started:
        if each.process.poll() is None:
            each.kill()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """For hooks."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)
