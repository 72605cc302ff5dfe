"""ZMTP by itself: any split of the bytes gives the same messages, a breach ends the connection, libzmq understands it.

Non-goals: the coordinator's own sockets (test_hook_listener.py).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import tempfile
from collections.abc import Callable, Iterator

import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st

from nvshare.coordinator.protocol.framing import GREETING, Connection, ZmtpError, frame, ready
from tests.waiting import BOUND_S

LARGEST = 1024
DEALERS = frozenset({b"DEALER"})


def command(name: bytes, body: bytes = b"") -> bytes:
    """As a peer sends it."""
    content = bytes((len(name),)) + name + body
    return bytes((4, len(content))) + content


def metadata(name: bytes, value: bytes) -> bytes:
    """One property of a READY."""
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def fresh() -> Connection:
    """A coordinator's end."""
    return Connection(b"ROUTER", DEALERS, LARGEST)


def shaken() -> Connection:
    """The same after the handshake."""
    connection = fresh()
    assert connection.feed(GREETING + ready(b"DEALER")) == []
    assert connection.shaken
    connection.reply = b""
    return connection


def in_pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """The same bytes, cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(places):
        yield data[start:stop]


@given(
    st.lists(
        st.one_of(st.binary(max_size=300), st.sampled_from([b"", b"x" * 255, b"x" * 256, b"x" * LARGEST])), max_size=8
    ),
    st.lists(st.integers(min_value=0), max_size=30),
)
@example([b"short", b"l" * 700, b""], list(range(2000)))  # a byte at a time
def test_any_split_gives_the_same_messages(messages: list[bytes], cuts: list[int]) -> None:
    """Broken: a message is lost, doubled or garbled when the kernel delivers it in another way."""
    connection = fresh()
    stream = GREETING + ready(b"DEALER") + b"".join(map(frame, messages))
    assert [found for piece in in_pieces(stream, cuts) for found in connection.feed(piece)] == messages
    assert connection.shaken


@given(st.binary(max_size=400), st.booleans(), st.lists(st.integers(min_value=0), max_size=10))
def test_garbage_ends_in_messages_or_in_an_error(garbage: bytes, after_handshake: bool, cuts: list[int]) -> None:
    """Broken: some bytes raise anything else, are given out before the handshake, or are kept beyond the bound."""
    connection = shaken() if after_handshake else fresh()
    fed = 0
    with contextlib.suppress(ZmtpError):
        for piece in in_pieces(garbage, cuts):
            found = connection.feed(piece)
            fed += len(piece)
            assert connection.shaken or not found
            assert all(len(message) <= LARGEST for message in found)
    assert len(connection.reply) <= len(GREETING) + 64 + 2 * fed


@pytest.mark.parametrize(
    "greeting",
    [
        b"G",
        b"GET / HTTP/1.1\r\n" + bytes(48),
        b"\0" + GREETING[1:],
        GREETING[:9] + b"\0" + GREETING[10:],
        GREETING[:10] + b"\x01" + GREETING[11:],
        GREETING[:10] + b"\x02" + GREETING[11:],
        GREETING[:12] + b"PLAIN".ljust(20, b"\0") + GREETING[32:],
        GREETING[:12] + b"NULLX".ljust(20, b"\0") + GREETING[32:],
        GREETING[:12] + bytes(20) + GREETING[32:],
    ],
    ids=[
        *("first byte", "http", "signature", "end of signature", "version 2", "version 2.1"),
        *("plain", "longer name", "no mechanism"),
    ],
)
def test_greetings_that_are_none(greeting: bytes) -> None:
    """Broken: a peer of another protocol, version or security mechanism is talked to as if it understood."""
    with pytest.raises(ZmtpError):
        fresh().feed(greeting)


def test_a_newer_minor_version_is_welcome() -> None:
    """Broken: the next ZMTP 3.x would not be served."""
    connection = fresh()
    connection.feed(GREETING[:11] + b"\x09" + GREETING[12:] + ready(b"DEALER"))
    assert connection.shaken


@pytest.mark.parametrize(
    "said",
    [
        frame(b"early"),
        command(b"READY"),
        command(b"READY", metadata(b"Socket-Type", b"PUB")),
        command(b"READY", metadata(b"Socket-Type", b"DEALER")[:-1]),
        command(b"READY", metadata(b"Socket-Type", b"DEALER") + b"\x05Ident"),
        command(b"READY", b"\x0bSocket-Type" + (1 << 31).to_bytes(4, "big") + b"DEALER"),
        command(b"READY", b"\xff"),
        command(b"HELLO"),
        command(b"ERROR", b"\0"),
        command(b""),
        b"\x04\x00",
    ],
    ids=[
        *("message before READY", "no type", "wrong type", "cut value", "cut name", "endless value", "endless name"),
        *("another command", "error", "no name", "empty command"),
    ],
)
def test_handshakes_that_are_none(said: bytes) -> None:
    """Broken: a message is believed before both ends have agreed, or wrong metadata reads beyond its end."""
    connection = fresh()
    with pytest.raises(ZmtpError):
        connection.feed(GREETING + said)
    assert not connection.shaken


@pytest.mark.parametrize(
    "header",
    [
        b"\x08\x01",
        b"\x80\x01",
        b"\x01\x01",
        b"\x03" + (300).to_bytes(8, "big"),
        b"\x05\x05",
        b"\x06" + (513).to_bytes(8, "big"),
        b"\x02" + (LARGEST + 1).to_bytes(8, "big"),
        b"\x02" + (2**64 - 1).to_bytes(8, "big"),
        b"\x06" + (2**63).to_bytes(8, "big"),
    ],
    ids=[
        *("reserved flag", "highest flag", "more", "long and more", "command and more", "long command"),
        *("one byte too long", "as long as can be", "endless command"),
    ],
)
def test_headers_are_judged_before_their_content_comes(header: bytes) -> None:
    """Broken: the coordinator gathers what it will refuse, or waits for ever for what cannot come."""
    with pytest.raises(ZmtpError):
        shaken().feed(header)


def test_a_frame_may_be_as_long_as_allowed() -> None:
    """Broken: the bound is off by one, or a short message in the long form is refused."""
    assert shaken().feed(frame(b"x" * LARGEST)) == [b"x" * LARGEST]
    assert shaken().feed(b"\x02" + (3).to_bytes(8, "big") + b"abc") == [b"abc"]


def test_pings_are_answered_and_other_commands_skipped() -> None:
    """Broken: a client with heartbeats takes the coordinator for dead, or a later command ends its connection."""
    connection = shaken()
    stream = command(b"PING", b"\x00\x0a" + b"c" * 16) + command(b"PONG") + command(b"SUBSCRIBE", b"x") + frame(b"on")
    assert connection.feed(stream) == [b"on"]
    assert connection.reply == command(b"PONG", b"c" * 16)


def test_a_pings_context_is_bounded() -> None:
    """Broken: a peer decides how much the coordinator sends back."""
    connection = shaken()
    connection.feed(command(b"PING", b"\0\0" + b"c" * 40))
    assert connection.reply == command(b"PONG", b"c" * 16)


def test_readiness_is_told_once() -> None:
    """Broken: a second READY changes what was agreed."""
    connection = shaken()
    assert connection.feed(ready(b"PUB") + frame(b"x")) == [b"x"]


class Foreign:
    """A socket of libzmq that connects to a plain socket of ours, which `zmtp` serves."""

    def __init__(self, heartbeat_ms: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with tempfile.TemporaryDirectory(prefix="nvs-") as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen()
            listener.settimeout(BOUND_S)
            self.socket = self.context.socket(zmq.DEALER)
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(BOUND_S * 1000))
            self.socket.setsockopt(zmq.RCVTIMEO, int(BOUND_S * 1000))
            self.socket.connect(f"ipc://{folder}/socket")
            self.raw, _ = listener.accept()
        self.raw.settimeout(BOUND_S)
        self.connection = fresh()
        self.answers = b""

    def close(self) -> None:
        self.context.destroy(0)
        self.raw.close()

    def serve(self) -> list[bytes]:
        """Reads once and answers; what came."""
        if self.connection.reply:
            self.answers += self.connection.reply
            self.raw.sendall(self.connection.reply)
            self.connection.reply = b""
        data = self.raw.recv(65_536)
        assert data, "libzmq has closed the connection"
        return self.connection.feed(data)


@pytest.fixture
def foreign() -> Iterator[Callable[..., Foreign]]:
    """Makes peers of libzmq."""
    with contextlib.ExitStack() as stack:
        yield lambda heartbeat_ms=0: stack.enter_context(contextlib.closing(Foreign(heartbeat_ms)))


def test_libzmq_understands_us(foreign: Callable[..., Foreign]) -> None:
    """Broken: a client that uses ZeroMQ's own library is no client any more; both forms of length, both ways."""
    peer = foreign()
    messages = [b"", b"x", b"x" * 255, b"x" * 256, b"x" * LARGEST]
    for message in messages:
        peer.socket.send(message)
    heard: list[bytes] = []
    while len(heard) < len(messages):
        heard += peer.serve()
    assert heard == messages
    peer.raw.sendall(b"".join(map(frame, messages)))
    assert [peer.socket.recv() for _ in messages] == messages


def test_libzmqs_heartbeats_are_answered(foreign: Callable[..., Foreign]) -> None:
    """Broken: libzmq takes our answer to its PING for a breach of the protocol."""
    peer = foreign(heartbeat_ms=5)
    while peer.answers.count(b"\x04PONG") < 3:
        assert peer.serve() == []
    peer.socket.send(b"still here")
    while peer.serve() != [b"still here"]:
        pass
    peer.raw.sendall(frame(b"and here"))
    assert peer.socket.recv() == b"and here"
