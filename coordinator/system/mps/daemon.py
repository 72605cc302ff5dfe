"""The process of one MPS control daemon: start, watch, commands, stop.

The daemon runs as the user that it serves, with a pipe and a log directory of its own.  The server is started with it,
so that a server that cannot start is a refusal and not a program that fails.

Invariants: every wait is bounded.  A signal goes only to a process of that user with the daemon's name.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.system.journal import start_time
from nvshare.coordinator.system.mps.obstacles import BINARY, find_binary, find_obstacle

START_TIMEOUT_S: Final = 15.0
"""Longest start of the daemon and its server together; a server initialises CUDA on every card."""
COMMAND_TIMEOUT_S: Final = 5.0
QUIT_TIMEOUT_S: Final = 5.0
KILL_TIMEOUT_S: Final = 2.0
_PAUSE_S: Final = 0.05


class DaemonError(Exception):
    """The daemon does not start, or does not answer; the text is one sentence with the remedy."""


class ControlDaemon:
    """The control daemon of one directory.  At most one runs at a time."""

    def __init__(self, directory: Path, environ: Mapping[str, str], *, real_cards: bool) -> None:
        self.directory = directory
        self.pipe_directory = directory / "pipe"
        self.log_directory = directory / "log"
        self.pidfd: int | None = None
        """Readable when the daemon has ended; None without a daemon."""
        self._environ = environ
        self._real_cards = real_cards
        self._user = os.geteuid()
        self._servers: set[tuple[int, int | None]] = set()
        """Process id and start time of each server, also of a daemon that died."""

    def obstacle(self) -> str | None:
        """The obstacle to a daemon's start."""
        return find_obstacle(self.pipe_directory, self._environ, real_cards=self._real_cards)

    def adopt(self) -> tuple[int, bool] | None:
        """Finds the daemon of an earlier coordinator: its user, and whether it was told to quit."""
        if not self._open():
            return None
        with contextlib.suppress(DaemonError):
            self._note_servers()
        return self._user, self._quitting.exists()

    def start(self, user: int) -> None:
        """Starts the daemon and its server.  Raises DaemonError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        if (obstacle := self.obstacle()) is not None:
            raise DaemonError(obstacle)
        self._user = user
        try:
            self._prepare()
        except OSError as error:
            raise DaemonError(f"{error.filename}: {error.strerror}; choose another --runtime-dir") from None
        self._launch()
        try:
            self._until_open(deadline)
            self._command(f"start_server -uid {user}", START_TIMEOUT_S)
            self._until_server(deadline)
        except DaemonError:
            self.stop()
            raise

    def clients(self) -> int:
        """Number of client processes.  Raises DaemonError."""
        self._note_servers()
        alive = [pid for pid, started in self._servers if start_time(pid) == started]
        return sum(len(_numbers(self._command(f"get_client_list {pid}"))) for pid in alive)

    def quit_later(self) -> None:
        """Lets the daemon end with its last client; a later coordinator sees that it was told to."""
        self._quitting.touch()
        asking = subprocess.Popen(
            [self._binary()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, cwd="/", **self._identity(),
        )  # fmt: skip
        assert asking.stdin is not None
        with contextlib.suppress(OSError):
            asking.stdin.write(b"quit\n")
            asking.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            asking.wait(_PAUSE_S)
        self.forget()

    def stop(self) -> None:
        """Ends the daemon and all its servers: by `quit`, then by signals."""
        with contextlib.suppress(DaemonError):
            self._note_servers()
            self._command("quit")
        if self.pidfd is not None and not _ends(self.pidfd, QUIT_TIMEOUT_S):
            _end(self.pidfd)
        self.forget()
        self._end_servers()

    def forget(self) -> None:
        """The daemon is no longer this coordinator's concern, or has ended."""
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.pidfd = None

    # --- process ------------------------------------------------------------------------------------------------------

    @property
    def _quitting(self) -> Path:
        return self.directory / "quitting"

    def _prepare(self) -> None:
        """Makes empty pipe and log directories of the user."""
        self.directory.mkdir(mode=0o755, exist_ok=True)
        self.directory.chmod(0o755)  # whatever the umask
        self._quitting.unlink(missing_ok=True)
        for path in (self.pipe_directory, self.log_directory):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700)
            if self._user != os.geteuid():
                os.chown(path, self._user, -1)

    def _open(self) -> bool:
        """Opens the process that the pid file names, if it is a daemon and its user may own this directory."""
        try:
            process_id = int((self.pipe_directory / f"{BINARY}.pid").read_text(encoding="ascii"))
            pidfd = os.pidfd_open(process_id)
        except (OSError, ValueError):
            return False
        try:
            entry = Path(f"/proc/{process_id}")
            user = entry.stat().st_uid
            fits = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip() == BINARY[:15]
            fits = fits and user == self.pipe_directory.stat().st_uid
        except OSError:
            fits = False
        if not fits:
            os.close(pidfd)
            return False
        self.pidfd, self._user = pidfd, user
        return True

    def _until_open(self, deadline: float) -> None:
        while not self._open():
            if time.monotonic() > deadline:
                raise DaemonError(f"{BINARY} does not start; see {self.log_directory / 'control.log'}")
            time.sleep(_PAUSE_S)

    def _until_server(self, deadline: float) -> None:
        assert self.pidfd is not None
        while not self._note_servers():
            if time.monotonic() > deadline or _ends(self.pidfd, _PAUSE_S):
                why = self._last_line("server.log") or self._last_line("control.log") or "no message"
                raise DaemonError(f"the MPS server does not start ({why}); see {self.log_directory}")

    def _note_servers(self) -> bool:
        """Remembers the daemon's servers.  Whether it has any.  Raises DaemonError."""
        found = {(pid, start_time(pid)) for pid in _numbers(self._command("get_server_list"))}
        found = {server for server in found if server[1] is not None}
        self._servers |= found
        return bool(found)

    def _end_servers(self) -> None:
        """Ends servers that outlived their daemon."""
        for process_id, started in self._servers:
            try:
                pidfd = os.pidfd_open(process_id)
            except OSError:
                continue
            with contextlib.suppress(OSError):
                own = Path(f"/proc/{process_id}").stat().st_uid == self._user
                if own and start_time(process_id) == started:
                    _end(pidfd)
            os.close(pidfd)
        self._servers.clear()

    # --- commands -----------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Runs the binary with -d.  The daemon may inherit its output, which is a file.  Raises DaemonError."""
        output = self.directory / "start.log"
        with output.open("w+b") as file:
            code = self._run(["-d"], COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
        if code != 0:
            lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            why = lines[-1][:200] if lines else f"exit code {code}"
            raise DaemonError(f"{BINARY} -d failed: {why}; see {self.log_directory}")

    def _command(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """The daemon's answer.  Raises DaemonError."""
        done = self._run([], timeout_s, input=f"{command}\n".encode(), capture_output=True)
        answer = (done.stdout + done.stderr).decode("utf-8", "replace").strip()
        if done.returncode != 0:
            why = answer[-200:] or f"exit code {done.returncode}"
            raise DaemonError(f"the MPS control daemon refuses `{command}`: {why}; see {self.log_directory}")
        return answer

    def _run(self, words: list[str], timeout_s: float, **streams: Any) -> subprocess.CompletedProcess[bytes]:
        command, where = [self._binary(), *words], self._identity()
        try:
            return subprocess.run(
                command, check=False, timeout=timeout_s, start_new_session=True, cwd="/", **where, **streams
            )
        except subprocess.TimeoutExpired:
            raise DaemonError(f"{BINARY} does not answer; see {self.log_directory}") from None
        except OSError as error:
            raise DaemonError(f"{BINARY}: {error.strerror}; check the installation of the driver") from None

    def _binary(self) -> str:
        found = find_binary(self._environ)
        if found is None:
            raise DaemonError(f"{BINARY} is no longer in PATH; install it again")
        return found

    def _identity(self) -> dict[str, Any]:
        """Environment of the daemon; as root also its user and groups.  Raises DaemonError."""
        left_out = ("CUDA_", "NVSHARE_", "LD_PRELOAD")
        env = {name: value for name, value in self._environ.items() if not name.startswith(left_out)}
        env["CUDA_MPS_PIPE_DIRECTORY"] = str(self.pipe_directory)
        env["CUDA_MPS_LOG_DIRECTORY"] = str(self.log_directory)
        if self._user == os.geteuid():
            return {"env": env}
        try:
            entry = pwd.getpwuid(self._user)
        except KeyError:
            raise DaemonError(f"user {self._user} has no entry in the user database; add the user") from None
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
        return {"env": env, "user": self._user, "group": entry.pw_gid, "extra_groups": groups}

    def _last_line(self, name: str) -> str:
        try:
            lines = (self.log_directory / name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:200] if lines else ""


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdecimal()]


def _end(pidfd: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
        if _ends(pidfd, KILL_TIMEOUT_S):
            return


def _ends(pidfd: int, timeout_s: float) -> bool:
    """Whether a process ends within this time."""
    return bool(select.select([pidfd], [], [], timeout_s)[0])
