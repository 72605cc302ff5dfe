"""The calling ends of control.sock and events.sock, for nvshare-ctl.  They use ZeroMQ's library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import zmq


class NoCoordinatorError(Exception):
    """No coordinator answers in the directory."""


class ControlCaller:
    """The calling end of control.sock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def call(self, request: bytes, timeout_ms: int = 5_000) -> bytes:
        """The reply.  Raises NoCoordinatorError after the timeout."""
        caller = self._context.socket(zmq.DEALER)
        try:
            caller.setsockopt(zmq.LINGER, 0)
            caller.connect(f"ipc://{self._path}")
            caller.send(request)
            if not caller.poll(timeout_ms):
                raise NoCoordinatorError(f"no answer on {self._path} within {timeout_ms / 1000:g} s")
            return caller.recv()
        finally:
            caller.close()

    def close(self) -> None:
        self._context.term()


class EventReader:
    """The reading end of events.sock."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"ipc://{path}")

    def frames(self, timeout_ms: int | None = None) -> Iterator[bytes]:
        """Frames as they arrive, until the coordinator ends or no frame arrives for `timeout_ms`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while ready := dict(poller.poll(timeout_ms)):
            while self._socket.poll(0):
                yield self._socket.recv()
            if self._monitor in ready:
                return

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()
