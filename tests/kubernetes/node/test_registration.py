"""Registration when a kubelet restarts under it, step by step.

Non-goals: a whole node (test_node.py).
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nvshare.coordinator.kubernetes.node.allocation import Answer
from nvshare.coordinator.kubernetes.node.plugin import PluginServer
from nvshare.coordinator.kubernetes.node.registration import Registrar
from tests.kubernetes.node.kubelet import Kubelet
from tests.waiting import eventually

NAME = "nvshare.com/gpu"


class Slots:
    """Two devices."""

    name = NAME

    def devices(self) -> list[tuple[str, bool]]:
        return [("a", True), ("b", True)]

    def preferred(self, available: object, must_include: object, size: int) -> list[str]:
        return []

    def allocate(self, field: str, device_ids: object) -> Answer:
        return Answer({})

    starts = False

    def start(self, device_ids: object) -> None:
        raise AssertionError


class Interrupted(PluginServer):
    """Before it is started for the second time, the kubelet that has emptied the directory makes its new socket."""

    def __init__(self, kubelet: Kubelet) -> None:
        super().__init__(Slots(), kubelet.plugins / "slots.sock", lambda resource, outcome: None)
        self._kubelet = kubelet
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        if self.starts == 2:
            self._kubelet.stop()
            self._kubelet.start()
        super().start()


@contextmanager
def running(kubelet: Kubelet, server: PluginServer) -> Iterator[Registrar]:
    """A registrar in a thread."""
    wake, end = os.pipe()
    registrar = Registrar(kubelet.plugins, server, wake, lambda resource, outcome: None)
    thread = threading.Thread(target=registrar.run)
    thread.start()
    try:
        yield registrar
    finally:
        os.write(end, b"\0")
        thread.join()
        os.close(wake)
        os.close(end)


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    """One that runs, in a directory whose name leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="nvk-") as directory:
        made = Kubelet(Path(directory))
        made.start()
        yield made
        made.stop()


def test_the_new_kubelet_is_not_left_again(kubelet: Kubelet) -> None:
    """A kubelet empties its directory before it makes its socket, so the plugin may notice the first and reach the
    second.  To register once more, on yet another socket, would fail the pods that it is just starting."""  # fmt: skip
    server = Interrupted(kubelet)
    wake, end = os.pipe()
    registrar = Registrar(kubelet.plugins, server, wake, lambda resource, outcome: None)
    try:
        registrar._turn(0)
        server.path.unlink()
        registrar._turn(1)  # sees the old kubelet's socket, and registers with the new one
        for now_ns in (2, 3):
            registrar._turn(now_ns)
            assert registrar.connected
        assert (server.starts, kubelet.registrations) == (2, [NAME] * 2)
        kubelet.await_devices(NAME, 2)
    finally:
        server.stop()
        os.close(wake)
        os.close(end)


def test_a_socket_that_another_file_replaces_is_made_anew(kubelet: Kubelet) -> None:
    """Broken: the plugin looks registered, and no pod of its resource starts until somebody restarts it."""
    server = PluginServer(Slots(), kubelet.plugins / "slots.sock", lambda resource, outcome: None)
    with running(kubelet, server) as registrar:
        eventually(lambda: registrar.connected, "registered")
        kubelet.await_devices(NAME, 2)
        other = kubelet.plugins / "other"
        other.touch()
        other.rename(server.path)
        eventually(server.path.is_socket, "its socket is back")
        eventually(lambda: kubelet.registrations == [NAME] * 2 and registrar.connected, "registered again")
        kubelet.await_devices(NAME, 2)
        kubelet.admit("pod", {NAME: 1})


def test_a_kubelet_that_is_only_slow_is_not_registered_with_twice(kubelet: Kubelet) -> None:
    """Each registration makes the kubelet drop what it had: once is enough."""
    server = PluginServer(Slots(), kubelet.plugins / "slots.sock", lambda resource, outcome: None)
    with running(kubelet, server) as registrar:
        eventually(lambda: registrar.connected, "registered")
        for number in range(3):
            (kubelet.plugins / f"other-{number}").touch()
        kubelet.await_devices(NAME, 2)
    assert kubelet.registrations == [NAME]


def test_a_stream_that_begins_while_the_server_ends_does_not_hold_it(kubelet: Kubelet) -> None:
    """It would delay the end, and with it the next registration, by the whole grace."""
    server = PluginServer(Slots(), kubelet.plugins / "slots.sock", lambda resource, outcome: None)
    server.start()
    early = server._list_and_watch(0, Context())
    server.stop()
    late = server._list_and_watch(0, Context())
    assert list(late) == []
    assert list(early) == []


class Context:
    """A call that nobody cancels."""

    def add_callback(self, callback: object) -> bool:
        return True
