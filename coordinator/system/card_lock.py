"""GPU locks: at most one coordinator schedules a GPU, whatever its directory or user.

A lock is an abstract Unix socket.  Any user can bind its name, the name ends with its process, and the kernel
identifies that process.  Connections are never accepted; they end with the holder, so that a coordinator can wait.

Limit: abstract names belong to a network namespace, so containers with networks of their own do not see each other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nvshare.coordinator.system.processes import peer_of
from nvshare.coordinator.system.users import user_name

log: Final = logging.getLogger("nvshare")

_SIMULATED: Final = "51a15eed"
"""Prefix of the UUIDs of simulated GPUs; see simulated_gpu/src/base/shared.c."""
_PAUSE_S: Final = 0.05
_COMMAND_BYTES: Final = 300


class CardHeldError(Exception):
    """Another coordinator schedules the GPU; the text names it and the remedy."""


def hold(uuids: Sequence[str], patience_s: float | None) -> list[socket.socket]:
    """Locks these GPUs; the open sockets are the locks.

    Raises CardHeldError for a GPU that is not free after `patience_s`; None waits forever.
    """
    give_up_at = None if patience_s is None else time.monotonic() + patience_s
    held: list[socket.socket] = []
    try:
        for uuid in sorted(uuids):  # a fixed order prevents deadlocks between coordinators
            held.append(_hold(uuid, give_up_at))  # noqa: PERF401 (a failure closes the sockets so far)
    except BaseException:
        for each in held:
            each.close()
        raise
    return held


def _hold(uuid: str, give_up_at: float | None) -> socket.socket:
    logged = ""
    while (lock := _bind(uuid)) is None:
        with socket.socket(socket.AF_UNIX) as holder:
            holder.setblocking(False)
            connected = holder.connect_ex(_name(uuid)) == 0
            text = f"{uuid} is scheduled by {_describe(holder) if connected else 'an unknown process'}"
            left_s = None if give_up_at is None else give_up_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise CardHeldError(f"{text}; stop that coordinator, or use it: nvshare-run --runtime-dir")
            if text != logged:
                log.warning("%s; waiting for its end", text)
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


def _name(uuid: str) -> str:
    """The socket's name.  Simulated GPUs have equal UUIDs everywhere, so their name includes their state file."""
    state = ""
    if uuid.partition("-")[2].startswith(_SIMULATED):
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
