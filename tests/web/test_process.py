"""A real coordinator with a page: its process is started, restarted and ended."""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from nvshare.coordinator.protocol import messages
from tests.daemon.processes import Coordinators, Hook, Running
from tests.waiting import BOUND_S, eventually

Connect = Callable[..., Hook]


def port_of(running: Running) -> int:
    """As the log says it."""
    found = re.search(r"page on http://127\.0\.0\.1:(\d+)/", running.log.read_text())
    assert found is not None
    return int(found[1])


def child_of(running: Running) -> int:
    """The page's process, when it runs."""
    children = Path(f"/proc/{running.process.pid}/task").glob("*/children")
    pids = [int(pid) for listed in children for pid in listed.read_text().split()]
    return pids[0] if pids else 0


def has_ended(pid: int) -> bool:
    """Also a process that its parent has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def get(port: int, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    connection.request("GET", path)
    return connection.getresponse()


def pictures(port: int) -> Iterator[dict[str, Any]]:
    """Pictures that a browser gets."""
    with closing(get(port, "/live")) as reply:
        while line := reply.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def post(port: int, body: dict[str, Any], token: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    headers = {"Content-Type": "application/json", "X-NVShare-Token": token, "Origin": f"http://127.0.0.1:{port}"}
    connection.request("POST", "/change", json.dumps(body), headers)
    with closing(connection.getresponse()) as reply:
        return reply.status, json.loads(reply.read())


def test_it_shows_and_changes_programs(coordinators: Coordinators, connect: Connect, tmp_path: Path) -> None:
    """Broken if the page did not show who has the GPU, or a change with the token did not take effect."""
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("0123456789abcdef\n")
    running = coordinators.start("--web-port=0", f"--web-token-file={file}")
    port = port_of(running)
    shown = pictures(port)
    assert next(shown) == {"may_change": True}
    assert next(shown)["programs"] == []
    program = connect(running).hello("train.py").attach(wanted=True)
    program.next(messages.Grant)
    spans: list[Any] = []
    picture: dict[str, Any] = {"programs": []}
    while not (spans and picture["programs"]):  # a span comes once, perhaps with a picture from before its program
        picture = next(shown)
        spans += picture["spans"]
    assert [(each["name"], each["state"]) for each in picture["programs"]] == [("train.py", "running")]
    assert spans[0][2:4] == [picture["programs"][0]["client"], "hold"]
    client = f"c{picture['programs'][0]['client']}"
    assert post(port, {"ask": "pause", "client": client}, "0123456789abcdeX")[0] == 401
    assert not running.status()["clients"][0]["paused"]
    assert post(port, {"ask": "pause", "client": client}, "0123456789abcdef")[0] == 200
    assert running.status()["clients"][0]["paused"]
    eventually(lambda: next(shown)["programs"][0]["state"] == "paused", "the pause in the page")
    assert "0123456789" not in running.log.read_text()


def test_it_is_restarted_on_its_port(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a crash of the page ended it for good, moved it, hid a lease, or ended the coordinator."""
    running = coordinators.start("--web-port=0")
    connect(running).hello("train.py").attach(wanted=True).next(messages.Grant)
    port = port_of(running)
    assert get(port, "/").status == 200
    os.kill(child_of(running), signal.SIGKILL)
    eventually(lambda: "the page's process ended (signal 9)" in running.log.read_text(), "a line in the log")
    shown = pictures(port)
    next(shown)
    assert next(shown)["programs"][0]["holding_ms"] > 0
    assert running.stop() == 0


def test_it_ends_with_the_coordinator(coordinators: Coordinators) -> None:
    """Broken if a page stayed behind a stopped or killed coordinator."""
    for end in (Running.stop, Running.kill):
        running = coordinators.start("--web-port=0")
        assert get(port_of(running), "/").status == 200
        child = child_of(running)
        assert not has_ended(child)
        end(running)
        eventually(functools.partial(has_ended, child), "the page's end")


def test_it_is_refused_with_the_remedy(coordinators: Coordinators, tmp_path: Path) -> None:
    """Broken if a coordinator started without the page that was asked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, text = coordinators.refused(f"--web-port={taken.getsockname()[1]}")
    assert (code, "choose another --web-port" in text) == (1, True), text
    code, text = coordinators.refused("--web-port=0", f"--web-token-file={tmp_path / 'none'}")
    assert (code, "--web-token-file: " in text) == (2, True), text
