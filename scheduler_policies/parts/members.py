"""The allotment of each member of a running set, by its class, its shares and the active jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nvshare.scheduler_policies.api import Allotment, JobClass, JobView, Plan, State
from nvshare.scheduler_policies.parts.harvest import Harvest

MOST: Final = 16
"""Members of a running set."""
ACTIVE_NS: Final = 200_000_000
"""A job is active for this time after its last work: two reports."""
PACING_NS: Final = 1_000_000
"""Unfinished work of others while an interactive job is active, in turns.  Where the card itself slices its time it
costs the others, and does not shorten a slice."""
_LEAST_CAP: Final = 0.05
_EVER_NS: Final = 1 << 62
_INTERACTIVE: Final = JobClass.INTERACTIVE


def active_until_ns(job: JobView) -> int:
    """A job that runs is active for a while after its last report or grant."""
    if job.state is not State.RUNNING:
        return _EVER_NS
    reported_ns = job.progress.measured_at_ns if job.progress.rate > 0.0 else 0
    return max(reported_ns, job.turn.granted_at_ns or 0) + ACTIVE_NS


def is_active(job: JobView, now_ns: int) -> bool:
    """Whether it works.  A job that never reports is taken for active."""
    return active_until_ns(job) > now_ns or not job.progress.measured_at_ns


def has_its_part(job: JobView) -> bool:
    """An interactive job that wants at most half of the GPU: it has that beside another one, and only its requests wait
    for slices."""
    return job.rank.job_class is _INTERACTIVE and job.progress.busy_alone <= 0.5


def allot(
    members: Sequence[JobView],
    spare: Sequence[JobView],
    quanta: Mapping[int, int],
    harvest: Harvest,
    now_ns: int,
) -> Plan:
    """The members, then the spare jobs at the harvest's rate.

    A limit is a rate.  A request of more than an equal part caps the rates of the others.
    """
    any_active = any(active_until_ns(job) > now_ns for job in members)
    urgent_ns = max([active_until_ns(job) for job in members if job.rank.job_class is _INTERACTIVE], default=0)
    pacing_ns = PACING_NS if urgent_ns > now_ns and quanta else None
    requests = [job.rank.share_request for job in members if job.rank.share_request * len(members) > 1.0]
    cap = max(_LEAST_CAP, (1.0 - sum(requests)) / max(1, len(members) - len(requests))) if requests else 1.0
    running = [
        Allotment(
            job.client,
            quanta.get(job.client),
            min(job.rank.share_limit, 1.0 if job.rank.share_request else cap),
            None if job.rank.job_class is _INTERACTIVE else pacing_ns,
        )
        for job in members
    ]
    bare_ns = harvest.bare_until_ns(now_ns) if any_active and spare else None
    rate = harvest.rate if any_active else 1.0
    if bare_ns is None:
        running += [
            Allotment(job.client, quanta.get(job.client), min(rate, job.rank.share_limit), pacing_ns) for job in spare
        ]
    again_ns = [end_ns for end_ns in (urgent_ns, bare_ns or 0) if now_ns < end_ns < _EVER_NS]
    return Plan(tuple(running), ask_again_ns=min(again_ns, default=None))
