"""Linux's inotify: hear of changes in a directory without looking again and again.

Invariants: `read` never blocks; names come as the kernel gives them; after an overflow `overflowed` is true and the
caller must look for itself.

May not go here: what a change means.
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
    """One entry of a watched directory came, went or changed.  `watch` is what `add` returned."""

    watch: int
    mask: int
    name: str


class Inotify:
    """One instance.  Raises OSError when the system has no more to give (fs.inotify.max_user_instances)."""

    def __init__(self) -> None:
        self.descriptor: Final = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")
        self.overflowed = False

    def add(self, directory: Path, mask: int) -> int:
        """Watches a directory; the same one again is the same watch.  Raises OSError: it is gone, or the system has no
        more watches."""
        path = os.fsencode(directory)
        return _checked(_libc.inotify_add_watch(self.descriptor, path, mask | ONLY_DIRECTORY), str(directory))

    def remove(self, watch: int) -> None:
        """Of no effect when the directory is gone: its watch went with it."""
        _libc.inotify_rm_watch(self.descriptor, watch)

    def read(self) -> list[Change]:
        """What happened since; sets `overflowed` when the kernel lost some of it."""
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
