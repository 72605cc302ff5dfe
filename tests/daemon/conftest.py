"""Coordinators, clients and event streams that end with the test that made them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.daemon.processes import Coordinators, Holder, Hook, Running


@pytest.fixture
def coordinators() -> Iterator[Coordinators]:
    """In a directory with a short path, for a socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as base:
        made = Coordinators(Path(base))
        yield made
        for running in made.started:
            if running.process.poll() is None:
                running.kill()


@pytest.fixture
def coordinator(coordinators: Coordinators) -> Running:
    """One that runs with the defaults."""
    return coordinators.start()


@pytest.fixture
def connect() -> Iterator[Callable[..., Hook]]:
    """`connect(running, identity=b"")` gives a client."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    made: list[Hook] = []  # a client that is collected as garbage is gone

    def make(running: Running, identity: bytes = b"") -> Hook:
        made.append(Hook(context, running.directory.hooks_socket, identity))
        return made[-1]

    yield make
    context.destroy(0)


@pytest.fixture
def hold() -> Iterator[Callable[..., Holder]]:
    """`hold(running)` starts a client process that wants the lease."""
    made: list[Holder] = []

    def make(running: Running, lease_id: int = 0, gpu: int = 0) -> Holder:
        made.append(Holder(running, lease_id, gpu))
        return made[-1]

    yield make
    for holder in made:
        if holder.process.poll() is None:
            holder.kill()
        for stream in (holder.process.stdin, holder.process.stdout):
            if stream is not None:
                stream.close()
