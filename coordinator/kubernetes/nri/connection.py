"""ttrpc over the multiplexed connection of NRI.

The socket carries frames: connection and length (`>II`), then data.  The runtime calls the plugin on connection 1, and
the plugin the runtime on connection 2.  The data of each is a stream of ttrpc messages: length, stream, type and flags
(`>IIBB`), then a protobuf Request or Response.  A message may come in several frames.

Invariants: what is not this protocol, or exceeds ttrpc's largest message, raises RemoteProtocolError.  Memory is
bounded by two messages and a frame.

Non-goals: the calls (plugin.py).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from nvshare.coordinator.kubernetes.nri import messages as m
from nvshare.coordinator.protocol.fields import RemoteProtocolError

PLUGIN, RUNTIME = 1, 2  # connections
REQUEST, RESPONSE = 1, 2  # types of messages
MAX_MESSAGE_BYTES: Final = 4 << 20
_FRAME: Final = struct.Struct(">II")
_HEADER: Final = struct.Struct(">IIBB")
_READ_BYTES: Final = 1 << 16
_REGISTRATION: Final = 1
"""Stream of our only call; a client's streams are odd."""

Answer = Callable[[str, bytes], tuple[bytes, int, str]]
"""(method, payload) -> (payload, status code, message)."""


@dataclass(frozen=True, slots=True)
class Message:
    """One ttrpc message."""

    connection: int
    stream: int
    kind: int
    data: bytes


class Parser:
    """Bytes to messages; no I/O."""

    def __init__(self) -> None:
        self._raw = bytearray()
        self._streams = {PLUGIN: bytearray(), RUNTIME: bytearray()}

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete.  Raises RemoteProtocolError."""
        self._raw += data
        found: list[Message] = []
        while len(self._raw) >= _FRAME.size:
            connection, length = _FRAME.unpack_from(self._raw)
            if connection not in self._streams:
                raise RemoteProtocolError(f"NRI: frame of connection {connection}")
            if length > _HEADER.size + MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"NRI: frame of {length} bytes")
            end = _FRAME.size + length
            if len(self._raw) < end:
                break
            self._streams[connection] += self._raw[_FRAME.size : end]
            del self._raw[:end]
            found += self._messages(connection)
        return found

    def _messages(self, connection: int) -> list[Message]:
        stream = self._streams[connection]
        found: list[Message] = []
        while len(stream) >= _HEADER.size:
            length, number, kind, _ = _HEADER.unpack_from(stream)
            if length > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"NRI: message of {length} bytes")
            if kind != (REQUEST if connection == PLUGIN else RESPONSE):
                raise RemoteProtocolError(f"NRI: message of type {kind} on connection {connection}")
            end = _HEADER.size + length
            if len(stream) < end:
                break
            found.append(Message(connection, number, kind, bytes(stream[_HEADER.size : end])))
            del stream[:end]
        return found


def written(connection: int, stream: int, kind: int, message: Any) -> bytes:
    """A message in one frame."""
    data: bytes = message.SerializeToString()
    return _FRAME.pack(connection, _HEADER.size + len(data)) + _HEADER.pack(len(data), stream, kind, 0) + data


def serve(connected: socket.socket, name: str, index: str, answer: Answer) -> None:
    """Registers a plugin and answers the runtime's calls, one after the other, until it closes the connection.

    Raises OSError and RemoteProtocolError.
    """
    registration = m.RegisterPluginRequest(plugin_name=name, plugin_idx=index).SerializeToString()
    request = m.Request(service=m.RUNTIME_SERVICE, method="RegisterPlugin", payload=registration)
    connected.sendall(written(RUNTIME, _REGISTRATION, REQUEST, request))
    parser = Parser()
    while data := connected.recv(_READ_BYTES):
        for message in parser.feed(data):
            if message.connection == PLUGIN:
                call = parsed(m.Request, message.data)
                payload, code, text = answer(call.method, call.payload)
                response = m.Response(payload=payload, status={"code": code, "message": text} if code else None)
                connected.sendall(written(PLUGIN, message.stream, RESPONSE, response))
            elif (status := parsed(m.Response, message.data).status).code:
                raise RemoteProtocolError(f"NRI: the runtime refuses the registration: {status.message}")


def parsed(kind: Any, data: bytes) -> Any:
    """A message of this class.  Raises RemoteProtocolError."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RemoteProtocolError(f"NRI: not a {kind.DESCRIPTOR.name}") from None
