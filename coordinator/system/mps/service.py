"""The thread between launchers and the control daemon, which starts with the coordinator.

A coordinator of all users starts it for the first user whose program asks.  A launcher connects to `mps.sock` and gets
one answer.  A program that joins inherits the connection, whose end is the program's.

Invariants: the coordinator's loop never waits for this thread, except at the coordinator's end.  The daemon is started
once; after its death programs run without MPS.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.system.mps.daemon import ControlDaemon, DaemonError
from nvshare.coordinator.system.processes import peer_of

log: Final = logging.getLogger("nvshare")

WARNING: Final = "MPS is allowed (same_user): a fault of one ends the others, whose memory it may reach"
MAX_PROGRAMS: Final = 48
"""Client processes of one GPU that every driver since Volta allows; newer ones allow 60."""
Publish = Callable[[str, dict[str, Any]], None]


class Mps:
    """MPS of one coordinator.  `start` it once, `close` it once."""

    def __init__(
        self, path: Path, daemon: ControlDaemon, publish: Publish, *, all_users: bool, cause_off: str | None = None
    ) -> None:
        """`publish` takes a trace event, from any thread.  `cause_off`: a reason to refuse every program."""
        self._path, self._daemon, self._publish, self._all_users = path, daemon, publish, all_users
        self._state, self._user, self._problem = "idle", None if all_users else os.geteuid(), cause_off
        self._programs: dict[int, socket.socket] = {}
        self._poller = select.poll()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mps", daemon=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)

    def start(self) -> None:
        """Opens the socket; the daemon's start follows.  Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._listener.bind(os.fspath(self._path))
        self._path.chmod(0o666 if self._all_users else 0o600)
        self._listener.listen(128)  # nobody connects before
        self._poller.register(self._listener, select.POLLIN)
        log.warning("%s", WARNING)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and the daemon with its last client."""
        self._stopping = True
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes it
            self._thread.join()
        self._path.unlink(missing_ok=True)
        for connection in (self._listener, *self._programs.values()):
            connection.close()
        self._daemon.forget()

    def status(self) -> dict[str, Any]:
        """The present state, for nvshare-ctl; from any thread."""
        found = {"mode": "same_user", "state": self._state, "user": self._user, "programs": len(self._programs)}
        return found | {"reason": self._problem, "pipe_directory": str(self._daemon.pipe_directory)}

    def _run(self) -> None:
        try:
            if self._problem is None and self._daemon.find():
                self._user = self._daemon.user
                self._say("draining", "the MPS daemon of an earlier coordinator ends with its last client")
                self._daemon.quit(wait=False)
                self._watch()
            elif (problem := self._problem or self._daemon.obstacle()) is not None:
                self._refuse(problem)
            elif self._user is not None:
                self._launch(self._user)
            while not self._stopping:
                for descriptor, _ in self._poller.poll():
                    self._turn(descriptor)
            if self._state == "ready":
                self._daemon.quit(wait=not self._programs)
        except Exception:
            log.exception("MPS has failed; programs run without it")
            self._state, self._problem = "refused", "an internal error; see the coordinator's log"
            self._listener.close()

    def _turn(self, descriptor: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor == self._daemon.pidfd:
            self._poller.unregister(descriptor)
            self._daemon.forget()
            if self._state == "ready":
                self._refuse(f"the MPS daemon died; {len(self._programs)} programs may fail; restart the coordinator")
            elif self._all_users:
                self._state, self._user = "idle", None
            else:
                self._launch(os.geteuid())
        elif descriptor in self._programs:
            self._poller.unregister(descriptor)
            self._programs.pop(descriptor).close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the launcher is gone, no descriptor is free, or the end
            return
        refusal = self._refusal(peer_of(connection)[1])
        text = f"joined\n{self._daemon.pipe_directory}" if refusal is None else f"refused\n{refusal}"
        with contextlib.suppress(OSError):  # the launcher is gone; its end follows
            connection.send(text.encode("utf-8", "surrogateescape"), socket.MSG_DONTWAIT)
        if refusal is None:
            self._programs[connection.fileno()] = connection
            self._poller.register(connection, 0)  # its end alone
        else:
            connection.close()

    def _refusal(self, user: int) -> str | None:
        """Why a program of `user` cannot join."""
        if self._state == "idle":
            self._launch(user)
        if self._state == "draining":
            return "the MPS daemon of an earlier coordinator still has clients; MPS starts after the last one"
        if self._problem is not None:
            return self._problem
        if user != self._user:
            return f"MPS serves user {self._user} until the coordinator ends: several users cannot share a server"
        return f"MPS has {MAX_PROGRAMS} programs, its limit" if len(self._programs) >= MAX_PROGRAMS else None

    def _launch(self, user: int) -> None:
        self._state, self._user = "starting", user
        try:
            self._daemon.start(user)
        except DaemonError as error:
            self._refuse(str(error))
        else:
            self._watch()
            self._say("ready", f"MPS is ready for user {user}")

    def _watch(self) -> None:
        if self._daemon.pidfd is not None:
            self._poller.register(self._daemon.pidfd, select.POLLIN)

    def _refuse(self, problem: str) -> None:
        self._problem = problem
        self._say("refused", f"MPS is not available, programs run without it: {problem}")

    def _say(self, state: str, text: str) -> None:
        self._state = state
        log.log(logging.WARNING if state == "refused" else logging.INFO, "%s", text)
        self._publish("mps", {"state": state, "text": text})
