"""Keys of a terminal, one at a time and without an echo."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Final, Self

_SEQUENCES: Final = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}


def keys(read: str) -> list[str]:
    """The keys in what a terminal sent: `up`, `down`, `escape` or a character.  Other sequences are dropped."""
    found = []
    while read:
        if read[0] != "\x1b":
            found.append(read[0])
            read = read[1:]
        elif read[:3] in _SEQUENCES:
            found.append(_SEQUENCES[read[:3]])
            read = read[3:]
        else:
            return found + ["escape"] * (read == "\x1b")
    return found


class Keyboard:
    """Standard input in cbreak mode, and as it was afterwards.  Without a terminal there are no keys."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, timeout_s: float) -> list[str]:
        """The keys until the first ones come or the time is over.  A closed terminal is `q`."""
        source = [sys.stdin] if self._before is not None else []
        if not select.select(source, [], [], max(0.0, timeout_s))[0]:
            return []
        read = os.read(sys.stdin.fileno(), 64)
        return keys(read.decode(errors="replace")) if read else ["q"]
