"""The process of the web page (coordinator/web): started, restarted after a crash, and ended with the coordinator.

Invariants: the listening socket belongs to the coordinator, so the port stays the same over restarts.  The page's
process ends when the coordinator's end of a pipe closes, however the coordinator ends.  The coordinator's loop does
nothing for the page: one thread of its own waits for the process.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nvshare.coordinator.system.extras import install_command

log: Final = logging.getLogger("nvshare")

ADDRESS: Final = "127.0.0.1"
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
LONG_ENOUGH_S: Final = 60.0
"""Run time after which a crash counts as the first one."""
END_S: Final = 3.0
MIN_TOKEN_LENGTH: Final = 16
MAX_TOKEN_BYTES: Final = 1024


class WebError(ValueError):
    """The page cannot be served; the text names the remedy."""


def check_installed() -> None:
    """Raises WebError where the extra `web` is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise WebError(f"--web-port needs more packages; install them: {install_command('web')}")


def read_token(path: Path) -> str:
    """The token in a file that only its owner reads.  Raises WebError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            content = file.read(MAX_TOKEN_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise WebError(f"--web-token-file: {path}: {error.strerror}") from None
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
        raise WebError(f"--web-token-file: {path} is open to other users: chmod 600 {path}")
    token = content.decode("ascii", "replace").strip()
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise WebError(
            f"--web-token-file: {path} needs one line of at least {MIN_TOKEN_LENGTH} ASCII characters: "
            f"openssl rand -hex 16 > {path}"
        )
    return token


def listen(port: int) -> socket.socket:
    """The page's listening socket.  Raises WebError."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((ADDRESS, port))
        made.listen(64)
    except OSError as error:
        made.close()
        raise WebError(f"the page on {ADDRESS}:{port}: {error.strerror}; choose another --web-port") from None
    return made


class WebProcess:
    """The page's process, from `start` to `close`."""

    def __init__(self, listener: socket.socket, options: Sequence[str]) -> None:
        """`options` are those of `nvshare.coordinator.web.main`."""
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._options = list(options)
        self._alive_read, self._alive_write = os.pipe2(os.O_CLOEXEC)
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="web", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            ended = self._run_once()
            if self._closing.is_set():
                return
            if time.monotonic() - began >= LONG_ENOUGH_S:
                pause_s = FIRST_PAUSE_S
            log.warning("the page's process ended (%s); it is started again in %g s", ended, pause_s)
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _run_once(self) -> str:
        """Runs the process to its end and says how it ended."""
        inherited = (self._listener.fileno(), self._alive_read)
        command = [sys.executable, "-P", "-m", "nvshare.coordinator.web.main", *self._options]
        command += ["--listener", str(inherited[0]), "--alive", str(inherited[1])]
        try:
            # A session of its own: Ctrl-C at the coordinator's terminal reaches the page through the pipe alone.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True
            )
        except OSError as error:
            return str(error.strerror)
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Ends the process; kills it when it does not end by itself."""
        self._closing.set()
        os.close(self._alive_write)
        self._thread.join(END_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(END_S)
        self._listener.close()
        os.close(self._alive_read)
