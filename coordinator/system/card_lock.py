"""One coordinator a card, whatever directory or user it has: a name in the kernel for each card.

The name is that of an abstract Unix socket: any user can bind it, it ends with the process that has it, and the kernel
says which process that is.  Connections to it are never accepted; they end with the holder, so that a coordinator can
wait for that end.

Limits: abstract names belong to a network namespace, so containers with networks of their own do not see each other.

May not go here: which cards there are (system/devices.py), the lock of a runtime directory (system/runtime_dir.py).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import pwd
import select
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

log: Final = logging.getLogger("nvshare")

_CREDENTIALS: Final = struct.Struct("=iII")
_SIMULATED: Final = "51a15eed"
"""How the UUIDs of simulated cards begin; see simulated_gpu/src/base/state_file.c."""
_PAUSE_S: Final = 0.05
_COMMAND_BYTES: Final = 300


class CardHeldError(Exception):
    """Another coordinator schedules the card; the text names it and the remedy."""


def hold(uuids: Sequence[str], patience_s: float | None) -> list[socket.socket]:
    """Sockets that hold these cards as long as they are open.  None: waits without a bound.

    Raises CardHeldError when a card is not free after `patience_s`.
    """
    give_up_at = None if patience_s is None else time.monotonic() + patience_s
    held: list[socket.socket] = []
    try:
        for uuid in sorted(uuids):  # in one order, so that two coordinators never wait for each other
            held.append(_hold(uuid, give_up_at))  # noqa: PERF401 (those at hand are closed on failure)
    except BaseException:
        for each in held:
            each.close()
        raise
    return held


def _hold(uuid: str, give_up_at: float | None) -> socket.socket:
    told = ""
    while (lock := _bind(uuid)) is None:
        with socket.socket(socket.AF_UNIX) as rival:
            rival.setblocking(False)
            connected = rival.connect_ex(_name(uuid)) == 0
            text = f"{uuid} is scheduled by {_describe(rival) if connected else 'a process that cannot be told'}"
            left_s = None if give_up_at is None else give_up_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise CardHeldError(f"{text}; stop that coordinator, or use it: nvshare-run --runtime-dir")
            if text != told:
                log.warning("%s; waiting for its end", text)
                told = text
            if not connected:
                left_s = _PAUSE_S if left_s is None else min(_PAUSE_S, left_s)
            select.select([rival] if connected else [], [], [], left_s)
    return lock


def _bind(uuid: str) -> socket.socket | None:
    """None: somebody has the name."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(_name(uuid))
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise CardHeldError(f"{uuid}: its lock cannot be taken: {error.strerror}") from None
    lock.listen(socket.SOMAXCONN)
    return lock


def _name(uuid: str) -> str:
    """Simulated cards have the same UUIDs everywhere; what tells them apart is the file that holds their state."""
    state = ""
    if uuid.partition("-")[2].startswith(_SIMULATED):
        path = os.path.realpath(os.environ.get("NVSHARE_SIM_STATE") or f"/proc/{os.getpid()}")
        state = "/" + hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return f"\0nvshare/card/{uuid}{state}"


def _describe(rival: socket.socket) -> str:
    process_id, user_id, _ = _CREDENTIALS.unpack(
        rival.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    user = str(user_id)
    with contextlib.suppress(KeyError):
        user = f"{pwd.getpwuid(user_id).pw_name} ({user_id})"
    if process_id == 0:  # of a PID namespace that this one does not see
        return f"a process of another container, of user {user}"
    command = b""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()[:_COMMAND_BYTES]
    words = "".join(c if c.isprintable() else " " for c in command.decode("utf-8", "replace")).strip()
    return f"process {process_id} of user {user}: {words or 'its command line cannot be read'}"
