"""A hook's end of the wire without libzmq: ZMTP 3.1 over a plain Unix socket.

For benchmarks and tests that need a thousand clients in one process at little cost, or a peer that misbehaves below the
level of messages.  A real hook uses a DEALER of libzmq; on the wire the two look the same.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

GREETING: Final = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_SHORT_FRAME: Final = 255


def ready(identity: bytes = b"", kind: bytes = b"DEALER") -> bytes:
    """The READY command that ends the handshake."""
    body = b"\x05READY" + _entry(b"Socket-Type", kind) + _entry(b"Identity", identity)
    return b"\x04" + bytes([len(body)]) + body


def frame(content: bytes, *, more: bool = False) -> bytes:
    """One frame of a message."""
    if len(content) <= _SHORT_FRAME:
        return bytes([int(more), len(content)]) + content
    return bytes([2 | int(more)]) + len(content).to_bytes(8, "big") + content


def _entry(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


class Link:
    """One connection.  `take` gives the messages that have come; commands of the transport are passed over."""

    def __init__(self, path: Path, *, identity: bytes = b"") -> None:
        """Connects and shakes hands; a message before the other side's READY would break the protocol."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self.socket.settimeout(30)
        self.socket.sendall(GREETING + ready(identity))
        self._buffer = b""
        self._greeted = False
        self._shaken = False
        while not self._shaken:
            self.take()

    def send(self, content: bytes) -> None:
        self.socket.sendall(frame(content))

    def take(self) -> list[bytes]:
        """Reads once from the socket.  Raises ConnectionError when the other side has closed."""
        received = self.socket.recv(65_536)
        if not received:
            raise ConnectionResetError("closed by the coordinator")
        buffer = self._buffer + received if self._buffer else received
        if not self._greeted:
            if len(buffer) < len(GREETING):
                self._buffer = buffer
                return []
            self._greeted = True
            buffer = buffer[len(GREETING) :]
        found = []
        at = 0
        end = len(buffer)
        while at + 2 <= end:
            flags = buffer[at]
            if flags & 2:
                if at + 9 > end:
                    break
                start, size = at + 9, int.from_bytes(buffer[at + 1 : at + 9], "big")
            else:
                start, size = at + 2, buffer[at + 1]
            if start + size > end:
                break
            if flags & 4:
                self._shaken = True
            else:
                found.append(buffer[start : start + size])
            at = start + size
        self._buffer = buffer[at:]
        return found

    def close(self) -> None:
        self.socket.close()
