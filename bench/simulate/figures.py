"""Figures of a policy over the jobs of a run.

- `jct_s`: time from arrival to end.  `slowdown`: the same over the time alone.
- `rho`: finish-time fairness of Themis (Mahajan et al., NSDI 2020): the time that a job took over the time that it
  would have taken with an equal part of its card, by the mean number of jobs there meanwhile.  1 or less is fair.
- `jain_users`, `jain_jobs`: Jain's index, 1 when all have the same.  Of users it compares the work that was done for
  each with its equal part of the time on the cards where it had jobs; of jobs, the time alone over the time taken.
- `utilisation`: useful work over the time in which a job wanted the card.
- `replaced`: the GPUs on which `round_robin` has replaced the policy.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from nvshare.bench.harness.fixture import percentile
from nvshare.bench.virtual_node.node import BEGIN_NS, Task, VirtualNode

_SECOND: Final = 1e9


def jain(values: Sequence[float]) -> float:
    """Jain's index."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def jct_s(task: Task) -> float:
    """Seconds from a job's arrival to its end."""
    return (task.ends_ns - BEGIN_NS - task.job.arrives_ns) / _SECOND


def rho(task: Task) -> float:
    """See the module's docstring."""
    took_ns = task.ends_ns - BEGIN_NS - task.job.arrives_ns
    present = task.crowd / (took_ns * len(task.programs)) if took_ns else 1.0
    return took_ns / (task.job.alone_ns * max(1.0, present))


def figures(world: VirtualNode) -> dict[str, Any]:
    """Figures of a run that is over."""
    tasks, cards = world.tasks, world.cards.values()
    useful: dict[int, float] = {}
    for task in tasks:
        useful[task.job.user] = useful.get(task.job.user, 0.0) + task.job.work_ns * task.job.gpus
    slowdowns = [jct_s(task) * _SECOND / task.job.alone_ns for task in tasks]
    fairness = [rho(task) for task in tasks]
    busy_ns = sum(task.job.work_ns * task.job.busy * task.job.gpus for task in tasks)
    classes = {task.job.job_class for task in tasks}
    found: dict[str, Any] = {
        "jct_s": _spread([jct_s(task) for task in tasks]),
        "by_class": {
            job_class.name.lower(): _spread([jct_s(task) for task in tasks if task.job.job_class is job_class])
            for job_class in sorted(classes)
        },
        "slowdown": _spread(slowdowns),
        "makespan_s": round((max(task.ends_ns for task in tasks) - BEGIN_NS) / _SECOND, 1),
        "rho": _spread(fairness) | {"most": round(max(fairness), 3)},
        "jain_users": round(jain([useful[user] / world.entitled[user] for user in sorted(useful)]), 4),
        "jain_jobs": round(jain([1.0 / slowdown for slowdown in slowdowns]), 4),
        "utilisation": round(busy_ns / sum(card.wanted_ns for card in cards), 4),
        "moved_gib": round(sum(card.link.moved_bytes for card in cards) / (1 << 30), 1),
        "handovers": world.handovers,
        "interrupted": world.interrupted,
        "events": world.handled,
        "replaced": world.replaced(),
    }
    due = [task for task in tasks if task.job.deadline_ns]
    if due:
        met = sum(jct_s(task) * _SECOND <= task.job.deadline_ns for task in due)
        found["deadlines"] = {"met": met, "of": len(due)}
    top = max(task.job.priority for task in tasks)
    if any(task.job.priority != top for task in tasks):
        found["highest_priority"] = _spread([jct_s(task) for task in tasks if task.job.priority == top])
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(values), 3),
        "median": round(statistics.median(values), 3),
        "p95": round(percentile(values, 0.95), 3),
    }
