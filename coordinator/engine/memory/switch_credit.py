"""The bound on the cost of switches of memory: at most a fifth of the time, with a reserve for bursts.

A GPU earns a quarter of the time in which a client runs, up to `MOST_NS`.  It pays for each switch the time in which
the switch waited for memory and no client ran.  While it owes, no member gives way to a client whose memory must come
in first.  So whatever a policy or an operator's quantum asks for, switching takes at most `MOST_NS` and a fifth of the
time.
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
    """A switch has waited for memory for this time while no client ran."""
    _update(gpu, now_ns)
    gpu.switching.credit.credit_ns -= cost_ns


def lacking_ns(gpu: Gpu, now_ns: int, *, urgent: bool = False) -> int:
    """Time that a client must run before memory may move again for another one; 0: it may now.

    Half of the reserve is for `urgent` clients, for which somebody waits.
    """
    _update(gpu, now_ns)
    least_ns = 0 if urgent else MOST_NS // 2
    return max(0, int((least_ns - gpu.switching.credit.credit_ns) / EARNED))


def is_news(gpu: Gpu, now_ns: int) -> bool:
    """Whether the operator should be told that switches are held back."""
    last_ns = gpu.switching.credit.logged_at_ns
    if last_ns is not None and now_ns < last_ns + LOG_AGAIN_NS:
        return False
    gpu.switching.credit.logged_at_ns = now_ns
    return True
