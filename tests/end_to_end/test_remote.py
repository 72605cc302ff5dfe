"""Programs of other machines, whose calls a server makes here, in one process for each connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import Built
from tests.end_to_end.conftest import Node
from tests.hook.compiled import compile_c
from tests.waiting import BOUND_S, eventually

SOURCE = Path(__file__).parent / "programs" / "remote_server.c"


class Remote:
    """A remote program."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=BOUND_S)
        self._stream: IO[str] = self.socket.makefile("rw", encoding="utf-8", newline="\n")
        self.begin("begin")

    def begin(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def end(self) -> int:
        return int(self._stream.readline())

    def do(self, line: str) -> int:
        self.begin(line)
        return self.end()

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


@pytest.fixture
def port(node: Node, built: Built, tmp_path: Path) -> Iterator[int]:
    """Of a server under the hook, beside a coordinator of 256 MiB."""
    server = compile_c(tmp_path / "lupine_driver_server", SOURCE, built.sim_dir / "libcuda.so.1")
    node.start_coordinator("--capacity=256MiB", "--quantum=20ms")
    process = node.run([str(server)], "--memory=swap", "--gpu-memory-limit=200MiB")
    assert process.stdout is not None
    yield int(process.stdout.readline())
    process.kill()


@pytest.mark.parametrize("node", ["1x512MiB"], indirect=True)
def test_remote_programs_share_a_gpu(node: Node, port: int) -> None:
    """Broken if remote programs had no turns, limits or names of their own, or mixed up their memory."""
    first, second = Remote(port), Remote(port)
    assert [first.do("fill 160 7"), second.do("fill 160 9")] == [0, 0], "more than the GPU has"
    assert first.do("fill 64 7") == 2, "beyond its limit"
    for _ in range(3):
        for program in (first, second):
            program.begin("run 10")
        assert [first.end(), second.end()] == [0, 0]
    clients = node.control("clients")["clients"]
    assert [client["name"] for client in clients] == ["lupine_driver_server 127.0.0.1"] * 2
    moved = [client["seats"][0]["moved_out_bytes"] for client in clients]
    assert min(moved) > 0, "each has been away"
    assert [second.do("check"), first.do("check")] == [0, 0]
    first.close()
    eventually(lambda: len(node.control("clients")["clients"]) == 1, "the end of the first")
    assert second.do("run 10") == 0
    second.close()
