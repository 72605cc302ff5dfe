"""The ZeroMQ sockets of control requests and trace events, both ends.

Invariants: only this user and root are served, by the sockets' modes, libzmq's filter and each request's origin.  The
coordinator's side never blocks and has bounded queues.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import zmq

from nvshare.coordinator.daemon.control.api import MAX_REQUEST_BYTES
from nvshare.coordinator.daemon.peers import Peer


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The context of the coordinator's sockets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 64)
    return context


def _listening(context: zmq.Context[zmq.Socket[bytes]], kind: int, frame_bytes: int, queued: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    made.setsockopt(zmq.SNDHWM, queued)
    made.setsockopt(zmq.RCVHWM, queued)
    made.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    made.setsockopt(zmq.BACKLOG, 1024)
    return made


def _bind(bound: zmq.Socket[bytes], path: Path, mode: int) -> None:
    """Binds a socket whose file has its mode from the start.  Raises OSError."""
    before = os.umask(0o777 & ~mode)
    try:
        bound.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.umask(before)


def _peer_of(frame: zmq.Frame) -> Peer | None:
    """The sender.  Peer-Address of an ipc connection is `localhost:UID:GID:PID`, from the kernel."""
    try:
        _, user, _, process = str(frame.get("Peer-Address")).split(":")
        return Peer(process_id=int(process), user_id=int(user))
    except (zmq.ZMQError, ValueError):
        return None


class Waiter:
    """Waits for any of several sockets and descriptors to become readable."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def add(self, source: zmq.Socket[bytes] | int) -> None:
        self._poller.register(source, zmq.POLLIN)

    def remove(self, source: zmq.Socket[bytes] | int) -> None:
        self._poller.unregister(source)

    def wait(self, timeout_ns: int | None) -> set[zmq.Socket[bytes] | int]:
        """Readable sources; empty after the timeout, which is rounded up to milliseconds.  None waits forever."""
        timeout_ms = None if timeout_ns is None else max(0, -(-timeout_ns // 1_000_000))
        return {source for source, _ in self._poller.poll(timeout_ms)}


class ControlListener:
    """The ROUTER socket for nvshare-ctl."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._path = path
        self._users = {0, os.geteuid()}
        self.socket = _listening(context, zmq.ROUTER, MAX_REQUEST_BYTES, 16)
        for user in sorted(self._users):
            self.socket.setsockopt(zmq.IPC_FILTER_UID, user)
        _bind(self.socket, path, 0o600)

    def receive(self, most: int) -> list[tuple[bytes, bytes]]:
        """(return address, request) pairs."""
        requests: list[tuple[bytes, bytes]] = []
        for _ in range(most):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = _peer_of(parts[-1])
            if len(parts) == 2 and peer is not None and peer.user_id in self._users:
                requests.append((parts[0].bytes, parts[1].bytes))
        return requests

    def reply(self, address: bytes, frame: bytes) -> None:
        """Sends a reply; a caller that does not read loses it."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart((address, frame), zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(200)
        self._path.unlink(missing_ok=True)


class EventPublisher:
    """The XPUB socket of trace events.  A slow reader loses events, which `seq` shows."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._path = path
        self._topics: set[bytes] = set()
        self.socket = _listening(context, zmq.XPUB, 64, 20_000)
        self.socket.setsockopt(zmq.IPC_FILTER_UID, 0)
        self.socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        _bind(self.socket, path, 0o600)

    @property
    def wanted(self) -> bool:
        """Whether there are subscribers."""
        return bool(self._topics)

    def read_subscriptions(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frame = self.socket.recv(zmq.NOBLOCK)
                if frame[:1] == b"\x01" and len(self._topics) < 64:
                    self._topics.add(frame[1:])
                elif frame[:1] == b"\x00":
                    self._topics.discard(frame[1:])

    def publish(self, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(200)
        self._path.unlink(missing_ok=True)


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
