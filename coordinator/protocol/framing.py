"""ZMTP 3.1, ZeroMQ's wire protocol, with the NULL mechanism: one end of a connection, without I/O.

The hooks' socket speaks ZMTP over plain Unix sockets, so that any ZeroMQ DEALER can be a client
(docs/decisions/zmtp-framing.md).  The hook's link.c is the C side.  Protocol: https://rfc.zeromq.org/spec/37/.

Invariants: no message is delivered before the handshake has ended.  The buffer holds at most one frame of the largest
size and one read.  After a `ZmtpError` the connection is unusable.
"""

from __future__ import annotations

from typing import Final

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism, as-server 0, filler: 64 bytes."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_MIN_MAJOR: Final = 3
_COMMAND_BYTES: Final = 512
"""Longest command: READY and PING, the only ones used, are short."""


class ZmtpError(Exception):
    """The peer does not speak the protocol, or breaks a bound."""


def ready(socket_type: bytes) -> bytes:
    """The command that ends the handshake."""
    return _command(b"READY", _property(b"Socket-Type", socket_type) + _property(b"Identity", b""))


def frame(content: bytes) -> bytes:
    """A message of one part."""
    size = len(content)
    if size < 256:
        return bytes((0, size)) + content
    return b"\x02" + size.to_bytes(8, "big") + content


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes((len(name),)) + name + body
    return bytes((_COMMAND, len(content))) + content


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(body: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        name_end = at + 1 + body[at]
        value_end = name_end + 4 + int.from_bytes(body[name_end : name_end + 4], "big")
        if name_end + 4 > len(body) or value_end > len(body):
            raise ZmtpError("metadata that does not end")
        found[body[at + 1 : name_end].lower()] = body[name_end + 4 : value_end]
        at = value_end
    return found


class Connection:
    """One end of a connection: takes received bytes, and gives messages and bytes to send.

    `socket_type` is this end's type, `accepts` the allowed types of the peer: a ROUTER talks to a DEALER (RFC 28),
    a PUB to a SUB (RFC 29).
    """

    __slots__ = ("_accepts", "_buffer", "_greeted", "_largest", "_publishes", "frames", "reply", "shaken")

    def __init__(self, socket_type: bytes, accepts: frozenset[bytes], largest: int) -> None:
        self._accepts = accepts
        self._largest = largest
        self._buffer = b""
        self._greeted = False
        self._publishes = socket_type == b"PUB"
        self.frames = 0
        """All messages and commands received."""
        self.shaken = False
        """The handshake has ended: messages may be sent."""
        self.reply = GREETING + ready(socket_type)
        """Bytes to send ahead of any message; the caller empties it."""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages completed by `data`.  Raises ZmtpError, also for a message of several parts."""
        buffer = self._buffer + data if self._buffer else data
        if not self._greeted:
            if len(buffer) < len(GREETING):
                if buffer[:1] != b"\xff":
                    raise ZmtpError("not a ZeroMQ peer")
                self._buffer = buffer
                return []
            self._greet(buffer[: len(GREETING)])
            buffer = buffer[len(GREETING) :]
        messages: list[bytes] = []
        at, end = 0, len(buffer)
        while at + 2 <= end:
            flags = buffer[at]
            if flags & _LONG:
                if at + 9 > end:
                    break
                start, size = at + 9, int.from_bytes(buffer[at + 1 : at + 9], "big")
            else:
                start, size = at + 2, buffer[at + 1]
            if flags or size > self._largest or not self.shaken:
                self._check_header(flags, size)
            stop = start + size
            if stop > end:
                break
            if flags & _COMMAND:
                messages += self._run_command(buffer[start:stop])
            else:
                messages.append(buffer[start:stop])
            at = stop
            self.frames += 1
        self._buffer = buffer[at:]
        return messages

    def _greet(self, greeting: bytes) -> None:
        if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < _MIN_MAJOR:
            raise ZmtpError("not a ZeroMQ peer of version 4 or later")
        if greeting[12:32].rstrip(b"\0") != b"NULL":
            raise ZmtpError("an unsupported security mechanism")
        self._greeted = True

    def _check_header(self, flags: int, size: int) -> None:
        """Checks a header before its content is awaited."""
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ZmtpError(f"flags {flags:#x}")
        if flags & _COMMAND:
            if flags & _MORE or size > _COMMAND_BYTES:
                raise ZmtpError("a command too long or of several parts")
            return
        if not self.shaken:
            raise ZmtpError("a message before the handshake")
        if flags & _MORE:
            raise ZmtpError("a message of several parts")
        if size > self._largest:
            raise ZmtpError(f"a message of {size} bytes, at most {self._largest} are allowed")

    def _run_command(self, command: bytes) -> list[bytes]:
        """For a PUB, a subscription gives a message, as it did before version 3.1."""
        name_end = 1 + command[0] if command else 0
        name, body = command[1:name_end], command[name_end:]
        if name == b"READY" and not self.shaken:
            kind = _properties(body).get(b"socket-type", b"")
            if kind not in self._accepts:
                raise ZmtpError(f"a socket of type {kind!r}")
            self.shaken = True
        elif name == b"PING":
            self.reply += _command(b"PONG", body[2:18])
        elif not self.shaken:
            raise ZmtpError(f"command {name!r} before READY")
        elif name == b"SUBSCRIBE" and self._publishes:
            return [b"\x01" + body]
        return []
