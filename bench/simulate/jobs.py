"""Synthetic mixes of jobs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from nvshare.bench.virtual_node.node import Job
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.scheduler_policies.api import JobClass

GIB: Final = 1 << 30
USERS: Final = 12
_SPREAD: Final = 1.6
"""Sigma of the lognormal lengths: the longest twentieth of the jobs has about half of the work."""
_LONGEST_S: Final = 8 * 3600.0
_KINDS: Final = (
    # weight, class, busy share from, to, works for s and waits for s in turns
    (0.35, JobClass.BATCH, 1.0, 1.0, 0.0, 0.0),  # training that saturates the card
    (0.20, JobClass.BATCH, 0.6, 0.9, 0.0, 0.0),  # training that waits for its data or for launches
    (0.20, JobClass.BATCH, 0.1, 0.4, 0.0, 0.0),  # decoding, small models
    (0.15, JobClass.INTERACTIVE, 0.3, 1.0, 20.0, 60.0),  # a notebook
    (0.10, JobClass.BEST_EFFORT, 0.5, 1.0, 0.0, 0.0),
)
_MEMORY_GIB: Final = ((2, 0.25), (6, 0.3), (12, 0.2), (24, 0.15), (48, 0.1))


def synthetic(count: int, gpus: int, hours: float, load: float, seed: int) -> list[Job]:
    """A mix of five kinds of jobs that arrive at random moments; their lengths are heavy-tailed.

    `load`: what the jobs keep busy alone, over what the GPUs have in these hours.
    """
    chance = random.Random(seed)
    arrivals = sorted(chance.uniform(0.0, hours * 3600.0) for _ in range(count))
    drawn = [_draw(chance, number, at_s, gpus) for number, at_s in enumerate(arrivals)]
    return scaled(drawn, load * gpus * hours * 3600.0)


def scaled(jobs: Sequence[Job], busy_s: float) -> list[Job]:
    """The same jobs, longer or shorter, such that together they keep a card busy for this time."""
    factor = busy_s * SECOND_NS / sum(job.work_ns * job.busy * job.gpus for job in jobs)
    return [replace(job, work_ns=max(SECOND_NS, round(job.work_ns * factor))) for job in jobs]


def _draw(chance: random.Random, number: int, at_s: float, gpus: int) -> Job:
    ((_, job_class, low, high, burst_s, think_s),) = chance.choices(_KINDS, [kind[0] for kind in _KINDS])
    busy = round(chance.uniform(low, high), 3)
    members = chance.choices((1, 2, 4), (0.9, 0.07, 0.03))[0] if low == 1.0 else 1
    length_s = min(_LONGEST_S, 300.0 * chance.lognormvariate(0.0, _SPREAD))
    (memory_gib,) = chance.choices([size for size, _ in _MEMORY_GIB], [weight for _, weight in _MEMORY_GIB])
    user = min(USERS - 1, int(chance.paretovariate(0.8)) - 1)
    return Job(
        f"job{number}",
        round(at_s * SECOND_NS),
        round(length_s * SECOND_NS),
        busy,
        memory_gib * GIB,
        min(members, gpus),
        user,
        chance.choices((0, 5, 10), (0.7, 0.2, 0.1))[0],
        job_class,
        round(chance.uniform(3.0, 10.0) * length_s * SECOND_NS) if chance.random() < 0.3 else 0,
        round(burst_s * SECOND_NS),
        round(think_s * SECOND_NS),
    )


def fitted(jobs: Iterable[Job], gpus: int, capacity_bytes: int) -> list[Job]:
    """The jobs as they can run here: no larger than a card, on no more GPUs than there are; the first arrives at 0."""
    ordered = sorted(jobs, key=lambda job: job.arrives_ns)
    begin_ns = ordered[0].arrives_ns if ordered else 0
    return [
        replace(
            job,
            arrives_ns=job.arrives_ns - begin_ns,
            gpus=min(job.gpus, gpus),
            memory_bytes=min(job.memory_bytes, capacity_bytes),
        )
        for job in ordered
    ]
