"""Peers of the sockets: their identity, their limits, and the interfaces that the dispatcher needs."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

log: Final = logging.getLogger("nvshare")

_SPARE_DESCRIPTORS: Final = 128
_OTHER_DESCRIPTORS: Final = 256
"""Callers of control.sock, readers of events.sock, and files."""


def possible_connections(max_clients: int) -> int:
    """Raises the limit of open files for so many clients.  Those that are possible; warns if they are fewer."""
    wanted = max_clients + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + _OTHER_DESCRIPTORS  # a socket and a pidfd each
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            wanted = max(16, (soft - _OTHER_DESCRIPTORS) // 2)
            log.warning("limit of %d open files: at most %d clients; raise `ulimit -n`", soft, wanted)
    return wanted


def printable(text: str) -> str:
    """Replaces control characters: a peer chooses the text, and terminals and logs show it."""
    return "".join(c if c.isprintable() else "?" for c in text) or "?"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on peers.  A connection without an accepted first message is cut after `hello_ns`."""

    connections: int = 1100
    connections_per_slot: int = 128
    connections_per_user: int = 1100
    """On the socket that is open to all users: one user cannot take all connections."""
    exempt: frozenset[int] = frozenset()
    """Users without a bound of their own, for whom some connections are `reserved`."""
    reserved: int = 0
    messages_per_s: int = 20_000
    messages_at_once: int = 32
    """Of one user or slot in a turn of the loop."""
    frame_bytes: int = 1024
    hello_ns: int = 10_000_000_000
    queued_bytes: int = 65_536
    remedy: str = "raise max_clients"
    """The operator's way to more connections."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The connecting process as reported by the kernel.  A process outside this PID namespace has id 0.

    `slot` names the slot of the socket; "" is the socket open to all.
    """

    process_id: int
    user_id: int
    slot: str = ""


class Outbox(Protocol):
    """Operations on a client's connection."""

    def send(self, connection: int, frame: bytes) -> None:
        """Queues a frame.  A closed or full connection is reported as gone later."""

    def greeted(self, connection: int) -> None:
        """The peer's `Hello` was accepted: the connection stays open."""

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        """Sends a last frame and cuts the peer.  Its end is not reported; the log gets `text`."""

    def peer(self, connection: int) -> Peer | None:
        """The connecting process; None when the connection is gone."""


class LeaseJournal(Protocol):
    """The operations of a journal that the dispatcher needs."""

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        """Notes the process that may work on this GPU from now on."""

    def forget(self, process_id: int) -> None:
        """Drops the cached facts of a process that has ended."""


class EventSink(Protocol):
    """Readers of trace events."""

    @property
    def wanted(self) -> bool:
        """Whether there are readers: without them tracing costs nothing."""

    def publish(self, sequence: int, at_ns: int, kind: str, values: Mapping[str, Any]) -> None:
        """Queues an event for each reader."""
