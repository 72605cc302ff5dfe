"""The plugin's connection to a runtime that is late, closes it, or restarts."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.kubernetes.cluster.annotations import Rules
from nvshare.coordinator.kubernetes.cluster.options import Containers
from nvshare.coordinator.kubernetes.nri import messages as m
from nvshare.coordinator.kubernetes.nri.connection import PLUGIN, REQUEST, written
from nvshare.coordinator.kubernetes.nri.plugin import Plugin
from nvshare.coordinator.kubernetes.nri.plugin_main import Link
from tests.waiting import BOUND_S, eventually


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short: sockets must fit into it."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as made:
        yield Path(made)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    made.settimeout(BOUND_S)
    return made


def accepted(listener: socket.socket) -> socket.socket:
    """A connection on which the plugin has registered."""
    connection, _ = listener.accept()
    connection.settimeout(BOUND_S)
    assert b"RegisterPlugin" in connection.recv(4096)
    return connection


def test_it_connects_again(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broken: a plugin that was there before the runtime, or saw it restart, never comes back; or it cannot stop."""
    path = directory / "nri.sock"
    link = Link(path, Plugin(Containers(directory / "slots", directory / "lib"), Rules()))
    thread = threading.Thread(target=link.run)
    thread.start()
    absent = "No such file or directory; containers start without the hook"
    eventually(lambda: absent in caplog.text, "it says that there is no runtime")
    configure = written(PLUGIN, 1, REQUEST, m.Request(method="Configure"))
    for _ in range(2):
        with listening(path) as listener:
            accepted(listener).close()  # a runtime that ends before it has configured the plugin
            with accepted(listener) as connection:
                connection.sendall(configure)
                assert connection.recv(4096)
        path.unlink()
    with listening(path) as listener, accepted(listener) as connection:
        link.stop()
        assert connection.recv(4096) == b""
    thread.join(BOUND_S)
    assert not thread.is_alive()
    assert caplog.text.count(absent) <= 3
