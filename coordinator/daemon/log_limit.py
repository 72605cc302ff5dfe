"""Bounds the log: programs cause lines, such as warnings about their memory, and connect again and again.

Errors always pass.  The first line after a gap tells how many are missing.
"""

from __future__ import annotations

import logging
from typing import Final

AT_ONCE: Final = 100
PER_S: Final = 5


class LogLimit(logging.Filter):
    """Passes `AT_ONCE` lines, and `PER_S` more each second."""

    def __init__(self) -> None:
        super().__init__()
        self._left, self._at_s, self._missing = float(AT_ONCE), 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        self._left = min(AT_ONCE, self._left + PER_S * max(0.0, record.created - self._at_s))
        self._at_s = record.created
        if self._left < 1 and record.levelno < logging.ERROR:
            self._missing += 1
            return False
        self._left = max(0.0, self._left - 1)
        if self._missing:
            record.msg = f"{record.getMessage()} ({self._missing} lines before this one were left out)"
            record.args, self._missing = (), 0
        return True
