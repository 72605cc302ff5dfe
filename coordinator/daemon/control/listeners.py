"""The coordinator's ends of control.sock and events.sock.

Invariants: a peer's user comes from the kernel.  Calls never block.  Connections and queues are bounded, for each user
and in all; root and the coordinator's user always get a connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nvshare.coordinator.daemon.control.api import MAX_REQUEST_BYTES, encode_event
from nvshare.coordinator.daemon.peers import Limits, Peer
from nvshare.coordinator.daemon.transport import PeerListener

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.control.rights import Rights

_REPLY_BYTES: Final = 16 << 20
"""Longest unread reply; a status of 10,000 clients."""


def _limits(rights: Rights, frame_bytes: int, queued_bytes: int) -> Limits:
    return Limits(
        connections=48,
        connections_per_user=12,
        exempt=rights.operators,
        reserved=12,
        messages_per_s=100,
        messages_at_once=4,
        frame_bytes=frame_bytes,
        queued_bytes=queued_bytes,
        remedy="end some calls of nvshare-ctl",
    )


class ControlListener(PeerListener):
    """The socket for requests of nvshare-ctl."""

    def __init__(self, path: Path, mode: int, rights: Rights) -> None:
        super().__init__(path, mode, _limits(rights, MAX_REQUEST_BYTES, _REPLY_BYTES))
        self._rights = rights

    def take(self, now_ns: int) -> list[tuple[int, Peer, bytes]]:
        """(connection, peer, request); a few of each user."""
        found = []
        for connection, frame in self.receive(now_ns)[1]:
            peer = self.peer(connection)
            if peer is not None:
                self.greeted(connection)
                found.append((connection, peer, frame))
        return found


class EventPublisher(PeerListener):
    """The socket of trace events.  A slow reader loses events, which `seq` shows."""

    def __init__(self, path: Path, mode: int, rights: Rights) -> None:
        super().__init__(path, mode, _limits(rights, 64, 1 << 16), b"PUB")
        self._rights = rights
        self._readers: dict[int, int] = {}  # connection -> user

    @property
    def wanted(self) -> bool:
        """Whether there are readers."""
        return bool(self._readers)

    def read_subscriptions(self, now_ns: int) -> None:
        """Handles new and ended readers.  Every subscription is one to all events."""
        gone, frames = self.receive(now_ns)
        for connection, frame in frames:
            peer = self.peer(connection)
            if peer is not None and frame[:1] == b"\x01":
                self._readers[connection] = peer.user_id
                self.greeted(connection)
        for connection in gone:
            self._readers.pop(connection, None)

    def publish(self, sequence: int, at_ns: int, kind: str, values: Mapping[str, Any]) -> None:
        """Queues an event for each reader, without names where the reader must not see them."""
        frame = hidden = encode_event(sequence, at_ns, kind, values)
        if self._rights.hide_other_users:
            hidden = encode_event(sequence, at_ns, kind, self._rights.hidden_event(kind, values))
        for connection, user_id in self._readers.items():
            self.offer(connection, frame if self._rights.is_operator(user_id) else hidden)
