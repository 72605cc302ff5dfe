"""Interrupts a policy of another package that takes too long.  Main thread only.

Rules:
- A policy has `LIMIT_S` for one call, and `SHARE` of the time in all.  Unspent time is kept up to `KEPT_S`.
- It has `KEPT_S` to be imported and made.  It is never freed: a destructor runs wherever the last reference ends.
- The exception is no `Exception`, and it comes again until the call has returned: a policy that swallows it meets it
  again wherever it goes on.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeVar

from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import Policy

LIMIT_S: Final = 0.2
SHARE: Final = 0.1
KEPT_S: Final = 1.0
_AGAIN_S: Final = 0.00001
_LEAST_S: Final = 0.001

T = TypeVar("T")


class PolicyTimeoutError(BaseException):
    """The call took too long."""


def possible() -> bool:
    """Whether this thread may set a timer that interrupts it."""
    return threading.current_thread() is threading.main_thread()


class TimeLimit:
    """The time of one policy."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._left_s = KEPT_S
        self._at_s = time.monotonic()

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of `call`.  Raises PolicyTimeoutError in it when its time is over."""
        began_s = time.monotonic()
        self._left_s = min(KEPT_S, self._left_s + SHARE * (began_s - self._at_s))
        limit_s = max(_LEAST_S, min(self._limit_s, self._left_s))

        returned = False

        def interrupt(_number: int, frame: FrameType | None) -> None:
            if returned:
                return
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            if frame is None or frame.f_code in (_CALL, interrupt.__code__):  # not in the policy
                return
            whole = "" if limit_s == self._limit_s else f", the rest of {SHARE:.0%} of the time"
            raise PolicyTimeoutError(f"it took longer than {round(1000 * limit_s)} ms{whole}")

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            return call()
        finally:
            returned = True
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            self._at_s = time.monotonic()
            self._left_s -= self._at_s - began_s


_CALL: Final = TimeLimit.__call__.__code__


def make_policy(name: str, uuid: str) -> Policy:
    """`registry.create`, limited for a policy of another package.  Raises its errors."""
    if name in registry.BUILT_IN or not possible():
        return registry.create(name, uuid)
    try:
        policy = TimeLimit(KEPT_S)(lambda: registry.create(name, uuid))
    except BaseException as error:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))  # its frames may have a half-made policy
        raise registry.BrokenPolicyError(str(error)) from error
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(policy))  # no destructor runs, at the end of the process either
    return policy
