"""Facts about processes from the kernel: the peer of a socket, whether the hook is loaded, and the reason if not."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

HOOK: Final = "libnvshare_hook.so"
_PROC: Final = Path("/proc")
_CREDENTIALS: Final = struct.Struct("=iII")


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Process and user id of the peer of a Unix socket.  A process outside this PID namespace has id 0."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user_id, _ = _CREDENTIALS.unpack(credentials)
    return process_id, user_id


def end_process(process_id: int, *, kill: bool) -> None:
    """Ends a process by SIGTERM, or by SIGKILL.  Raises OSError.

    Uses a pidfd: the caller knows that the process lives, and its id could be reused before the signal is sent.
    """
    descriptor = os.pidfd_open(process_id)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL if kill else signal.SIGTERM)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process.  `readable` False: it belongs to another user, and all after `readable` is unknown."""

    process_id: int
    program: str
    user_id: int
    readable: bool = True
    hooked: bool = False
    uses_cuda: bool = False
    loader: str = "glibc"
    """`glibc`, `musl` or `static`."""
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.program}, user {self.user_id})"

    def has_set(self, variable: str) -> bool:
        """Whether a variable that is a switch is on."""
        return self.environ.get(variable, "0") not in ("", "0")


def read_process(process_id: int, proc: Path = _PROC) -> ProcessFacts | None:
    """The facts of a process; None if there is none.  The environment is that of its start."""
    folder = proc / str(process_id)
    try:
        user_id = folder.stat().st_uid
        program = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    program = "".join(c if c.isprintable() else "?" for c in program)
    try:
        maps = (folder / "maps").read_text(encoding="utf-8", errors="replace")
        content = (folder / "environ").read_bytes()
    except OSError:
        return ProcessFacts(process_id, program, user_id, readable=False)
    pairs = (entry.partition("=") for entry in content.decode(errors="replace").split("\0"))
    return ProcessFacts(
        process_id,
        program,
        user_id,
        hooked=HOOK in maps,
        uses_cuda="libcuda.so" in maps,
        loader="musl" if "/ld-musl" in maps else "glibc" if "/ld-linux" in maps or "/ld-2." in maps else "static",
        environ={name: value for name, _, value in pairs if name},
    )
