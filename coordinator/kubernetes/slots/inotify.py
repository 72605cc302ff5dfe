"""Linux inotify: reports changes in directories.

Invariants: `read` never blocks.  After a lost event `overflowed` is true, and the caller must scan the directory.

Non-goals: the meaning of a change.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CREATE: Final = 0x100
DELETE: Final = 0x200
MOVED_FROM: Final = 0x40
MOVED_TO: Final = 0x80
ONLY_DIRECTORY: Final = 0x01000000
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_HEADER: Final = struct.Struct("=iIII")
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one entry in a watched directory.  `watch` is the number that `add` returned."""

    watch: int
    mask: int
    name: str


class Inotify:
    """One inotify instance.  Raises OSError beyond the system's limit (fs.inotify.max_user_instances)."""

    def __init__(self) -> None:
        self.descriptor: Final = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")
        self.overflowed = False

    def add(self, directory: Path, mask: int) -> int:
        """Watches a directory; a watched one keeps its number.  Raises OSError if it is missing or watches run out."""
        path = os.fsencode(directory)
        return _checked(_libc.inotify_add_watch(self.descriptor, path, mask | ONLY_DIRECTORY), str(directory))

    def remove(self, watch: int) -> None:
        """Removes a watch; no effect after the directory's removal, which removed the watch too."""
        _libc.inotify_rm_watch(self.descriptor, watch)

    def read(self) -> list[Change]:
        """The changes since the last read; sets `overflowed` if the kernel dropped any."""
        found: list[Change] = []
        try:
            data = os.read(self.descriptor, 65_536)
        except BlockingIOError:
            return found
        at = 0
        while at + _HEADER.size <= len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length
            if mask & _OVERFLOW:
                self.overflowed = True
            elif not mask & _IGNORED:
                found.append(Change(watch, mask, name))
        return found

    def close(self) -> None:
        os.close(self.descriptor)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
