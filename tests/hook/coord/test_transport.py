"""The hook's end of the wire below the level of messages, against a server that the test plays byte by byte."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import framing, messages
from tests.hook.conftest import StartClient
from tests.hook.coord.test_agent import MS, SHORT_S
from tests.hook.scripted import ScriptedClient
from tests.waiting import BOUND_S

READY = framing.ready(b"ROUTER")

OTHER_USER = 65534
LISTEN_AS_ANOTHER = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(8)
print("listens", flush=True)
sys.stdin.read(1)
while True:
    print(len(listener.accept()[0].recv(256)), flush=True)
"""
"""Says how many bytes each connection brings."""


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


@contextlib.contextmanager
def another_user(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Somebody else who listens there."""
    command = [sys.executable, "-S", "-c", LISTEN_AS_ANOTHER, str(path), str(OTHER_USER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdin is not None
        assert listener.stdout is not None
        try:
            assert listener.stdout.readline() == "listens\n"
            listener.stdin.write("x")
            listener.stdin.flush()
            yield listener
        finally:
            listener.kill()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes sockets of other users")


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_another_users_socket(start: StartClient, tmp_path: Path, mode: int) -> None:
    """Broken: whoever makes a user's runtime directory first, under /tmp, coordinates that user's programs."""
    tmp_path.chmod(0o777)
    directory = tmp_path / "run"
    directory.mkdir()
    os.chown(directory, OTHER_USER, OTHER_USER)
    directory.chmod(mode)
    with another_user(directory / "hooks.sock") as listener:
        program = start(NVSHARE_SOCKET=str(directory / "hooks.sock"), NVSHARE_LOG="error")
        program.tell("launch 1000")
        assert listener.stdout is not None
        assert listener.stdout.readline() == "0\n", "a greeting was sent"
        program.process.kill()
        _, errors = program.ended()
    assert errors.count(f"user {OTHER_USER} listens at") == 1, errors


@needs_root
def test_the_systems_coordinator_user(start: StartClient, tmp_path: Path) -> None:
    """Broken: a coordinator that root gave a user and a directory of its own is refused."""
    tmp_path.chmod(0o755)
    directory = tmp_path / "run"
    directory.mkdir()
    os.chown(directory, OTHER_USER, OTHER_USER)
    directory.chmod(0o755)
    with another_user(directory / "hooks.sock") as listener:
        program = start(NVSHARE_SOCKET=str(directory / "hooks.sock"))
        program.tell("launch 1000")
        assert listener.stdout is not None
        assert int(listener.stdout.readline()) >= 64, "no greeting came"


@needs_root
def test_a_coordinators_user_is_named(start: StartClient, tmp_path: Path) -> None:
    """Broken: in a pod, whose directory everybody may write to, no container can use the sidecar's coordinator."""
    tmp_path.chmod(0o777)
    with another_user(tmp_path / "hooks.sock") as listener:
        named = {"NVSHARE_COORDINATOR_USER": str(OTHER_USER)}
        program = start(NVSHARE_SOCKET=str(tmp_path / "hooks.sock"), **named)
        program.tell("launch 1000")
        assert listener.stdout is not None
        assert int(listener.stdout.readline()) >= 64, "no greeting came"


def taken(connection: socket.socket, wanted: bytes) -> bytes:
    """Reads until `wanted` came."""
    found = b""
    while wanted not in found:
        more = connection.recv(4096)
        assert more, f"closed after {found!r}"
        found += more
    return found


def until_silent(connection: socket.socket) -> bytes:
    """Bytes received until the connection is silent for a while."""
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
    connection.sendall(framing.GREETING + READY)
    return taken(connection, b"GPU-")


def grant(connection: socket.socket, piece: int) -> None:
    """All that the hook needs to run, in pieces."""
    answers = b"".join(
        framing.frame(messages.encode(message))
        for message in (
            messages.Welcome(1),
            messages.GpuSettings(0, 0, 1 << 30, False, 0, 100_000 * MS),
            messages.Grant(0, 1, 0),
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


@pytest.mark.parametrize(
    "bad",
    [b"\x02" + (1 << 40).to_bytes(8, "big"), b"\x01\x01x", framing.frame(b"x" * 5000)],
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
    connection.sendall(framing.GREETING)
    said = taken(connection, b"DEALER") + until_silent(connection)
    assert said.endswith(b"Identity\0\0\0\0")
