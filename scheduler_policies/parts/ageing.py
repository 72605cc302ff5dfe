"""Against starvation: a job that has waited long has a turn before all others, the one that has waited longest first.

Bound: with n clients a job waits at most the limit and n turns: at most n - 1 have waited longer, and one turn may have
begun.  Nothing preempts such a turn.  So in each span of the limit each job that waits takes one turn from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nvshare.scheduler_policies.api import GpuView, JobView

PATIENCE_NS: Final = 60_000_000_000
_QUANTA: Final = 10


def limit_ns(gpu: GpuView) -> int:
    """The longest wait before a job counts as starved."""
    return max(PATIENCE_NS, _QUANTA * gpu.quantum_ns)


def starved(gpu: GpuView, waiting: Sequence[JobView], now_ns: int) -> JobView | None:
    """The job that has waited longest, if it is starved."""
    since_ns = [job.turn.waiting_since_ns or now_ns for job in waiting]
    if not since_ns or now_ns - min(since_ns) < limit_ns(gpu):
        return None
    return waiting[since_ns.index(min(since_ns))]


def is_preempted(
    gpu: GpuView, running: JobView, waiting: Sequence[JobView], before: Callable[[JobView], bool], now_ns: int
) -> bool:
    """Whether a job that goes before the running one has come during its turn.

    If one waited already when the running job was named, the running job was starved, and keeps its turn.
    """
    granted_at_ns = running.turn.granted_at_ns
    if granted_at_ns is None:
        is_starved = now_ns - (running.turn.waiting_since_ns or now_ns) >= limit_ns(gpu)
        return not is_starved and any(before(job) for job in waiting)
    since_ns = [job.turn.waiting_since_ns or now_ns for job in waiting if before(job)]
    return bool(since_ns) and min(since_ns) > granted_at_ns


def wait_bound_ns(clients: int, gpu: GpuView) -> int:
    """The bound of the module's docstring."""
    return limit_ns(gpu) + clients * gpu.quantum_ns
