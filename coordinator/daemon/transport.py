"""Connections of hooks: plain Unix sockets that speak ZMTP, so that any ZeroMQ DEALER is a hook's equal.

Purpose: turn what the kernel delivers into (connection id, frame) and back, and say which connections ended.
framing.py
is the protocol.

Why not libzmq's ROUTER: each message would wake one more sleeping thread, and that is what a hand-over mostly costs; a
peer that chooses its routing id can abort the process.  docs/decisions/zmtp-framing.md says more.

Invariants:
- Who a peer is comes from the kernel (SO_PEERCRED), never from what it sends.
- A connection id is never reused; every connection that was heard of ends exactly once, unless it was refused.
- Nothing here blocks.  A peer is cut when its queue is full, when it sends too fast, when it breaks the protocol of the
  transport, and when it says nothing at all.

May not go here: what a frame means; the sockets of nvshare-ctl (daemon/control_sockets.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from nvshare.coordinator.protocol import framing

log: Final = logging.getLogger("nvshare")

_CREDENTIALS: Final = struct.Struct("=iII")
_RATE_WINDOW_NS: Final = 1_000_000_000
_READ_BYTES: Final = 2_048
_READY_AT_ONCE: Final = 32
"""Both bound one call of `receive`; what is left makes the descriptor readable again."""
_NAP_S: Final = 0.0001
"""Shorter than it takes a processor to fall into a sleep from which it wakes slowly."""
_LOG_PAUSE_NS: Final = 1_000_000_000
"""Between two log lines about refusals: peers decide how many refusals there are."""
_HOOK_TYPES: Final = frozenset({b"DEALER"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what peers may do.  `hello_ns`: a connection that is not greeted by then is cut."""

    connections: int = 1100
    connections_per_slot: int = 128
    connections_per_user: int = 1100
    """Of one user, by the socket that everybody may use: the others can always connect."""
    messages_per_s: int = 20_000
    frame_bytes: int = 1024
    hello_ns: int = 10_000_000_000
    queued_bytes: int = 65_536


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel says; a process outside this PID namespace has id 0.

    `slot` names the socket that it came by: "" for the one that everybody may use.
    """

    process_id: int
    user_id: int
    slot: str = ""


class Outbox(Protocol):
    """What may be done to a client's connection; the seam between the dispatcher and a transport."""

    def send(self, connection: int, frame: bytes) -> None:
        """Queues a frame.  A connection that is gone, or cannot take it, is reported as gone later."""

    def greeted(self, connection: int) -> None:
        """The peer introduced itself: it may stay."""

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        """A last frame; then the peer is cut.  Its end is not reported any more; `text` says why in the log."""

    def peer(self, connection: int) -> Peer | None:
        """Who it is; None when the connection is gone."""


@dataclass(slots=True, eq=False)
class _Listener:
    socket: socket.socket
    slot: str
    path: Path
    connections: int = 0


@dataclass(slots=True, eq=False)
class _Connection:
    number: int
    socket: socket.socket
    peer: Peer
    protocol: framing.Connection
    listener: _Listener
    outgoing: bytes = b""
    blocked: bool = False
    """The kernel takes no more for now; EPOLLOUT is asked for."""
    heard: bool = False
    """A frame of it was given out, so its end must be told."""
    greeted: bool = False
    window_end_ns: int = 0
    count: int = 0


class HookListener:
    """The listening sockets and their connections.  Implements `Outbox`."""

    def __init__(self, path: Path, mode: int, limits: Limits) -> None:
        """Binds; raises OSError.  Whoever calls this has the directory's lock, so a socket that lies there is stale."""
        self._limits = limits
        self._epoll = select.epoll()
        self._listeners: dict[int, _Listener] = {}
        self._listening: dict[str, _Listener] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._connections: dict[int, _Connection] = {}
        self._deadlines: deque[tuple[int, _Connection]] = deque()
        self._pending: dict[int, _Connection] = {}
        """Connections with something to send that is not blocked."""
        self._gone: list[int] = []
        self._last_number = 0
        self._now_ns = 0
        self._users: Counter[int] = Counter()
        """Connections of each user, those of slots apart."""
        self._log_at_ns = 0
        self.refusals: Counter[str] = Counter(dict.fromkeys(("full", "user", "slot", "silent", "protocol"), 0))
        """Connections that were refused or cut, by reason."""
        self.listen(path, mode)

    def listen(self, path: Path, mode: int, slot: str = "") -> None:
        """One more socket; who comes by it has this `Peer.slot`.  Raises OSError.  Whatever lies there is stale."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o777 & ~mode)  # the mode is in force from the file's first moment
        try:
            listener.bind(str(path))
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(before)
        self._listening[slot] = self._listeners[listener.fileno()] = _Listener(listener, slot, path)
        self._epoll.register(listener, select.EPOLLIN)

    def unlisten(self, slot: str) -> None:
        """Nobody new comes by this slot's socket; who came already stays."""
        listener = self._listening.pop(slot)
        del self._listeners[listener.socket.fileno()]
        self._epoll.unregister(listener.socket)
        listener.socket.close()
        listener.path.unlink(missing_ok=True)

    def slots(self) -> set[str]:
        """Those that are listened for."""
        return {slot for slot in self._listening if slot}

    @property
    def descriptor(self) -> int:
        """Readable when `receive` has something to do."""
        return self._epoll.fileno()

    def __len__(self) -> int:
        return len(self._connections)

    def peer(self, connection: int) -> Peer | None:
        found = self._connections.get(connection)
        return None if found is None else found.peer

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, now_ns: int) -> tuple[list[int], list[tuple[int, bytes]]]:
        """Connections that ended since the last call, and the frames that came.  Each connection is read once, so the
        work of one call is bounded."""
        self._now_ns = now_ns
        frames: list[tuple[int, bytes]] = []
        for descriptor, ready in self._epoll.poll(0, _READY_AT_ONCE):
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                listener = self._listeners.get(descriptor)
                if listener is not None:
                    self._accept(listener)
                continue
            if ready & select.EPOLLOUT:
                connection.blocked = False
                self._epoll.modify(descriptor, select.EPOLLIN)
                self._write(connection)
            if ready & ~select.EPOLLOUT:
                self._read(connection, frames)
        gone, self._gone = self._gone, []
        return gone, frames

    def _accept(self, listener: _Listener) -> None:
        for _ in range(64):
            try:
                accepted, _address = listener.socket.accept()
            except BlockingIOError:
                return
            except OSError:  # the peer gave up already, or no descriptor is left; the next one may be luckier
                return
            accepted.setblocking(False)
            process, user, _ = _CREDENTIALS.unpack(
                accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            peer = Peer(process, user, listener.slot)
            crowded = self._crowded(listener, user)
            if crowded is not None:
                accepted.close()
                self._count_refusal(crowded[0], peer, crowded[1])
                continue
            self._last_number += 1
            protocol = framing.Connection(b"ROUTER", _HOOK_TYPES, self._limits.frame_bytes)
            connection = _Connection(self._last_number, accepted, peer, protocol, listener)
            listener.connections += 1
            if not listener.slot:
                self._users[user] += 1
            self._by_descriptor[accepted.fileno()] = connection
            self._connections[connection.number] = connection
            self._deadlines.append((self._now_ns + self._limits.hello_ns, connection))
            self._epoll.register(accepted, select.EPOLLIN)
            self._reply(connection)

    def _crowded(self, listener: _Listener, user: int) -> tuple[str, str] | None:
        """Why there is no room for one more connection: the reason's name, and a text."""
        limits = self._limits
        if listener.slot and listener.connections >= limits.connections_per_slot:
            return "slot", f"slot {listener.slot} has {listener.connections} connections already"
        if not listener.slot and self._users[user] >= limits.connections_per_user:
            return "user", f"this user has {self._users[user]} connections already; raise max_clients if it needs more"
        if len(self._by_descriptor) >= limits.connections:
            return "full", f"there are {limits.connections} connections already; raise max_clients"
        return None

    def _count_refusal(self, reason: str, peer: Peer, text: str) -> None:
        """The log gets one line a second at most; the metrics have them all."""
        self.refusals[reason] += 1
        if self._now_ns >= self._log_at_ns:
            self._log_at_ns = self._now_ns + _LOG_PAUSE_NS
            total = self.refusals.total()
            line = "process %d (user %d) is refused: %s (%d refusals so far)"
            log.warning(line, peer.process_id, peer.user_id, text, total)

    def _read(self, connection: _Connection, frames: list[tuple[int, bytes]]) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
            return
        try:
            found = connection.protocol.feed(data)
        except framing.ZmtpError:
            self._broken(connection, frames)
            return
        if connection.protocol.reply:
            self._reply(connection)
        if not found:
            return
        connection.count += len(found)
        if self._now_ns >= connection.window_end_ns:
            connection.window_end_ns = self._now_ns + _RATE_WINDOW_NS
            connection.count = len(found)
        elif connection.count > self._limits.messages_per_s:
            self._end(connection)
            return
        connection.heard = True
        number = connection.number
        frames += [(number, content) for content in found]

    def _broken(self, connection: _Connection, frames: list[tuple[int, bytes]]) -> None:
        """What it sends makes no sense.  Once it has shaken hands it is told so: an empty frame, which is no message
        either, leads to its refusal."""
        if not connection.protocol.shaken:
            self._count_refusal("protocol", connection.peer, "its handshake is not ZMTP's")
            self._end(connection)
            return
        self._epoll.modify(connection.socket, 0)
        connection.heard = True
        frames.append((connection.number, b""))

    def stay_awake(self, until_ns: int) -> bool:
        """Waits for something to receive, in naps so short that the processor does not fall asleep in earnest.  False
        when nothing came in time."""
        waited_for = (self._epoll.fileno(),)
        while (left_ns := until_ns - time.monotonic_ns()) > 0:
            if select.select(waited_for, (), (), min(_NAP_S, left_ns / 1e9))[0]:
                return True
        return False

    # --- sending, ending ------------------------------------------------------------------------------------------

    def send(self, connection: int, frame: bytes) -> None:
        target = self._connections.get(connection)
        if target is not None:
            target.outgoing += framing.frame(frame)
            self._pending[connection] = target

    def flush(self) -> None:
        """Hands what is queued to the kernel."""
        if self._pending:
            pending, self._pending = self._pending, {}
            for target in pending.values():
                if not target.blocked:
                    self._write(target)
                elif len(target.outgoing) > self._limits.queued_bytes:
                    self._end(target)

    def _reply(self, connection: _Connection) -> None:
        """What the transport itself has to say, in the midst of reading."""
        connection.outgoing += connection.protocol.reply
        connection.protocol.reply = b""
        self._pending[connection.number] = connection

    def _write(self, connection: _Connection) -> None:
        if connection.number not in self._connections:
            return
        data = connection.outgoing
        try:
            sent = connection.socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._end(connection)
            return
        connection.outgoing = data[sent:] if sent < len(data) else b""
        if connection.outgoing and not connection.blocked:
            if len(connection.outgoing) > self._limits.queued_bytes:
                self._end(connection)
                return
            connection.blocked = True
            self._epoll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)

    def greeted(self, connection: int) -> None:
        target = self._connections.get(connection)
        if target is not None:
            target.greeted = True

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        target = self._connections.get(connection)
        if target is None:
            return
        self._count_refusal("protocol", target.peer, text)
        target.heard = False  # its end is told to nobody
        target.outgoing += framing.frame(frame)
        if not target.blocked:
            self._write(target)
        self._end(target)

    def _end(self, connection: _Connection) -> None:
        """Once; what the kernel has taken still reaches the peer."""
        if self._connections.pop(connection.number, None) is None:
            return
        connection.listener.connections -= 1
        if not connection.listener.slot:
            self._users[connection.peer.user_id] -= 1
            if not self._users[connection.peer.user_id]:
                del self._users[connection.peer.user_id]
        self._pending.pop(connection.number, None)
        del self._by_descriptor[connection.socket.fileno()]
        self._epoll.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        if connection.heard:
            self._gone.append(connection.number)

    @property
    def ended(self) -> bool:
        """Some connections ended outside `receive`; call it soon, it tells."""
        return bool(self._gone)

    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do; None while every peer has introduced itself."""
        while self._deadlines and self._settled(self._deadlines[0][1]):
            self._deadlines.popleft()
        return self._deadlines[0][0] if self._deadlines else None

    def _settled(self, connection: _Connection) -> bool:
        return connection.greeted or connection.number not in self._connections

    def expire(self, now_ns: int) -> None:
        """Cuts the peers whose time to introduce themselves is over."""
        self._now_ns = now_ns
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, connection = self._deadlines.popleft()
            if not self._settled(connection):
                self._count_refusal("silent", connection.peer, "it has not introduced itself in time")
                self._end(connection)

    def close(self) -> None:
        """Hands out what is queued, ends all connections, removes the socket's file."""
        self.flush()
        for connection in list(self._connections.values()):
            self._end(connection)
        for slot in list(self._listening):
            with contextlib.suppress(OSError):
                self.unlisten(slot)
        self._epoll.close()
