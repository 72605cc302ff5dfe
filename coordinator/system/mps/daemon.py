"""The process of the MPS control daemon: start, commands, end.  It runs as the user that it serves.

The server is started with it, so that a server that cannot start is a refusal and not a program that fails.
Invariants: every wait is bounded.  A process of another user, or of another name, is not taken for the daemon.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.system.mps.obstacles import BINARY, find_binary, find_obstacle

START_TIMEOUT_S: Final = 15.0
"""Longest start of the daemon and its server together; a server initialises CUDA on every card."""
COMMAND_TIMEOUT_S: Final = 5.0
_PAUSE_S: Final = 0.05


class DaemonError(Exception):
    """The daemon does not start, or does not answer; the text is one sentence with the remedy."""


class ControlDaemon:
    """The control daemon of one directory.  At most one runs at a time."""

    def __init__(self, directory: Path, environ: Mapping[str, str], *, real_cards: bool) -> None:
        self.pipe_directory = directory / "pipe"
        self.pidfd: int | None = None
        """Readable when the daemon has ended; None without a daemon."""
        self.user = os.geteuid()
        self._directory, self._log_directory = directory, directory / "log"
        self._environ, self._real_cards = environ, real_cards

    def obstacle(self) -> str | None:
        """The obstacle to a daemon's start."""
        return find_obstacle(self.pipe_directory, self._environ, real_cards=self._real_cards)

    def find(self) -> bool:
        """Finds the running daemon: the process of the pid file, if its user owns the directory."""
        try:
            process_id = int((self.pipe_directory / f"{BINARY}.pid").read_text(encoding="ascii"))
            pidfd = os.pidfd_open(process_id)
        except (OSError, ValueError):
            return False
        with contextlib.suppress(OSError):
            entry = Path(f"/proc/{process_id}")
            user, name = entry.stat().st_uid, (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
            if name == BINARY[:15] and user == self.pipe_directory.stat().st_uid:
                self.pidfd, self.user = pidfd, user
                return True
        os.close(pidfd)
        return False

    def start(self, user: int) -> None:
        """Starts the daemon and its server.  Raises DaemonError."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        if (obstacle := self.obstacle()) is not None:
            raise DaemonError(obstacle)
        self.user = user
        try:
            self._directory.mkdir(mode=0o755, exist_ok=True)
            self._directory.chmod(0o755)  # whatever the umask
            for path in (self.pipe_directory, self._log_directory):
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(mode=0o700)
                if user != os.geteuid():
                    os.chown(path, user, -1)
        except OSError as error:
            raise DaemonError(f"{error.filename}: {error.strerror}; choose another --runtime-dir") from None
        with (output := self._directory / "start.log").open("w+b") as file:  # a daemon may inherit it
            done = self._run(["-d"], COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        if done.returncode != 0:
            why = output.read_text(encoding="utf-8", errors="replace").strip()[-200:]
            raise DaemonError(f"{BINARY} -d failed: {why}; see {self._log_directory}")
        try:
            while not self.find():
                self._pause(deadline_s, f"{BINARY} does not start")
            self.command(f"start_server -uid {user}", START_TIMEOUT_S)
            while not self.command("get_server_list").strip():
                self._pause(deadline_s, "the MPS server does not start")
        except DaemonError:
            self.quit(wait=True)
            self.forget()
            raise

    def quit(self, *, wait: bool) -> None:
        """Tells the daemon to end with its last client.  `wait`: for its end, for a bounded time."""
        with contextlib.suppress(DaemonError):
            self.command("quit")
        if wait and self.pidfd is not None:
            select.select([self.pidfd], [], [], COMMAND_TIMEOUT_S)

    def forget(self) -> None:
        """The daemon is no longer this coordinator's concern, or has ended."""
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.pidfd = None

    def _pause(self, deadline_s: float, what: str) -> None:
        if time.monotonic() > deadline_s or (self.pidfd is not None and select.select([self.pidfd], [], [], 0)[0]):
            raise DaemonError(f"{what}; see {self._log_directory}")
        time.sleep(_PAUSE_S)

    def command(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """The daemon's answer.  Raises DaemonError."""
        done = self._run([], timeout_s, input=f"{command}\n".encode(), capture_output=True)
        answer = (done.stdout + done.stderr).decode("utf-8", "replace").strip()
        if done.returncode != 0:
            why = answer[-200:] or f"exit code {done.returncode}"
            raise DaemonError(f"the MPS control daemon refuses `{command}`: {why}; see {self._log_directory}")
        return answer

    def _run(self, words: list[str], timeout_s: float, **streams: Any) -> subprocess.CompletedProcess[bytes]:
        """The daemon's program, as its user, who gets the groups of the user database.  Raises DaemonError."""
        left_out = ("CUDA_", "NVSHARE_", "LD_PRELOAD")
        env = {name: value for name, value in self._environ.items() if not name.startswith(left_out)}
        env |= {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory), "CUDA_MPS_LOG_DIRECTORY": str(self._log_directory)}
        try:
            if self.user != os.geteuid():
                entry = pwd.getpwuid(self.user)
                groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
                streams |= {"user": self.user, "group": entry.pw_gid, "extra_groups": groups}
            command = [find_binary(self._environ) or BINARY, *words]
            streams |= {"timeout": timeout_s, "start_new_session": True, "cwd": "/", "env": env}
            return subprocess.run(command, check=False, **streams)
        except KeyError:
            raise DaemonError(f"user {self.user} has no entry in the user database; add the user") from None
        except subprocess.TimeoutExpired:
            raise DaemonError(f"{BINARY} does not answer; see {self._log_directory}") from None
        except OSError as error:
            raise DaemonError(f"{BINARY}: {error.strerror}; check the installation of the driver") from None
