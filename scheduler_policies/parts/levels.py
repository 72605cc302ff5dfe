"""Exclusive turns by level: the jobs of the lowest level take turns and preempt all others.  No job starves.

Rule: turns rotate within the lowest level (parts/turns.py).  A *favour* is a turn for the job that has waited longest,
and for `AGE` quanta at least; no level preempts it.  Favours begin in slots: once in AGE + 1 units of the clock, where
a unit is the quantum, rounded up to a power of two so that small changes of an automatic quantum do not move the slots.
Bound: a job waits at most AGE quanta and n (AGE + 1) units, with n clients: then at most n - 1 jobs have waited longer,
and each slot serves one, which then has waited least.  In the long run favours take one quantum of each AGE + 1 units.

Only a lower level preempts, so two jobs never preempt each other in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nvshare.scheduler_policies.api import GpuView, JobView, Plan
from nvshare.scheduler_policies.parts.turns import AHEAD, TurnPolicy, going_on, one_turn, split

AGE: Final = 20


class LevelPolicy(TurnPolicy):
    """A subclass says the key of each job, and which keys are on one level."""

    def keys(self, jobs: Sequence[JobView], now_ns: int) -> list[int]:
        """The key of each job; the least is first."""
        raise NotImplementedError

    def last_key(self, key: int) -> int:
        """The last key of the level that `key` is on."""
        return key

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """A favoured turn that goes on, then a favour that is due, then turns within the lowest level."""
        quantum_ns = gpu.quantum_ns
        period_ns = (AGE + 1) * _unit(quantum_ns)
        active, waiting = split(jobs)
        held, keys = self.keys(active, now_ns), self.keys(waiting, now_ns)
        end = self.last_key(min([*held, *keys]))
        top = [job for job, key in zip(waiting, keys, strict=True) if key <= end]
        running = going_on(active, quantum_ns, now_ns)
        following = self.turns.following(top, running or next(iter(active), None)) if top else waiting[:AHEAD]
        if running is not None and (key := held[active.index(running)]) > end:
            before = [job for job, other in zip(waiting, keys, strict=True) if self.last_key(other) < key]
            favoured = running = running if _is_favoured(running, before, quantum_ns, now_ns) else None
        else:
            favoured = None
        if favoured is None and waiting and now_ns % period_ns < quantum_ns // 2:
            oldest = min(waiting, key=_waiting_since)
            is_served = running is not None and _was_favoured(running, oldest, now_ns // period_ns * period_ns)
            favoured = oldest if _is_aged(oldest, quantum_ns, now_ns) and not is_served else None
        first = following[0] if top else next(job for job, key in zip(active, held, strict=True) if key <= end)
        plan = one_turn(favoured or running or first, quantum_ns, following, len(waiting))
        if len(waiting) > len(top):  # a favour may be due in the next slot
            return replace(plan, ask_again_ns=(now_ns // period_ns + 1) * period_ns)
        return plan

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of the module's docstring."""
        return AGE * gpu.quantum_ns + clients * (AGE + 1) * _unit(gpu.quantum_ns)


def _is_favoured(job: JobView, before: Sequence[JobView], quantum_ns: int, now_ns: int) -> bool:
    """Whether a job was named although others were before it: it has aged, or was granted just after a slot."""
    granted_at_ns = job.turn.granted_at_ns
    if granted_at_ns is None:
        return _is_aged(job, quantum_ns, now_ns)
    since_slot_ns = granted_at_ns % ((AGE + 1) * _unit(quantum_ns))
    return since_slot_ns < AGE * quantum_ns // 2 and any(_waiting_since(other) <= granted_at_ns for other in before)


def _was_favoured(job: JobView, oldest: JobView, slot_ns: int) -> bool:
    """Whether the job has the favour of the slot that began at `slot_ns`."""
    if job.turn.granted_at_ns is None:
        return _waiting_since(job) <= _waiting_since(oldest)
    return job.turn.granted_at_ns >= slot_ns


def _is_aged(job: JobView, quantum_ns: int, now_ns: int) -> bool:
    return now_ns - _waiting_since(job) >= AGE * quantum_ns


def _unit(quantum_ns: int) -> int:
    return 1 << (quantum_ns - 1).bit_length()


def _waiting_since(job: JobView) -> int:
    since_ns = job.turn.waiting_since_ns
    return job.turn.attached_at_ns if since_ns is None else since_ns
