"""GPU locks: at most one coordinator schedules a GPU, whatever its directory or user.

A lock is an abstract Unix socket.  Any user can bind its name, the name ends with its process, and the kernel
identifies that process.  Connections are never accepted; they end with the holder, so that a coordinator can wait.

Root's coordinator also locks a file that only root can open, so no other user can keep it from a card: it waits for
another user's process for `OVERRULE_S`, then serves without the name and says so.

Limit: abstract names belong to a network namespace, so containers with networks of their own do not see each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

from nvshare.coordinator.system.processes import peer_of
from nvshare.coordinator.system.users import user_name

log: Final = logging.getLogger("nvshare")

_SIMULATED: Final = "51a15eed"
"""Prefix of the UUIDs of simulated GPUs; see simulated_gpu/src/base/state_file.c."""
_PAUSE_S: Final = 0.05
OVERRULE_S: Final = 5.0
_FOLDER: Final = Path("/run/nvshare-cards")
_COMMAND_BYTES: Final = 300
_REMEDY: Final = "stop that coordinator, or use it: nvshare-run --runtime-dir"


class CardHeldError(Exception):
    """Another coordinator schedules the GPU; the text names it and the remedy."""


def hold(
    uuids: Sequence[str], patience_s: float | None, waits: Callable[[str], None] = lambda _: None
) -> list[socket.socket | FileIO]:
    """Locks these GPUs; the open sockets and files are the locks.  `waits` is told who holds one, and the remedy.

    Raises CardHeldError for a GPU that is not free after `patience_s`; None waits forever.
    """
    give_up_at = None if patience_s is None else time.monotonic() + patience_s
    held: list[socket.socket | FileIO] = []
    try:
        for uuid in sorted(uuids):  # a fixed order prevents deadlocks between coordinators
            name = _hold(uuid, give_up_at, waits)
            held += [] if name is None else [name]
            file = _lock_file(uuid)
            held += [] if file is None else [file]
    except BaseException:
        for each in held:
            each.close()
        raise
    return held


def _hold(uuid: str, give_up_at: float | None, waits: Callable[[str], None]) -> socket.socket | None:
    """The bound name; None where root overrules its holder."""
    logged, overrule_at = "", time.monotonic() + OVERRULE_S
    while (lock := _bind(uuid)) is None:
        with socket.socket(socket.AF_UNIX) as holder:
            holder.setblocking(False)
            connected = holder.connect_ex(_name(uuid)) == 0
            text = f"{uuid} is scheduled by {_describe(holder) if connected else 'an unknown process'}"
            left_s = None if give_up_at is None else give_up_at - time.monotonic()
            if os.geteuid() == 0 and not (connected and peer_of(holder)[1] == 0):
                if time.monotonic() >= overrule_at:
                    log.warning("%s, which does not end; serving beside it: stop that process", text)
                    return None
                left_s = min(overrule_at - time.monotonic(), math.inf if left_s is None else left_s)
            if left_s is not None and left_s <= 0:
                raise CardHeldError(f"{text}; {_REMEDY}")
            if text != logged:
                log.warning("%s; waiting for its end", text)
                waits(f"{text}; {_REMEDY}")
                logged = text
            if not connected:
                left_s = _PAUSE_S if left_s is None else min(_PAUSE_S, left_s)
            select.select([holder] if connected else [], [], [], left_s)
    return lock


def _bind(uuid: str) -> socket.socket | None:
    """The bound socket; None when another process holds the name."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(_name(uuid))
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise CardHeldError(f"{uuid}: cannot take the GPU's lock: {error.strerror}") from None
    lock.listen(socket.SOMAXCONN)
    return lock


def _lock_file(uuid: str) -> FileIO | None:
    """Root's lock; None for other users.  A simulated GPU belongs to its coordinator's directory."""
    path = _FOLDER / uuid
    if _is_simulated(uuid) or os.geteuid() != 0:
        return None
    try:
        _FOLDER.mkdir(mode=0o755, exist_ok=True)
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CardHeldError(f"{uuid} is scheduled by another coordinator of root; stop it, or use it") from None
    except OSError as error:  # a container without a writable /run
        log.warning("root's lock of the GPU is unusable: %s: %s", path, error.strerror)
        return None
    return file


def _is_simulated(uuid: str) -> bool:
    return uuid.partition("-")[2].startswith(_SIMULATED)


def _name(uuid: str) -> str:
    """The socket's name.  Simulated GPUs have equal UUIDs everywhere, so their name includes their state file."""
    state = ""
    if _is_simulated(uuid):
        path = os.path.realpath(os.environ.get("NVSHARE_SIM_STATE") or f"/proc/{os.getpid()}")
        state = "/" + hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return f"\0nvshare/card/{uuid}{state}"


def _describe(holder: socket.socket) -> str:
    process_id, user_id = peer_of(holder)
    name = user_name(user_id)
    user = name if name == str(user_id) else f"{name} ({user_id})"
    if process_id == 0:  # in a foreign PID namespace
        return f"a process of another container, of user {user}"
    command = b""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()[:_COMMAND_BYTES]
    words = "".join(c if c.isprintable() else " " for c in command.decode("utf-8", "replace")).strip()
    return f"process {process_id} of user {user}: {words or 'unreadable command line'}"
