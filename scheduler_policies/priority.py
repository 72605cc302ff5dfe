"""Strict priorities with ageing: a higher priority runs first and preempts at once, without starvation.

Source: multilevel priority scheduling with ageing (Silberschatz, Galvin, Gagne: "Operating System Concepts").
Rule: exclusive turns rotate within the highest priority (parts/turns.py).  A *favour* is a turn for the job that has
waited longest, and for age_quanta quanta at least; no priority preempts it.  Favours begin in slots: once in
age_quanta + 1 units of the clock, where a unit is the quantum, rounded up to a power of two so that small changes of an
automatic quantum do not move the slots.
Bound: a job waits at most age_quanta quanta and n (age_quanta + 1) units, with n clients: then at most n - 1 jobs have
waited longer, and each slot serves one, which then has waited least.  In the long run favours take one quantum of each
age_quanta + 1 units.

Only a higher priority preempts, so two jobs never preempt each other in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nvshare.scheduler_policies.api import GpuView, Happened, JobView, Plan, PolicyBase
from nvshare.scheduler_policies.parts.turns import AHEAD, OwnerTurns, going_on, one_turn, split


class Priority(PolicyBase):
    """Keeps the last turn of each owner."""

    name = "priority"

    def __init__(self, age_quanta: int = 20) -> None:
        assert age_quanta >= 1
        self._age_quanta = age_quanta
        self._turns = OwnerTurns()

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """A favoured turn that goes on, then a favour that is due, then turns within the highest priority."""
        quantum_ns = gpu.quantum_ns
        period_ns = (self._age_quanta + 1) * _unit(quantum_ns)
        active, waiting = split(jobs)
        running = going_on(active, quantum_ns, now_ns)
        highest = max([job.rank.priority for job in jobs])
        top = [job for job in waiting if job.rank.priority == highest]
        following = self._turns.following(top, running or next(iter(active), None)) if top else waiting[:AHEAD]
        favoured = None
        if waiting and now_ns % period_ns < quantum_ns // 2:
            oldest = min(waiting, key=_waiting_since)
            favoured = oldest if self._is_aged(oldest, quantum_ns, now_ns) else None
        if running is not None and running.rank.priority < highest:
            running = running if self._is_favoured(running, waiting, quantum_ns, now_ns) else None
            favoured = running or favoured
        job = favoured or running or (following[0] if top else _first(active, highest))
        plan = one_turn(job, quantum_ns, following, len(waiting))
        if len(waiting) > len(top):  # a favour may be due in the next slot
            return replace(plan, ask_again_ns=(now_ns // period_ns + 1) * period_ns)
        return plan

    def observe(self, happened: Happened) -> None:
        """Notes a turn of the job's owner."""
        self._turns.observe(happened)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of the module's docstring."""
        return self._age_quanta * gpu.quantum_ns + clients * (self._age_quanta + 1) * _unit(gpu.quantum_ns)

    def _is_aged(self, job: JobView, quantum_ns: int, now_ns: int) -> bool:
        return now_ns - _waiting_since(job) >= self._age_quanta * quantum_ns

    def _is_favoured(self, job: JobView, waiting: Sequence[JobView], quantum_ns: int, now_ns: int) -> bool:
        """Whether a job was named although a higher priority waited: it has aged, or was granted just after a slot."""
        granted_at_ns = job.turn.granted_at_ns
        if granted_at_ns is None:
            return self._is_aged(job, quantum_ns, now_ns)
        return granted_at_ns % (
            (self._age_quanta + 1) * _unit(quantum_ns)
        ) < self._age_quanta * quantum_ns // 2 and any(
            other.rank.priority > job.rank.priority and _waiting_since(other) <= granted_at_ns for other in waiting
        )


def _unit(quantum_ns: int) -> int:
    return 1 << (quantum_ns - 1).bit_length()


def _waiting_since(job: JobView) -> int:
    since_ns = job.turn.waiting_since_ns
    return job.turn.attached_at_ns if since_ns is None else since_ns


def _first(active: Sequence[JobView], priority: int) -> JobView:
    return next(job for job in active if job.rank.priority == priority)
