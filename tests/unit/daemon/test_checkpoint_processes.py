"""The coordinator's side of the helpers that make the driver's calls for parked programs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.daemon import checkpoint_processes
from nvshare.coordinator.daemon.checkpoint_processes import (
    DEADLINE_NS,
    MOST_BYTES,
    MOST_OF_USER,
    MOST_STARTING,
    CheckpointProcesses,
    read_answer,
)
from nvshare.coordinator.daemon.loop import Waiter
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.protocol.fields import RemoteProtocolError
from tests.waiting import BOUND_S, eventually

GPUS = ("GPU-a", "GPU-b", "GPU-c")
SAVE = commands.Checkpoint(1, 4711, 1000)
RESTORE = commands.Restore(1, 4711, 1000)
MOVE = commands.Restore(1, 4711, 1000, "GPU-a", "GPU-b")
Process = subprocess.Popen[bytes]


class Scene:
    """Helpers whose words the test says; each is a process that does nothing."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.ends: list[events.Saved | events.Restored] = []
        self.made: list[tuple[Process, socket.socket]] = []
        self.waiter = Waiter()
        self.helpers = CheckpointProcesses(self.waiter, {}, GPUS, self.ends.append, lambda: self.now_ns)

    def start(self, words: list[str], **options: Any) -> Process:
        process = subprocess.Popen(["/bin/sleep", "1000"], **options)
        self.made.append((process, socket.socket(fileno=os.dup(options["stdin"]))))
        return process

    def ready(self, helper: int = -1) -> None:
        self.says(b"ready\n", helper)

    def ask(self, command: commands.DriverCall) -> None:
        self.helpers.carry_out(command)

    def asked(self, helper: int = -1) -> bytes:
        return self.made[helper][1].recv(1000)

    def says(self, words: bytes, helper: int = -1) -> None:
        self.made[helper][1].send(words)
        self.turn()

    def turn(self) -> None:
        self.helpers.serve(self.waiter.wait(int(BOUND_S * 1e9)))

    def reaped(self, process: Process) -> bool:
        self.helpers.serve(set())
        return process.returncode is not None

    def killed(self, helper: int = -1) -> bool:
        """Whether it is dead, and reaped by the loop."""
        process = self.made[helper][0]
        eventually(lambda: self.reaped(process), "its end")
        return process.returncode == -signal.SIGKILL


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene()
    double = SimpleNamespace(Popen=made.start, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(checkpoint_processes, "subprocess", double)
    yield made
    made.helpers.close()
    for process, connection in made.made:
        process.kill()
        process.wait()
        connection.close()
    made.waiter.close()


def test_a_helper_is_asked_and_answers(scene: Scene) -> None:
    """Broken: a program is not parked, or not brought back where it was asked for; or each step has a new helper."""
    scene.ask(commands.ExpectCheckpoint(1, 4711, 1000))
    scene.says(b"rea")
    scene.says(b"dy\n")
    for command, line, answer, end in (
        (SAVE, b"save\n", b"done\n", events.Saved(1)),
        (MOVE, b"restore GPU-a GPU-b\n", b"failed no room\n", events.Restored(1, "no room")),
        (MOVE, b"restore GPU-a GPU-b\n", b"done GPU-b\n", events.Restored(1, gpu="GPU-b")),
        (RESTORE, b"restore  \n", b"done GPU-c\n", events.Restored(1, gpu="GPU-c")),
        (SAVE, b"save\n", b"lost in its \x1b[31m midst\n", events.Saved(1, "in its ?[31m midst", True)),
    ):
        scene.ask(command)
        assert scene.asked() == line
        scene.says(answer[:3])
        scene.says(answer[3:])
        assert scene.ends.pop() == end
    assert len(scene.made) == 1
    scene.ask(commands.ParkingOver(1))
    assert scene.killed()
    assert not scene.ends


@pytest.mark.parametrize(
    "words",
    [
        b"\n",
        b"done\ndone\n",
        b"done GPU-b\n",
        b"failed\n",
        b'{"process_id": 4711, "error": [], "gpu": {}, "lost": 1}\n',
        b"\xff\xfe\n",
        b"a" * (MOST_BYTES + 1),
        b"failed " + b"a" * MOST_BYTES + b"\n",
    ],
)
def test_a_helper_that_breaks_the_rules_ends(scene: Scene, words: bytes) -> None:
    """Broken: a user's words are believed, fill root's memory, end the coordinator, or leave a request open."""
    scene.ask(SAVE)
    while not scene.ends:
        scene.says(words)
    (end,) = scene.ends
    assert isinstance(end, events.Saved)
    assert end.unsure
    assert scene.killed()
    scene.ask(RESTORE)
    assert len(scene.made) == 2
    scene.says(b"done\n")
    assert scene.ends[1:] == [events.Restored(1)]


def test_words_that_nobody_asked_for(scene: Scene) -> None:
    """Broken: an answer lies ready before the request."""
    scene.ask(commands.ExpectCheckpoint(1, 4711, 1000))
    scene.says(b"done\n")
    assert scene.killed()
    assert not scene.ends


def test_a_stopped_helper_is_killed_after_its_time(scene: Scene) -> None:
    """Broken: a user who stops the own helper keeps the coordinator or a request waiting for ever."""
    scene.ask(SAVE)
    scene.made[0][0].send_signal(signal.SIGSTOP)
    assert scene.helpers.next_deadline_ns() == DEADLINE_NS
    scene.helpers.expire(DEADLINE_NS - 1)
    assert not scene.ends
    scene.helpers.expire(DEADLINE_NS)
    assert scene.ends == [events.Saved(1, "its helper waited longer than 120 s for the driver", unsure=True)]
    assert scene.killed()
    assert scene.helpers.next_deadline_ns() is None


def test_a_helper_that_reads_nothing(scene: Scene) -> None:
    """Broken: the coordinator blocks in a write to a helper."""
    scene.ask(SAVE)
    (ours,) = (each.connection for each in scene.helpers._helpers.values())
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"x" * 4096)
    scene.says(b"done\n")
    scene.ask(RESTORE)
    assert scene.ends[1:] == [events.Restored(1, "its helper takes no request")]
    assert scene.killed()


def test_a_helper_that_its_user_ends(scene: Scene) -> None:
    """Broken: a request hangs, or no other helper follows; or a program that was never saved counts as away."""
    for started in (False, True):
        scene.ask(SAVE)
        if started:
            scene.ready(1)
        process, connection = scene.made[-1]
        process.kill()
        connection.close()
        scene.turn()
        assert scene.ends.pop() == events.Saved(1, "its helper has ended", unsure=started)
    scene.ask(RESTORE)
    assert scene.asked() == b"restore  \n"


def test_one_user_has_a_bounded_number(scene: Scene) -> None:
    """Broken: a user has the coordinator start processes without end, or takes them from others."""
    scene.ask(commands.ExpectCheckpoint(0, 1, 2000))
    scene.ready()
    for client in range(1, MOST_OF_USER + 2):
        scene.ask(commands.ExpectCheckpoint(client, client, 1000))
        scene.ready()
    assert scene.killed(1), "the one that was idle longest"
    assert [process.poll() for process, _ in scene.made].count(None) == MOST_OF_USER + 1
    for client in range(2, MOST_OF_USER + 3):
        scene.ask(commands.Checkpoint(client, client, 1000))
    scene.ask(commands.Checkpoint(0, 1, 2000))
    assert scene.asked(0) == b"save\n", "another user's"
    assert len(scene.made) == MOST_OF_USER + 2, "the last one waits"
    scene.says(b"done\n", 2)
    assert scene.ends == [events.Saved(2)]
    assert scene.killed(2)
    assert scene.asked(MOST_OF_USER + 2) == b"save\n"


def test_few_of_one_user_start_at_a_time(scene: Scene) -> None:
    """Broken: a user keeps the loop busy with starts, or a request that had to wait is forgotten."""
    for client in range(5):
        scene.ask(commands.ExpectCheckpoint(client, client, 1000))
        scene.ask(commands.Checkpoint(client, client, 1000))
    assert len(scene.made) == MOST_STARTING
    scene.ask(commands.ParkingOver(2))
    scene.ready(0)
    scene.made[1][0].kill()
    scene.made[1][1].close()
    scene.turn()
    assert [scene.asked(helper) for helper in (2, 3)] == [b"save\n"] * 2
    assert len(scene.made) == 4
    scene.says(b"ready\ndone\n", 2)
    assert scene.ends == [events.Saved(1, "its helper has ended"), events.Saved(3)]


@given(
    st.sampled_from([SAVE, RESTORE, MOVE]),
    st.binary(max_size=2 * MOST_BYTES)
    | st.builds(
        lambda word, rest: f"{word} {rest}\n".encode(errors="replace"),
        st.sampled_from(["done", "failed", "lost"]),
        st.text() | st.sampled_from(GPUS),
    ),
)
def test_any_words(request: Any, said: bytes) -> None:
    """Broken: words of a helper raise an exception in the core, name another client, or forge lines of a log."""
    try:
        end = read_answer(request, said, GPUS)
    except RemoteProtocolError as error:
        end = events.Saved(1, str(error))
    assert end.client == request.client
    assert end.error.isprintable()
    assert len(end.error) <= MOST_BYTES
    if isinstance(end, events.Restored):
        assert end.gpu in ("", *(GPUS if request is RESTORE else ("GPU-a", "GPU-b")))
