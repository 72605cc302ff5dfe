"""Interrupts a policy of another package that takes too long.  Main thread only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

LIMIT_S: Final = 0.2


def possible() -> bool:
    """Whether this thread may set a timer that interrupts it."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raises TimeoutError in the block after this time."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {round(1000 * seconds)} ms")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
