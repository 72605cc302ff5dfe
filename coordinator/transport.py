"""Frames <-> connections over ZeroMQ: the hooks' socket.

Purpose: turn what libzmq delivers into (connection id, frame) and back, and say which connections ended.

Invariants:
- Who a peer is comes from the kernel (SO_PEERCRED through Peer-Address), never from what it sends.
- A connection id is never reused.  It stands for one accepted descriptor and one routing id that libzmq made up: a
  peer that chooses its own routing id is refused, because one that guesses libzmq's next id aborts the process
  (router_t asserts).  libzmq starts that count from rand(), hence the seed in `make_context`.
- Every accepted connection ends exactly once: by the monitor's DISCONNECTED with its descriptor.  A message that is
  read after that belongs to nobody and is dropped, for a dead client must not come back to life.
- Nothing here blocks.  A peer is cut when its queue is full, when it sends too fast, and when it says nothing at all.
- libzmq keeps its descriptors; to cut a peer this shuts the connection down, through a duplicate that was checked to be
  that peer's.

zmq is imported here and in transport_admin.py, nowhere else on this side.

May not go here: what a frame means.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import zmq

_MONITORED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_FIRST: Final = zmq.SNDMORE | zmq.NOBLOCK
_EVENT: Final = struct.Struct("=HI")
_CREDENTIALS: Final = struct.Struct("=iII")
_MUTED_NS: Final = 250_000_000
"""How long a refused peer's connection is kept, so that the refusal reaches it."""
_REMEMBERED: Final = 16_384
"""Ended connections whose late frames are told from new ones; libzmq gives no id twice."""
_RATE_WINDOW_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what peers may do.  `hello_ns`: a connection that is not greeted by then is cut."""

    connections: int = 1100
    messages_per_s: int = 20_000
    frame_bytes: int = 1024
    hello_ns: int = 10_000_000_000
    queued_messages: int = 1000


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel says; a process outside this PID namespace has id 0."""

    process_id: int
    user_id: int


class Outbox(Protocol):
    """What may be done to a client's connection; the seam between the dispatcher and a transport."""

    def send(self, connection: int, frame: bytes) -> None:
        """Queues a frame.  A connection that is gone, or cannot take it, is reported as gone later."""

    def greeted(self, connection: int) -> None:
        """The peer introduced itself: it may stay."""

    def refuse(self, connection: int, frame: bytes) -> None:
        """A last frame; then the peer is ignored and cut.  Its end is not reported any more."""

    def peer(self, connection: int) -> Peer | None:
        """Who it is; None when the connection is gone."""


@dataclass(slots=True)
class _Connection:
    number: int
    routing_id: bytes
    descriptor: int
    peer: Peer
    window_end_ns: int = 0
    count: int = 0


@dataclass(slots=True)
class _Accepted:
    """One open descriptor of libzmq's."""

    serial: int
    process_id: int | None
    connection: _Connection | None = None
    greeted: bool = False


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context whose ROUTERs count routing ids from an unpredictable start."""
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 64)
    return context


class HookListener:
    """ROUTER for hooks, with its monitor.  Implements `Outbox`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, mode: int, limits: Limits) -> None:
        self._limits = limits
        self._context = context
        self._path = path
        self._socket = listening(context, zmq.ROUTER, limits.frame_bytes, limits.queued_messages)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full monitor would block libzmq's thread
        address = f"inproc://hooks-monitor-{id(self)}"
        self._socket.monitor(address, _MONITORED)
        self._monitor.connect(address)
        self._accepted: dict[int, _Accepted] = {}
        self._by_routing_id: dict[bytes, _Connection] = {}
        self._connections: dict[int, _Connection] = {}
        self._past: dict[bytes, None] = {}  # routing ids of ended connections, oldest first
        self._deadlines: deque[tuple[int, int, int]] = deque()
        self._cuts: deque[tuple[int, int, int]] = deque()
        self._gone: list[int] = []
        self._outgoing: list[tuple[_Connection, bytes]] = []
        self._last_number = 0
        self._serial = 0
        self._now_ns = 0
        self.refused = 0
        bind(self._socket, path, mode)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What the loop waits on."""
        return self._socket, self._monitor

    def __len__(self) -> int:
        return len(self._connections)

    def peer(self, connection: int) -> Peer | None:
        found = self._connections.get(connection)
        return None if found is None else found.peer

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, now_ns: int, most: int) -> tuple[list[int], list[tuple[int, bytes]], bool]:
        """Connections that ended since the last call, up to `most` frames, and whether there may be more."""
        self._now_ns = now_ns
        self._read_monitor()
        frames: list[tuple[int, bytes]] = []
        receive = self._socket.recv
        known = self._by_routing_id
        more = True
        for _ in range(most):
            try:
                routing_id = receive(zmq.NOBLOCK)
            except zmq.Again:
                more = False
                break
            frame = receive(copy=False)
            connection = known.get(routing_id) or self._admit(routing_id, frame)
            whole = not frame.more or self._skip_parts()
            if connection is None:
                continue
            connection.count += 1
            if now_ns >= connection.window_end_ns:
                connection.window_end_ns = now_ns + _RATE_WINDOW_NS
                connection.count = 1
            elif connection.count > self._limits.messages_per_s:
                self._cut_connection(connection)
                continue
            frames.append((connection.number, frame.bytes if whole else b""))
        gone, self._gone = self._gone, []
        return gone, frames, more

    def _skip_parts(self) -> bool:
        """Discards the rest of a message of several parts.  The empty frame that stands for it breaks the protocol."""
        while self._socket.recv(copy=False).more:
            pass
        return False

    def _admit(self, routing_id: bytes, frame: zmq.Frame) -> _Connection | None:
        """The connection of a routing id that was not seen before; None when it must not be heard."""
        if routing_id in self._past:
            return None
        peer = peer_of(frame)
        if peer is None:  # an old version of ZMTP, which no hook speaks; it is cut for its silence
            return None
        descriptor = int(frame.get(zmq.SRCFD))
        accepted = self._accepted.get(descriptor)
        if accepted is None:  # accepted after the monitor was read, or ended already
            self._read_monitor()
            accepted = self._accepted.get(descriptor)
        if accepted is None or accepted.process_id not in (None, peer.process_id):
            return None
        if len(routing_id) != 5 or routing_id[0] != 0:
            self.refused += 1
            self._cut(descriptor, accepted)
            return None
        if accepted.connection is not None:  # the descriptor was used before; has that end been seen?
            self._read_monitor()
            accepted = self._accepted.get(descriptor)
            if accepted is None:
                return None
            if (other := accepted.connection) is not None:  # two connections of one process: the later one is open
                if _count_between(other.routing_id, routing_id) >= 1 << 31:
                    return None
                self._forget(other, report=True)
        self._last_number += 1
        connection = _Connection(self._last_number, routing_id, descriptor, peer)
        accepted.connection = connection
        self._by_routing_id[routing_id] = connection
        self._connections[connection.number] = connection
        return connection

    def _read_monitor(self) -> None:
        while True:
            try:
                header = self._monitor.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._monitor.recv()  # the end point
            event, descriptor = _EVENT.unpack(header)
            if event == zmq.EVENT_ACCEPTED:
                self._opened(descriptor)
            elif (ended := self._accepted.pop(descriptor, None)) is not None and ended.connection is not None:
                self._forget(ended.connection, report=True)

    def _opened(self, descriptor: int) -> None:
        self._serial += 1
        self._accepted[descriptor] = _Accepted(self._serial, _process_at(descriptor))
        if len(self._accepted) > self._limits.connections:
            self.refused += 1
            self._cuts.appendleft((self._now_ns, descriptor, self._serial))
            return
        self._deadlines.append((self._now_ns + self._limits.hello_ns, descriptor, self._serial))

    def _forget(self, connection: _Connection, *, report: bool) -> None:
        if self._connections.pop(connection.number, None) is not None:
            del self._by_routing_id[connection.routing_id]
            self._past[connection.routing_id] = None
            if len(self._past) > _REMEMBERED:
                del self._past[next(iter(self._past))]
            if report:
                self._gone.append(connection.number)

    # --- sending, ending ------------------------------------------------------------------------------------------

    def send(self, connection: int, frame: bytes) -> None:
        target = self._connections.get(connection)
        if target is not None:
            self._outgoing.append((target, frame))

    def flush(self) -> None:
        """Hands queued frames to libzmq together: the first wakes its thread, which costs more than all the rest."""
        if not self._outgoing:
            return
        outgoing, self._outgoing = self._outgoing, []
        send = self._socket.send
        for target, frame in outgoing:
            try:
                send(target.routing_id, _FIRST)
                send(frame, zmq.NOBLOCK)
            except zmq.Again:  # it has not read a thousand messages
                self._cut_connection(target)
            except zmq.ZMQError:  # EHOSTUNREACH: it is gone
                self._ended(target)

    def greeted(self, connection: int) -> None:
        target = self._connections.get(connection)
        if target is not None and (accepted := self._accepted.get(target.descriptor)) is not None:
            accepted.greeted = True

    def refuse(self, connection: int, frame: bytes) -> None:
        target = self._connections.get(connection)
        if target is None:
            return
        self.refused += 1
        self.send(connection, frame)
        self._forget(target, report=False)
        if (accepted := self._accepted.get(target.descriptor)) is not None:
            self._cuts.append((self._now_ns + _MUTED_NS, target.descriptor, accepted.serial))

    def _cut_connection(self, connection: _Connection) -> None:
        self._forget(connection, report=True)
        accepted = self._accepted.get(connection.descriptor)
        if accepted is not None and accepted.connection is connection:  # not the descriptor's next owner
            self._cut(connection.descriptor, accepted)

    def _ended(self, connection: _Connection) -> None:
        """libzmq knows the connection no more.  If its descriptor is open, that belongs to a later one of the process,
        for which this one's last frames were taken: it has yet to introduce itself."""
        self._forget(connection, report=True)
        accepted = self._accepted.get(connection.descriptor)
        if accepted is not None and accepted.connection is connection:
            accepted.connection = None
            accepted.greeted = False
            self._deadlines.append((self._now_ns + self._limits.hello_ns, connection.descriptor, accepted.serial))

    def _cut(self, descriptor: int, accepted: _Accepted) -> None:
        """Shuts the connection down; libzmq then closes it and the monitor says so.

        libzmq may have closed the descriptor already, and given it to a new connection.  But it says so before it does:
        what the monitor does not know to be over once the duplicate exists, the duplicate is of.
        """
        with contextlib.suppress(OSError), _duplicate(descriptor) as duplicate:
            self._read_monitor()
            if self._accepted.get(descriptor) is accepted and duplicate.family == socket.AF_UNIX:
                duplicate.shutdown(socket.SHUT_RDWR)

    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do; None while every peer has introduced itself."""
        while self._deadlines and self._settled(*self._deadlines[0][1:]):
            self._deadlines.popleft()
        times = [queue[0][0] for queue in (self._deadlines, self._cuts) if queue]
        return min(times, default=None)

    def _settled(self, descriptor: int, serial: int) -> bool:
        accepted = self._accepted.get(descriptor)
        return accepted is None or accepted.serial != serial or accepted.greeted

    def expire(self, now_ns: int) -> None:
        """Cuts the peers whose time is over."""
        self._now_ns = now_ns
        for queue in (self._deadlines, self._cuts):
            while queue and queue[0][0] <= now_ns:
                _, descriptor, serial = queue.popleft()
                accepted = self._accepted.get(descriptor)
                if accepted is not None and accepted.serial == serial and (queue is self._cuts or not accepted.greeted):
                    self._cut(descriptor, accepted)

    def close(self) -> None:
        """Lets queued frames go out for a moment, then removes the socket's file."""
        self.flush()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(200)
        self._path.unlink(missing_ok=True)


def listening(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, frame_bytes: int, queued: int
) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    made.setsockopt(zmq.SNDHWM, queued)
    made.setsockopt(zmq.RCVHWM, queued)
    made.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    made.setsockopt(zmq.BACKLOG, 1024)
    return made


def bind(bound: zmq.Socket[bytes], path: Path, mode: int) -> None:
    """Binds with the mode in force from the file's first moment."""
    before = os.umask(0o777 & ~mode)
    try:
        bound.bind(f"ipc://{path}")
    finally:
        os.umask(before)


def peer_of(frame: zmq.Frame) -> Peer | None:
    """Peer-Address of an ipc connection is `localhost:UID:GID:PID`, written by the kernel."""
    try:
        _, user, _, process = str(frame.get("Peer-Address")).split(":")
        return Peer(process_id=int(process), user_id=int(user))
    except (zmq.ZMQError, ValueError):
        return None


def _count_between(earlier: bytes, later: bytes) -> int:
    """Distance of two routing ids that libzmq made up: a zero byte and a 32-bit counter."""
    return (int.from_bytes(later[1:], "big") - int.from_bytes(earlier[1:], "big")) % (1 << 32)


def _duplicate(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _credentials(connection: socket.socket) -> int:
    process, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(process)


def _process_at(descriptor: int) -> int | None:
    """The process at the other end of an accepted descriptor; None when it is closed already."""
    try:
        with _duplicate(descriptor) as duplicate:
            return _credentials(duplicate)
    except OSError:
        return None
