"""The thread between launchers, the machine and the control daemon.

A launcher connects to `mps.sock`, sends its program's class, and gets one answer.  The program inherits the connection,
whose end is the end of the program.

Invariants: the coordinator's loop never waits for this thread, except at the coordinator's end.  The thread sleeps
without a timer while nothing changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.system.mps.daemon import ControlDaemon, DaemonError
from nvshare.coordinator.system.mps.machine import Action, Answer, CountClients, Machine, Note, Phase, Quit, Start
from nvshare.coordinator.system.processes import peer_of

log: Final = logging.getLogger("nvshare")

WARNING: Final = (
    "MPS is allowed (same_user): programs of one user at a time run side by side; a fault of one ends the others, and "
    "their memory is not isolated from faults"
)
MAX_CONNECTIONS: Final = 512
MAX_CONNECTIONS_PER_USER: Final = 128
MAX_REQUEST_BYTES: Final = 64
BEST_EFFORT: Final = "best-effort"
SHARES: Final = {BEST_EFFORT: (1, 90)}
"""Class -> CUDA_MPS_CLIENT_PRIORITY (1 is lower) and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE."""
_FULL: Final = (0, 100)

Publish = Callable[[str, dict[str, Any]], None]
"""Publishes a trace event (kind, values); from any thread."""


@dataclass(slots=True)
class _Program:
    connection: socket.socket
    user: int
    job_class: str | None = None
    """None before its request."""


class Mps:
    """MPS of one coordinator.  `start` it once, `close` it once."""

    def __init__(
        self,
        socket_path: Path,
        daemon: ControlDaemon,
        publish: Publish,
        *,
        all_users: bool,
        cause_off: str | None = None,
    ) -> None:
        """`cause_off`: a reason for which this coordinator refuses every program."""
        self._path = socket_path
        self._daemon = daemon
        self._publish = publish
        self._all_users = all_users
        self._cause_off = cause_off
        self._machine = Machine(owner=os.geteuid(), all_users=all_users)
        self._programs: dict[int, _Program] = {}
        self._poller = select.poll()
        self._stopping = False
        self._keep = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="mps", daemon=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)

    def start(self) -> None:
        """Opens the socket, and adopts the daemon of an earlier coordinator.  Raises OSError."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o111 if self._all_users else 0o177)
        try:
            self._listener.bind(os.fspath(self._path))
        finally:
            os.umask(before)
        self._listener.setblocking(False)
        self._listener.listen(128)
        for descriptor in (self._listener.fileno(), self._wake_read):
            self._poller.register(descriptor, select.POLLIN)
        log.warning("%s", WARNING)
        self._thread.start()

    def close(self, *, keep_daemon: bool = False) -> None:
        """Ends the thread and the daemon.  `keep_daemon`: leave the daemon to a coordinator that follows at once."""
        self._keep, self._stopping = keep_daemon, True
        if self._thread.is_alive():
            os.write(self._wake_write, b"\0")
            self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for program in self._programs.values():
            program.connection.close()
        self._daemon.forget()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)

    def status(self) -> dict[str, Any]:
        """The present state, for nvshare-ctl; from any thread."""
        machine = self._machine
        phase, problem = machine.phase, self._cause_off or machine.problem
        idle = phase is Phase.IDLE or (phase is Phase.WAITING and not machine.programs)
        state = "refused" if problem is not None and idle else phase.value
        return {
            "mode": "same_user",
            "state": state,
            "user": machine.user,
            "programs": len(machine.programs),
            "reason": problem,
            "pipe_directory": str(self._daemon.pipe_directory),
        }

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
            while not self._stopping:
                self._turn()
            if not self._keep:
                self._do(self._machine.stop())
        except Exception:
            log.exception("MPS has failed; programs run without it")
            self._cause_off = "an internal error; see the coordinator's log"
            self._listener.close()

    def _begin(self) -> None:
        found = self._daemon.adopt()
        if found is not None:
            self._watch()
            self._do(self._machine.adopted(found[0], quitting=found[1], now_ns=time.monotonic_ns()))
        elif (problem := self._cause_off or self._daemon.obstacle()) is not None:
            self._machine.problem = problem
            self._do([Note("refused", f"MPS is not available, programs run without it: {problem}", is_problem=True)])

    def _turn(self) -> None:
        due_ns = self._machine.deadline_ns
        timeout_ms = None if due_ns is None else max(0, -(-(due_ns - time.monotonic_ns()) // 1_000_000))
        for descriptor, _ in self._poller.poll(timeout_ms):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._daemon.pidfd:
                self._unwatch()
                self._daemon.forget()
                self._do(self._machine.died(time.monotonic_ns()))
            elif descriptor in self._programs:
                self._read(descriptor)
        self._do(self._machine.tick(time.monotonic_ns()))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the launcher is gone, or no descriptor is free
            return
        connection.setblocking(False)
        _, user = peer_of(connection)
        of_user = sum(program.user == user for program in self._programs.values())
        if len(self._programs) >= MAX_CONNECTIONS or of_user >= MAX_CONNECTIONS_PER_USER:
            connection.close()
            return
        self._programs[connection.fileno()] = _Program(connection, user)
        self._poller.register(connection, select.POLLIN)

    def _read(self, descriptor: int) -> None:
        program = self._programs[descriptor]
        try:
            request = program.connection.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if request == b"" or program.job_class is not None:  # its end, or more than the one request
            self._poller.unregister(descriptor)
            del self._programs[descriptor]
            program.connection.close()
            self._do(self._machine.left(descriptor, time.monotonic_ns()))
            return
        program.job_class = request.decode("ascii", "replace")
        if self._cause_off is not None:
            self._do([Answer(descriptor, f"{self._cause_off}; the program runs without MPS")])
        else:
            self._do(self._machine.asks(descriptor, program.user))

    # --- actions ------------------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        """Carries out the actions, and those that follow from their results."""
        for action in actions:
            self._do(self._carry_out(action))

    def _carry_out(self, action: Action) -> list[Action]:
        if isinstance(action, Start):
            return self._start(action.user)
        if isinstance(action, CountClients):
            return self._machine.counted(self._count())
        if isinstance(action, Quit):
            return self._quit(action)
        if isinstance(action, Answer):
            self._answer(action)
        else:
            log.log(logging.WARNING if action.is_problem else logging.INFO, "%s", action.text)
            self._publish("mps", {"state": action.state, "text": action.text})
        return []

    def _start(self, user: int) -> list[Action]:
        try:
            self._daemon.start(user)
        except DaemonError as error:
            return self._machine.failed(str(error), time.monotonic_ns())
        self._watch()
        return self._machine.started(time.monotonic_ns())

    def _count(self) -> int:
        try:
            return self._daemon.clients()
        except DaemonError as error:
            log.warning("%s; the daemon is stopped", error)
            return 0

    def _quit(self, action: Quit) -> list[Action]:
        self._unwatch()
        if action.wait:
            self._daemon.stop()
            return self._machine.ended()
        with contextlib.suppress(DaemonError, OSError):
            self._daemon.quit_later()
        return []

    def _answer(self, action: Answer) -> None:
        program = self._programs[action.program]
        priority, percentage = SHARES.get(program.job_class or "", _FULL)
        joined = f"joined\n{priority}\n{percentage}\n{self._daemon.pipe_directory}"
        text = joined if action.refusal is None else f"refused\n{action.refusal}"
        with contextlib.suppress(OSError):  # the launcher is gone; its end follows
            program.connection.send(text.encode("utf-8", "surrogateescape"))

    def _watch(self) -> None:
        if self._daemon.pidfd is not None:
            self._poller.register(self._daemon.pidfd, select.POLLIN)

    def _unwatch(self) -> None:
        if self._daemon.pidfd is not None:
            self._poller.unregister(self._daemon.pidfd)
