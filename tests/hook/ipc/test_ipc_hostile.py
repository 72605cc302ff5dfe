"""Memory of mode `swap` shared by cuIpcGetMemHandle, and peers that send nonsense, lie or lack the right to it."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from pathlib import Path

import pytest

from tests.hook.ipc.test_ipc import (
    INVALID_HANDLE,
    INVALID_VALUE,
    LAZY,
    StartImporter,
    environment,
    exported,
    exporter,
    importer,
    names_in,
    opened,
    secret_of,
)
from tests.hook.memory.test_memory_process import Client
from tests.hook.swap.test_swap_process import MIB

__all__ = ["environment", "exporter", "importer"]

OPEN, CLOSE = 1, 2
REQUEST = struct.Struct("<IIII16s")
ANSWER = struct.Struct("<IiIIQQQ32Q")


def test_nonsense_is_refused(exporter: Client, importer: StartImporter) -> None:
    """Broken: a handle that is none crashes, hangs or opens something."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    dice = random.Random(seed)
    _, handle = exported(exporter, MIB, 1)
    guest = importer()
    good = handle.to_bytes(64, "little")
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(dice.choice([1, 2, 20])):
            bad[dice.randrange(8, 48)] ^= 1 << dice.randrange(8)
        if bad[8:12] + bad[16:48] == good[8:12] + good[16:48]:
            continue  # the process id in between is only shown
        result = guest.ask("ipc_open", int.from_bytes(bad, "little"), LAZY)[0]
        assert result in (INVALID_VALUE, INVALID_HANDLE), bad.hex()
    assert guest.ask("ipc_open", dice.getrandbits(512), LAZY)[0] != 0
    assert guest.ask("same", opened(guest, handle), MIB, 1) is True


def connect(handle: int) -> socket.socket:
    """To the exporter's socket."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(secret_of(handle)[0])  # waits while many others do
    link.settimeout(60)
    return link


def ask(link: socket.socket, what: int, first: int, key: bytes, version: int = 1) -> tuple[int, int]:
    """(result, descriptors) of a question; the descriptors are closed."""
    link.send(REQUEST.pack(version, what, 7, first, key))
    content, descriptors, _, _ = socket.recv_fds(link, ANSWER.size, 64)
    for descriptor in descriptors:
        os.close(descriptor)
    number, result, *_ = ANSWER.unpack(content)
    assert number == 7
    return result, len(descriptors)


def test_a_hostile_peer_gets_and_breaks_nothing(exporter: Client, importer: StartImporter) -> None:
    """Broken: whoever finds the socket gets memory without the key, or stops the thread that serves others."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    dice = random.Random(seed)
    _, handle = exported(exporter, 4 * MIB, 1)
    _, key = secret_of(handle)
    with connect(handle) as link:
        assert ask(link, OPEN, 0, dice.randbytes(16)) == (INVALID_HANDLE, 0)
        assert ask(link, OPEN, 1, key) == (INVALID_HANDLE, 0), "not opened yet"
        assert ask(link, OPEN, 0, key)[1] == 1
        assert ask(link, OPEN, 9, key) == (INVALID_VALUE, 0), "it has no such part"
        for _ in range(50):
            link.send(REQUEST.pack(1, CLOSE, 0, 0, key))
    for junk in (b"x", REQUEST.pack(2, OPEN, 0, 0, key), REQUEST.pack(1, 99, 0, 0, key), dice.randbytes(4096)):
        with connect(handle) as link:
            link.send(junk)
            assert link.recv(1) == b"", "it is hung up on"
    with connect(handle) as link:  # asks and never listens
        link.setblocking(False)
        try:
            for _ in range(10000):
                link.send(REQUEST.pack(1, OPEN, 7, 0, key))
        except OSError:
            pass
    crowd = [connect(handle) for _ in range(100)]
    guest = importer()
    assert guest.ask("same", opened(guest, handle), 4 * MIB, 1) is True
    for link in crowd:
        link.close()


def liar(answers: list[bytes], descriptors: int) -> tuple[int, threading.Thread]:
    """A handle, and somebody who says these things to who opens it, each with so many descriptors."""
    process, key = os.urandom(16), os.urandom(16)
    content = struct.pack("<8sIi16s16sQQ", b"nvshIPC", 1, os.getpid(), process, key, MIB, 0)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0nvshare-ipc-" + process.hex().encode())
    listener.listen()
    listener.settimeout(60)

    def serve() -> None:
        with listener:
            for answer in answers:
                link, _ = listener.accept()
                with link, Path("/dev/null").open() as nothing:
                    number = REQUEST.unpack(link.recv(REQUEST.size))[2]
                    said = answer.replace(b"NUMB", struct.pack("<I", number))
                    socket.send_fds(link, [said], [nothing.fileno()] * descriptors)
                    link.recv(1)  # until the other end is done with it

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return int.from_bytes(content, "little"), thread


@pytest.mark.parametrize("descriptors", [0, 1, 3])
def test_a_lying_exporter_breaks_nothing(importer: StartImporter, descriptors: int) -> None:
    """Broken: an importer crashes, hangs or leaks by what another process tells it."""
    most = 2**64 - 1
    lies = [
        (1, 1, most, 0, MIB, 2 * MIB), (1, 1, 2 * MIB, most, MIB, 2 * MIB), (1, 1, 2 * MIB, 0, most, 2 * MIB),
        (1, 1, 2 * MIB, 0, MIB, most), (most >> 32, 1, 2 * MIB, 0, MIB, 2 * MIB), (1, 33, 2 * MIB, 0, MIB, 2 * MIB),
        (3, 3, 6 * MIB, 0, MIB, 2 * MIB), (1, 1, 2 * MIB, 0, MIB, 2 * MIB), (0, 0, 0, 0, 0, 0),
    ]  # fmt: skip
    answers = [b"NUMB" + struct.pack("<iIIQQQ", 0, *lie[:5]) + struct.pack("<Q", lie[5]) * 32 for lie in lies]
    handle, thread = liar([*answers, b"NUMB", os.urandom(ANSWER.size), b"x" * 4000], descriptors)
    guest = importer(NVSHARE_LOG="off")  # a log is a descriptor, too
    before = names_in(guest, "fd")
    for _ in range(len(answers) + 3):
        assert guest.ask("ipc_open", handle, LAZY)[0] != 0
    thread.join(60)
    assert not thread.is_alive()
    assert len(names_in(guest, "fd")) <= len(before)
    assert guest.ask("alloc", MIB)[0] == 0, "it goes on"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_nothing(exporter: Client) -> None:
    """Broken: a handle that leaks gives another user's process the memory."""
    _, handle = exported(exporter, MIB, 1)
    _, key = secret_of(handle)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            with connect(handle) as link:
                link.send(REQUEST.pack(1, OPEN, 7, 0, key))
                os._exit(0 if link.recv(1) == b"" else 1)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
