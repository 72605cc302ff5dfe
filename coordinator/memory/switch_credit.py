"""The bound on the cost of switches of memory: at most a fifth of the time, with a reserve for bursts.

A GPU earns a quarter of the time in which a client runs, up to `MOST_NS`, and pays for each switch the time that it
waited for memory.  While it owes, no member gives way to a client whose memory must come in first.  So whatever a
policy or an operator's quantum asks for, switching takes at most `MOST_NS` and a fifth of the time.
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.settings import SECOND_NS

EARNED: Final = 0.25
MOST_NS: Final = 2 * SECOND_NS
LOG_AGAIN_NS: Final = 60 * SECOND_NS


def _update(gpu: Gpu, now_ns: int) -> None:
    credit, clock_ns = gpu.switching.credit, gpu.turn_clock_ns(now_ns)
    credit.credit_ns = min(MOST_NS, credit.credit_ns + EARNED * (clock_ns - credit.at_ns))
    credit.at_ns = clock_ns


def pay(gpu: Gpu, cost_ns: int, now_ns: int) -> None:
    """A switch has waited for memory for this time."""
    _update(gpu, now_ns)
    gpu.switching.credit.credit_ns -= cost_ns


def lacking_ns(gpu: Gpu, now_ns: int) -> int:
    """Time that a client must run before memory may move again for another one; 0: it may now."""
    _update(gpu, now_ns)
    return max(0, int(-gpu.switching.credit.credit_ns / EARNED))


def is_news(gpu: Gpu, now_ns: int) -> bool:
    """Whether the operator should be told that switches are held back."""
    last_ns = gpu.switching.credit.logged_at_ns
    if last_ns is not None and now_ns < last_ns + LOG_AGAIN_NS:
        return False
    gpu.switching.credit.logged_at_ns = now_ns
    return True
