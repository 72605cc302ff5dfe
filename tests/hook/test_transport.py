"""The hook's end of the wire below the level of messages, against a server that the test plays byte by byte."""

from __future__ import annotations

import contextlib
import random
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import wire, zmtp
from tests.hook.conftest import StartClient
from tests.hook.scripted import BOUND_S, ScriptedClient
from tests.hook.test_agent import MS, SHORT_S

READY = zmtp.ready(b"ROUTER")


class Server:
    """A listening socket; `accept` gives the hook's next connection."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._listener.settimeout(BOUND_S)

    def accept(self) -> socket.socket:
        """Bounded."""
        connection, _ = self._listener.accept()
        connection.settimeout(BOUND_S)
        return connection

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """On the path that the client's environment names."""
    made = Server(tmp_path / "hooks.sock")
    yield made
    made.close()


@pytest.fixture
def client(start: StartClient) -> ScriptedClient:
    """Waits for the lease from the start."""
    made = start()
    made.tell("launch 1000")
    return made


def taken(connection: socket.socket, wanted: bytes) -> bytes:
    """Reads until `wanted` came."""
    found = b""
    while wanted not in found:
        more = connection.recv(4096)
        assert more, f"closed after {found!r}"
        found += more
    return found


def until_silent(connection: socket.socket) -> bytes:
    """What comes until nothing more comes for a while."""
    found = b""
    while select.select([connection], [], [], SHORT_S)[0]:
        more = connection.recv(4096)
        assert more, f"closed after {found!r}"
        found += more
    return found


def closed(connection: socket.socket) -> bool:
    """Whether the hook ends the connection."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    return True


def shake(connection: socket.socket) -> bytes:
    """The handshake; returns what the hook has said until its AttachGpu."""
    connection.sendall(zmtp.GREETING + READY)
    return taken(connection, b"GPU-")


def grant(connection: socket.socket, piece: int) -> None:
    """All that the hook needs to run, in pieces."""
    answers = b"".join(
        zmtp.frame(wire.encode(message))
        for message in (
            wire.Welcome(1, 1),
            wire.GpuSettings(0, 0, 1 << 30, False, 0, 100_000 * MS, 10_000 * MS, 0),
            wire.Grant(0, 1, 100 * MS, 0),
        )
    )
    for at in range(0, len(answers), piece):
        connection.sendall(answers[at : at + piece])


@pytest.mark.parametrize("piece", [1, 3, 65_536])
def test_frames_in_any_pieces(server: Server, client: ScriptedClient, piece: int) -> None:
    """Broken: a message that the kernel delivers in two parts is lost or garbled."""
    connection = server.accept()
    shake(connection)
    grant(connection, piece)
    assert client.answer() == "launched"


def test_garbage_is_survived(server: Server, client: ScriptedClient) -> None:
    """Broken: whoever listens on that path can stop or crash a program; the seed is printed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    openings = [b"", b"\xff", zmtp.GREETING[:40], zmtp.GREETING, zmtp.GREETING + READY]
    for opening in openings:
        connection = server.accept()
        with contextlib.suppress(ConnectionError):
            connection.sendall(opening + chance.randbytes(4000))
        connection.close()
    connection = server.accept()
    shake(connection)
    grant(connection, 65_536)
    assert client.answer() == "launched"


@pytest.mark.parametrize(
    "bad",
    [
        b"\x02" + (1 << 40).to_bytes(8, "big"),
        b"\x01\x01x",
        zmtp.frame(b"x" * 5000),
    ],
    ids=["huge", "several parts", "longer than any message"],
)
def test_frames_that_no_coordinator_sends_end_the_connection(
    server: Server, client: ScriptedClient, bad: bytes
) -> None:
    """Broken: a frame without end fills the program's memory, or the hook waits for it for ever."""
    connection = server.accept()
    shake(connection)
    connection.sendall(bad)
    assert closed(connection)
    again = server.accept()
    shake(again)
    grant(again, 65_536)
    assert client.answer() == "launched"


def test_a_ping_is_answered(server: Server, client: ScriptedClient) -> None:
    """Broken: a ZeroMQ peer with heartbeats takes the hook for dead."""
    connection = server.accept()
    shake(connection)
    connection.sendall(b"\x04\x0b\x04PING\x00\x0aabcd")
    assert taken(connection, b"\x04PONGabcd")
    grant(connection, 65_536)
    assert client.answer() == "launched"


def test_nothing_is_said_before_the_handshake_is_over(server: Server, client: ScriptedClient) -> None:
    """Broken: messages would be sent to something that is no coordinator."""
    connection = server.accept()
    connection.sendall(zmtp.GREETING)
    said = taken(connection, b"DEALER") + until_silent(connection)
    assert said.endswith(b"Identity\0\0\0\0")
