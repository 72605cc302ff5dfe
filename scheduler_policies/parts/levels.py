"""Exclusive turns by level: the jobs of the lowest level take turns and preempt all others.  No job starves.

Rule: turns rotate within the lowest level (parts/turns.py).  A job that has waited for the limit is *starved*: it has
the next turn, the one that has waited longest first, and keeps it.  The limit is 60 s, or `QUANTA` quanta if longer.
Bound: with n clients a job waits at most the limit and n quanta: at most n - 1 jobs have waited longer, and one turn
may have begun.  So in each span of the limit each job that waits takes one turn from the lowest level.

The engine replaces a policy that lets a job wait much longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import GpuView, JobView, Plan
from nvshare.scheduler_policies.parts.turns import AHEAD, TurnPolicy, going_on, one_turn, split

PATIENCE_NS: Final = 60_000_000_000
QUANTA: Final = 6


class LevelPolicy(TurnPolicy):
    """A subclass says the level of each job."""

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The level of each job; the least is first."""
        raise NotImplementedError

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """A turn that goes on and is not preempted, then a starved job, then turns within the lowest level."""
        active, waiting = split(jobs)
        both = self.keys(jobs, now_ns)
        held, keys = both[: len(active)], both[len(active) :]
        end = min(both)
        top = [job for job, key in zip(waiting, keys, strict=True) if key == end]
        since_ns = [now_ns if (at_ns := job.turn.waiting_since_ns) is None else at_ns for job in waiting]
        running = going_on(active, gpu.quantum_ns, now_ns)
        if running is not None and (mine := held[active.index(running)]) > end:
            before_ns = [at_ns for key, at_ns in zip(keys, since_ns, strict=True) if key < mine]
            running = None if _is_preempted(gpu, running, before_ns, now_ns) else running
        following = (
            self.turns.following(top, running or next(iter((*active, *gpu.draining)), None)) if top else waiting[:AHEAD]
        )
        job = running or (
            following[0] if top else next(job for job, key in zip(active, held, strict=True) if key == end)
        )
        if running is None and since_ns and now_ns - min(since_ns) >= waiting_limit_ns(gpu):
            job = waiting[since_ns.index(min(since_ns))]
        return one_turn(job, gpu.quantum_ns, following, len(waiting))

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """The bound of the module's docstring."""
        return waiting_limit_ns(gpu) + clients * gpu.quantum_ns


def _is_preempted(gpu: GpuView, running: JobView, before_ns: Sequence[int], now_ns: int) -> bool:
    """Whether jobs of lower levels preempt the turn; `before_ns`: since when they wait.

    The turn of a starved job goes on: it had not run for the limit when it was named, although such jobs waited.
    """
    turn = running.turn
    named_at_ns = now_ns if turn.granted_at_ns is None else turn.granted_at_ns
    since_ns = turn.attached_at_ns if turn.last_released_ns is None else turn.last_released_ns
    return bool(before_ns) and (min(before_ns) > named_at_ns or named_at_ns - since_ns < waiting_limit_ns(gpu))


def waiting_limit_ns(gpu: GpuView) -> int:
    """The longest wait before a job counts as starved."""
    return max(PATIENCE_NS, QUANTA * gpu.quantum_ns)
