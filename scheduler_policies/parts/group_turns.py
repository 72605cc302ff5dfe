"""Turns of groups: each runs for one quantum a member, then the next one.

The turn of a group of several begins when the last of the others has released: members that come late or return run
until the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nvshare.scheduler_policies.api import JobView, Plan, State
from nvshare.scheduler_policies.parts.turns import OwnerTurns, split

LEAST_NS: Final = 1_000_000
Group = tuple[JobView, ...]


class GroupTurn(NamedTuple):
    """The present turn: the quanta of the members, those of other groups, and who follows."""

    quanta: dict[int, int]
    waiting: frozenset[int]
    order: tuple[int, ...] = ()


def next_turn(groups: Sequence[Group], turns: OwnerTurns, quantum_ns: int, now_ns: int) -> GroupTurn:
    """The group whose turn goes on, else that of the next program in turn order."""
    if not groups:
        return GroupTurn({}, frozenset())
    jobs = sorted((job for group in groups for job in group), key=lambda job: (not job.state, job.turn.number))
    active, waiting = split(jobs)
    ends = [_end_ns(group, jobs, quantum_ns, now_ns) for group in groups]
    going_on = [place for place, group in enumerate(groups) if _goes_on(group, ends[place], now_ns)]
    coming = [place for place in going_on if any(job.state is State.COMING for job in groups[place])]
    place = next(iter(coming or going_on), None)
    following = turns.following(waiting, None if place is None else groups[place][0])
    if place is None:
        first = following[0] if following else active[0]
        place = next(place for place, group in enumerate(groups) if first in group)
        ends[place] = now_ns + len(groups[place]) * quantum_ns
    group = groups[place]
    quanta = {job.client: _quantum_ns(job, group, ends[place], quantum_ns, now_ns) for job in group}
    others = frozenset(job.client for job in jobs if job.client not in quanta)
    return GroupTurn(quanta, others, tuple(job.client for job in following if job.client in others))


def turn_of(plan: Plan, takers: Sequence[JobView]) -> GroupTurn:
    """The turn that a plan gives, as that of a group."""
    quanta = {one.client: one.quantum_ns for one in plan.running if one.quantum_ns is not None}
    return GroupTurn(quanta, frozenset(job.client for job in takers if job.client not in quanta), plan.order)


def _goes_on(group: Group, end_ns: int, now_ns: int) -> bool:
    states = {job.state for job in group}
    return State.COMING in states or (State.RUNNING in states and now_ns < end_ns)


def _end_ns(group: Group, jobs: Sequence[JobView], quantum_ns: int, now_ns: int) -> int:
    """When the group's turn ends, if it is its turn."""
    if len(group) == 1:
        job = group[0]
        return (job.turn.began_ns if job.state is State.RUNNING else now_ns) + quantum_ns
    others = [job for job in jobs if job not in group]
    began_ns = max(job.turn.last_released_ns or job.turn.attached_at_ns for job in others)
    return began_ns + len(group) * quantum_ns


def _quantum_ns(job: JobView, group: Group, end_ns: int, quantum_ns: int, now_ns: int) -> int:
    """The length of the job's own turn such that it ends with the group's."""
    if len(group) == 1:
        return quantum_ns
    began_ns = job.turn.began_ns if job.state is State.RUNNING else now_ns
    return max(LEAST_NS, end_ns - began_ns)
