"""A hook's end of the wire over a plain Unix socket, and the pieces of ZMTP that a well-behaved peer never sends.

For benchmarks and tests that need a thousand clients in one process at little cost, or a peer that misbehaves below the
level of messages.  What comes is read by the coordinator's own framing; what goes out is put together
here, and so may be wrong.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from nvshare.coordinator.protocol import framing

GREETING: Final = framing.GREETING
_LARGEST: Final = 65_536
_ROUTER: Final = frozenset({b"ROUTER"})
_SHORT_FRAME: Final = 255


def ready(identity: bytes = b"", kind: bytes = b"DEALER") -> bytes:
    """The READY command that ends the handshake."""
    body = b"\x05READY" + _entry(b"Socket-Type", kind) + _entry(b"Identity", identity)
    return b"\x04" + bytes([len(body)]) + body


def frame(content: bytes) -> bytes:
    """A message of one frame."""
    if len(content) <= _SHORT_FRAME:
        return bytes([0, len(content)]) + content
    return b"\x02" + len(content).to_bytes(8, "big") + content


def _entry(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


class Link:
    """One connection."""

    def __init__(self, path: Path, *, identity: bytes = b"") -> None:
        """Connects and shakes hands; a message before the other side's READY would break the protocol."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self.socket.settimeout(60)
        self._protocol = framing.Connection(b"DEALER", _ROUTER, _LARGEST)
        self._protocol.reply = GREETING + ready(identity)
        self._answer()
        while not self._protocol.shaken:
            self.take()

    def send(self, content: bytes) -> None:
        self.socket.sendall(frame(content))

    def take(self) -> list[bytes]:
        """The messages that one read from the socket completes.  Raises ConnectionError when the other side has closed,
        and ZmtpError when it breaks the protocol."""
        received = self.socket.recv(65_536)
        if not received:
            raise ConnectionResetError("closed by the coordinator")
        found = self._protocol.feed(received)
        if self._protocol.reply:
            self._answer()
        return found

    def _answer(self) -> None:
        self.socket.sendall(self._protocol.reply)
        self._protocol.reply = b""

    def close(self) -> None:
        self.socket.close()
