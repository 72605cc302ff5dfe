"""Listening Unix sockets with ZMTP framing (protocol/framing.py), open to any ZeroMQ peer of the right type.

Reasons against libzmq's ROUTER are in docs/decisions/zmtp-framing.md.

Invariants:
- A peer's identity comes from the kernel (SO_PEERCRED), never from its messages.
- A greeted connection ends with the process that made it, whichever children have inherited its descriptor.
- Connection ids are never reused.  The end of each reported connection is reported once, except after a refusal.
- Calls never block.  A peer is cut for a full queue, a protocol error, or silence after connecting.
- Owners, which are users and slots, are read in turn: one call of `receive` takes a bounded number of messages from
  each, so a flood of one owner delays no other.  An owner is read again once its messages are handed out.
- An owner's messages in a second are bounded too: beyond that, its connections that send the most are cut.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nvshare.coordinator.daemon.peers import Limits, Peer
from nvshare.coordinator.protocol import framing
from nvshare.coordinator.system.processes import peer_of

log: Final = logging.getLogger("nvshare")

_RATE_WINDOW_NS: Final = 1_000_000_000
_READ_BYTES: Final = 2_048
_READY_AT_ONCE: Final = 4096
_NAP_S: Final = 0.0001
"""Short enough that the processor does not enter a deep idle state."""
_LOG_PAUSE_NS: Final = 1_000_000_000
"""Least time between two log lines about refusals: peers could otherwise flood the log."""
_PEER_TYPES: Final = {b"ROUTER": frozenset({b"DEALER"}), b"PUB": frozenset({b"SUB"})}


@dataclass(slots=True, eq=False)
class _Listener:
    socket: socket.socket
    slot: str
    path: Path


@dataclass(slots=True, eq=False)
class _Owner:
    """A user, or a slot, with all of its connections."""

    connections: int = 0
    window_end_ns: int = 0
    count: int = 0
    """Messages and commands in the present window."""
    taken: int = 0
    """Messages and commands that the present call of `receive` has read; at the bound while `unread` holds some."""
    unread: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Messages that `receive` has not handed out."""


@dataclass(slots=True, eq=False)
class _Connection:
    number: int
    socket: socket.socket
    peer: Peer
    protocol: framing.Connection
    owner: _Owner
    outgoing: bytes = b""
    blocked: bool = False
    """The send buffer is full; EPOLLOUT is registered."""
    heard: bool = False
    """The caller has received a frame of this connection and must learn of its end."""
    process: int = -1
    """The pidfd of the peer, once it is greeted."""
    window_end_ns: int = 0
    count: int = 0


class PeerListener:
    """The listening sockets and their connections.  Implements `Outbox`."""

    def __init__(self, path: Path, mode: int, limits: Limits, role: bytes = b"ROUTER") -> None:
        """Binds the socket.  The caller holds the directory's lock, so an existing file is stale.  Raises OSError.

        `role` is the ZeroMQ type of this end.
        """
        self._limits = limits
        self._role = role
        self._epoll = select.epoll()
        self._listeners: dict[int, _Listener] = {}
        self._listening: dict[str, _Listener] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._connections: dict[int, _Connection] = {}
        self._deadlines: dict[int, int] = {}
        """By connection without `Hello`, the earliest first."""
        self._pending: dict[int, _Connection] = {}
        """Connections with data to send that are not blocked."""
        self._gone: list[int] = []
        self._last_number = 0
        self._now_ns = 0
        self._owners: dict[str | int, _Owner] = {}
        """By slot or user id; those with connections."""
        self._busy: dict[_Owner, None] = {}
        """Owners with messages that are not handed out."""
        self._first = 0
        self._log_at_ns = 0
        self._spare = Path(os.devnull).open("rb")  # noqa: SIM115 - stays open
        self.refusals: Counter[str] = Counter(dict.fromkeys(("full", "user", "slot", "silent", "protocol"), 0))
        """Connections that were refused or cut, by reason."""
        self.listen(path, mode)

    def listen(self, path: Path, mode: int, slot: str = "") -> None:
        """Opens one more socket; its peers get this `Peer.slot`.  An existing file is stale.  Raises OSError."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o777 & ~mode)  # the file has its mode from the start
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
        """Closes this slot's socket.  Its open connections stay."""
        listener = self._listening.pop(slot)
        del self._listeners[listener.socket.fileno()]
        self._epoll.unregister(listener.socket)
        listener.socket.close()
        listener.path.unlink(missing_ok=True)

    def slots(self) -> set[str]:
        """Slots with a listening socket."""
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
        """Connections that ended since the last call, and new frames.  Reads each connection once, to bound a call."""
        self._now_ns = now_ns
        ready_ones = self._epoll.poll(0, _READY_AT_ONCE)
        self._first = (self._first + 1) % max(1, len(ready_ones))  # where one owner's connections have their turn
        for descriptor, ready in ready_ones[self._first :] + ready_ones[: self._first]:
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                listener = self._listeners.get(descriptor)
                if listener is not None:
                    self._accept(listener)
                continue
            if descriptor == connection.process:
                self._process_ended(connection)
                continue
            if ready & select.EPOLLOUT:
                connection.blocked = False
                self._epoll.modify(descriptor, select.EPOLLIN)
                self._write(connection)
            if ready & ~select.EPOLLOUT and connection.owner.taken < self._limits.messages_at_once:
                self._read(connection)
        gone, self._gone = self._gone, []
        frames: list[tuple[int, bytes]] = []
        for owner in list(self._busy):
            frames += [owner.unread.popleft() for _ in range(min(self._limits.messages_at_once, len(owner.unread)))]
            owner.taken = self._limits.messages_at_once if owner.unread else 0  # what came first is handed out first
            if not owner.unread:
                del self._busy[owner]
        return gone, frames

    def _accept(self, listener: _Listener) -> None:
        for _ in range(64):
            try:
                accepted, _address = listener.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # else the peer is gone already
                    self._refuse_one(listener)
                return
            accepted.setblocking(False)
            process, user = peer_of(accepted)
            peer = Peer(process, user, listener.slot)
            owner = self._owners.get(listener.slot or user) or _Owner()
            crowded = self._crowded(listener, user, owner.connections)
            if crowded is not None:
                accepted.close()
                self._count_refusal(crowded[0], peer, crowded[1])
                continue
            self._last_number += 1
            protocol = framing.Connection(self._role, _PEER_TYPES[self._role], self._limits.frame_bytes)
            connection = _Connection(self._last_number, accepted, peer, protocol, owner)
            owner.connections += 1
            self._owners[listener.slot or user] = owner
            self._by_descriptor[accepted.fileno()] = connection
            self._connections[connection.number] = connection
            self._deadlines[connection.number] = self._now_ns + self._limits.hello_ns
            self._epoll.register(accepted, select.EPOLLIN)
            self._reply(connection)

    def _refuse_one(self, listener: _Listener) -> None:
        """Without a free descriptor: refuses a peer by the spare one, because it would wake the loop for ever."""
        self._spare.close()
        with contextlib.suppress(OSError):
            accepted, _ = listener.socket.accept()
            peer = Peer(*peer_of(accepted), listener.slot)
            accepted.close()
            self._spare = Path(os.devnull).open("rb")  # noqa: SIM115 - stays open
            self._count_refusal("full", peer, "this process has no free descriptor")

    def _crowded(self, listener: _Listener, user: int, present: int) -> tuple[str, str] | None:
        """Name and text of the limit that forbids one more connection; None when there is room."""
        limits, exempt = self._limits, user in self._limits.exempt
        if listener.slot and present >= limits.connections_per_slot:
            return "slot", f"slot {listener.slot} already has {present} connections"
        if not (listener.slot or exempt) and present >= limits.connections_per_user:
            return "user", f"this user already has {present} connections; {limits.remedy} for more"
        if len(self._connections) >= limits.connections - (0 if exempt else limits.reserved):
            return "full", f"all {limits.connections} connections are in use; {limits.remedy}"
        return None

    def _count_refusal(self, reason: str, peer: Peer, text: str) -> None:
        """Counts a refusal, and logs at most one a second."""
        self.refusals[reason] += 1
        if self._now_ns >= self._log_at_ns:
            self._log_at_ns = self._now_ns + _LOG_PAUSE_NS
            total = self.refusals.total()
            log.warning(
                "refused process %d (user %d): %s (%d refusals so far)", peer.process_id, peer.user_id, text, total
            )

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
            return
        owner, protocol = connection.owner, connection.protocol
        self._busy[owner] = None
        before = protocol.frames
        try:
            found = protocol.feed(data)
        except framing.ZmtpError:
            self._broken(connection)
            return
        if protocol.reply:
            self._reply(connection)
        count = protocol.frames - before
        owner.taken += max(1, count)
        if self._sends_too_much(connection, count):
            self._end(connection)
        elif found:
            connection.heard = True
            owner.unread += [(connection.number, content) for content in found]

    def _sends_too_much(self, connection: _Connection, count: int) -> bool:
        """Whether its owner exceeds the bound, and this connection at least its part of it."""
        owner, most = connection.owner, self._limits.messages_per_s
        if self._now_ns >= owner.window_end_ns:
            owner.window_end_ns, owner.count = self._now_ns + _RATE_WINDOW_NS, 0
        if connection.window_end_ns != owner.window_end_ns:
            connection.window_end_ns, connection.count = owner.window_end_ns, 0
        owner.count += count
        connection.count += count
        return owner.count > most and connection.count * owner.connections > most

    def _broken(self, connection: _Connection) -> None:
        """Cuts a peer that breaks the framing.  After its handshake, an empty frame makes the dispatcher refuse it
        with a message."""
        if not connection.protocol.shaken:
            self._count_refusal("protocol", connection.peer, "its handshake is not ZMTP")
            self._end(connection)
            return
        self._epoll.modify(connection.socket, 0)
        connection.heard = True
        connection.owner.unread.append((connection.number, b""))

    def stay_awake(self, until_ns: int) -> bool:
        """Polls for input in short naps, which keep the processor out of deep idle states.  False on timeout."""
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

    def offer(self, connection: int, frame: bytes) -> None:
        """As `send`, but drops the frame where the queue is full."""
        target = self._connections.get(connection)
        if target is not None and len(target.outgoing) + len(frame) < self._limits.queued_bytes:
            self.send(connection, frame)

    def flush(self) -> None:
        """Sends the queued frames."""
        if self._pending:
            pending, self._pending = self._pending, {}
            for target in pending.values():
                if not target.blocked:
                    self._write(target)
                elif len(target.outgoing) > self._limits.queued_bytes:
                    self._end(target)

    def _reply(self, connection: _Connection) -> None:
        """Queues the transport's own answer."""
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
        if target is None or self._deadlines.pop(connection, None) is None:
            return
        with contextlib.suppress(OSError):  # it has ended, which its socket tells, or cannot be watched
            target.process = os.pidfd_open(target.peer.process_id)
            self._by_descriptor[target.process] = target
            self._epoll.register(target.process, select.EPOLLIN)

    def _process_ended(self, connection: _Connection) -> None:
        """What the process has sent is still read; its end follows, even if a child keeps the descriptor."""
        self._unwatch(connection)
        connection.socket.shutdown(socket.SHUT_RD)

    def _unwatch(self, connection: _Connection) -> None:
        if connection.process >= 0:
            del self._by_descriptor[connection.process]
            os.close(connection.process)  # leaves the epoll set, too
            connection.process = -1

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        target = self._connections.get(connection)
        if target is None:
            return
        self._count_refusal("protocol", target.peer, text)
        target.heard = False  # the end of a refused connection is not reported
        target.outgoing += framing.frame(frame)
        if not target.blocked:
            self._write(target)
        self._end(target)

    def _end(self, connection: _Connection) -> None:
        """Closes a connection, once.  Data already in the kernel still reaches the peer."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._deadlines.pop(connection.number, None)
        connection.owner.connections -= 1
        if not connection.owner.connections:
            self._owners.pop(connection.peer.slot or connection.peer.user_id, None)
        self._pending.pop(connection.number, None)
        self._unwatch(connection)
        del self._by_descriptor[connection.socket.fileno()]
        self._epoll.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        if connection.heard:
            self._gone.append(connection.number)

    @property
    def pending(self) -> bool:
        """Whether `receive` has something to hand out without reading."""
        return bool(self._gone or self._busy)

    def next_deadline_ns(self) -> int | None:
        """Earliest deadline of a peer without `Hello`; None without such peers."""
        return next(iter(self._deadlines.values()), None)

    def expire(self, now_ns: int) -> None:
        """Cuts peers that have not sent `Hello` in time."""
        self._now_ns = now_ns
        while (due_ns := self.next_deadline_ns()) is not None and due_ns <= now_ns:
            connection = self._connections[next(iter(self._deadlines))]
            self._count_refusal("silent", connection.peer, "it sent no Hello in time")
            self._end(connection)

    def close(self) -> None:
        """Sends the queued frames, ends all connections and removes the sockets' files."""
        self.flush()
        for connection in list(self._connections.values()):
            self._end(connection)
        for slot in list(self._listening):
            with contextlib.suppress(OSError):
                self.unlisten(slot)
        self._spare.close()
        self._epoll.close()
