"""Waiting in tests: for a condition, with a bound, never for a time.

Non-goals: anything that knows what is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BOUND_S = 240.0
"""Longest wait for anything: only a fault takes so long, however busy the machine is."""

_never = threading.Event()


def eventually(condition: Callable[[], T], what: str, seconds: float = BOUND_S) -> T:
    """The first true value of `condition`, which is asked again and again; fails the test when the bound passes."""
    deadline = time.monotonic() + seconds
    pause_s = 0.001
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        _never.wait(pause_s)
        pause_s = min(2 * pause_s, 0.02)
