"""The helpers that make the driver's calls for programs which leave their GPUs (system/checkpoints.py), one for each.

A helper starts when the memory of its program begins to leave, so that neither the checkpoint nor the way back waits
for Python, and ends when the program runs again or is gone.

It belongs to the program's user, who may stop it, end it, or speak in its place.  So
- its words are parsed like a peer's, and count for what it was asked, for its own program;
- nothing waits for it: it is killed if it is late, breaks the rules, or does not take a request.  The request then ends
  as `unsure`, unless the helper did not even start, and the next one has a new helper;
- it gets a few variables of the environment, and its standard error goes nowhere.

Non-goals: which programs leave (engine/parking/parking.py).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.daemon.peers import printable
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.protocol.fields import RemoteProtocolError

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.loop import Waiter

DEADLINE_NS: Final = 120_000_000_000
"""For one checkpoint or restoration: some GiB of contexts and pinned memory."""
MOST_BYTES: Final = 1024
"""Of an answer."""
MOST_OF_USER: Final = 16
"""Helpers.  For one more, the one that has been idle longest ends: the wake of its program waits for a new one."""
MOST_STARTING: Final = 2
"""Of one user; other requests wait.  A start costs the loop some milliseconds, and the machine a second of Python."""
READY: Final = b"ready\n"
KEPT: Final = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables of the environment.  Others may be secrets of the coordinator's user."""

Request = commands.Checkpoint | commands.Restore
End = events.Saved | events.Restored


@dataclass(slots=True)
class _Process:
    user_id: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    ready: bool = False
    """It has started."""
    request: Request | None = None
    deadline_ns: int = 0
    said: bytes = b""


@dataclass(slots=True)
class CheckpointProcesses:
    """All helpers, by client.  A source of the loop."""

    waiter: Waiter
    environment: Mapping[str, str]
    gpus: Collection[str]
    """UUIDs of those on which a process may be."""
    report: Callable[[End], None]
    """Gets the end of each request, also within `carry_out`."""
    clock: Callable[[], int] = time.monotonic_ns
    _helpers: dict[int, _Process] = field(default_factory=dict)
    _waiting: dict[int, Request] = field(default_factory=dict)
    """For a helper."""
    _clients: dict[int, int] = field(default_factory=dict)
    """By descriptor of the connection."""
    _killed: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """To be reaped."""

    def carry_out(self, command: commands.DriverCall) -> None:
        """Starts or ends the client's helper, or asks it."""
        if isinstance(command, commands.ExpectCheckpoint):
            with contextlib.suppress(OSError):  # else the request says so
                self._helper(command)
        elif isinstance(command, commands.ParkingOver):
            self._waiting.pop(command.client, None)
            self._end(command.client, "it is not needed any more")
        else:
            self._ask(command)

    def _ask(self, command: Request) -> None:
        try:
            helper = self._helper(command)
        except OSError as error:
            self.report(_end_of(command, f"no helper: {error.strerror}"))
            return
        if helper is None:
            self._waiting[command.client] = command
            return
        line = "save" if isinstance(command, commands.Checkpoint) else f"restore {command.home} {command.target}"
        helper.request, helper.deadline_ns = command, self.clock() + DEADLINE_NS
        try:
            helper.connection.send(line.encode() + b"\n")  # taken whole or not at all, because it is short
        except OSError:
            self._end(command.client, "its helper takes no request")

    def _helper(self, command: commands.ExpectCheckpoint | Request) -> _Process | None:
        """The client's helper, which is started if there is none; None: its user has too many.  Raises OSError."""
        client, user_id = command.client, command.user_id
        if client in self._helpers:
            return self._helpers[client]
        own = {each: helper for each, helper in self._helpers.items() if helper.user_id == user_id}
        if sum(not helper.ready for helper in own.values()) >= MOST_STARTING:
            return None
        if len(own) >= MOST_OF_USER:
            idle = next((each for each, helper in own.items() if helper.ready and helper.request is None), None)
            if idle is None:
                return None
            self._end(idle)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        words = [sys.executable, "-P", "-m", "nvshare.coordinator.system.checkpoints", str(command.process_id)]
        with theirs:
            process = subprocess.Popen(
                [*words, str(user_id)], env=self.environment, cwd="/", start_new_session=True,
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self.waiter.add(ours.fileno())
        self._clients[ours.fileno()] = client
        self._helpers[client] = made = _Process(user_id, process, ours)
        return made

    def _end(self, client: int, why: str = "", *, unsure: bool = True) -> None:
        """Kills the client's helper, if it has one; what it was asked ends for this reason.

        `unsure`: it may have begun what it was asked.
        """
        helper = self._helpers.pop(client, None)
        if helper is None:
            return
        del self._clients[helper.connection.fileno()]
        self.waiter.remove(helper.connection.fileno())
        helper.connection.close()
        helper.process.kill()
        self._killed.append(helper.process)
        if helper.request is not None:
            self.report(_end_of(helper.request, why, unsure=unsure))
        self._go_on(helper.user_id)

    def _go_on(self, user_id: int) -> None:
        """Asks for what had to wait, as far as there are helpers for it now."""
        for command in [each for each in self._waiting.values() if each.user_id == user_id]:
            if self._waiting.pop(command.client, None) is not None:
                self._ask(command)

    def serve(self, ready: set[int]) -> None:
        """Reads answers."""
        self._killed = [each for each in self._killed if each.poll() is None]
        for descriptor in self._clients.keys() & ready:
            self._read(self._clients[descriptor])

    def _read(self, client: int) -> None:
        helper = self._helpers[client]
        try:
            found = helper.connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        helper.said += found
        if not helper.ready and helper.said.startswith(READY):
            helper.ready, helper.said = True, helper.said.removeprefix(READY)
            self._go_on(helper.user_id)
        if not found:
            self._end(client, "its helper has ended", unsure=helper.ready or helper.said != b"")
        elif b"\n" in helper.said or len(helper.said) > MOST_BYTES:
            try:
                event = read_answer(helper.request, helper.said, self.gpus)
            except RemoteProtocolError as error:
                self._end(client, f"its helper has said {error}")
                return
            helper.request, helper.said = None, b""
            self.report(event)
            self._go_on(helper.user_id)

    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do."""
        return min((each.deadline_ns for each in self._helpers.values() if each.request is not None), default=None)

    def expire(self, now_ns: int) -> None:
        """Ends helpers that are late."""
        for client, helper in list(self._helpers.items()):
            if helper.request is not None and now_ns >= helper.deadline_ns:
                self._end(client, f"its helper waited longer than {DEADLINE_NS // 10**9} s for the driver")

    def close(self) -> None:
        """Ends the helpers.  What they have parked stays parked, until a coordinator wakes it."""
        self._waiting.clear()
        for client in list(self._helpers):
            self._end(client)


def read_answer(request: Request | None, said: bytes, gpus: Collection[str]) -> End:
    """The end of a request by the words of a helper.  Raises RemoteProtocolError."""
    word, _, rest = said.decode(errors="replace").removesuffix("\n").partition(" ")
    if request is None or len(said) > MOST_BYTES or said.find(b"\n") != len(said) - 1:
        raise RemoteProtocolError(f"too much: {printable(word)[:40]}")
    if word in ("failed", "lost") and rest:
        return _end_of(request, printable(rest), lost=word == "lost")
    if isinstance(request, commands.Checkpoint):
        gpus = ()
    elif request.target:
        gpus = (request.home, request.target)
    if word == "done" and rest in ("", *gpus):
        return _end_of(request, gpu=rest)
    raise RemoteProtocolError(printable(f"{word} {rest}")[:40])


def _end_of(request: Request, error: str = "", gpu: str = "", *, lost: bool = False, unsure: bool = False) -> End:
    if isinstance(request, commands.Checkpoint):
        return events.Saved(request.client, error, lost, unsure)
    return events.Restored(request.client, error, gpu, lost)
