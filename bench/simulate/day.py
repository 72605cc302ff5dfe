"""The day of `nvshare.bench.day` in virtual time: programs of one user that want twice the card.

A server with a request every 4 s, a notebook with a cell every 14 s, an image generator and a training job.  The bytes,
and the time that a piece of work takes, are those of an H100 with a capacity of 24 GiB.

- `ttft_s`: from a request to the begin of its work.  `cell_s`: the same of the notebook.
- `training_of_left`: the training's part of the time, over what the others leave of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from nvshare.bench.harness.fixture import percentile
from nvshare.bench.simulate.jobs import GIB
from nvshare.bench.virtual_node.link import Link, Mover
from nvshare.bench.virtual_node.node import FIRST_REPORT_NS, FOREVER_NS, Job, Program, Task, VirtualNode
from nvshare.coordinator.model.settings import SECOND_NS, Settings
from nvshare.scheduler_policies.api import JobClass

CAPACITY: Final = 24 * GIB * 31 // 32
"""Contexts take of a card what the coordinator leaves them by default."""
FAST_GIB_S: Final = 50.0
_PROGRAMS: Final = (
    # name, class, GiB, works for s and waits for s in turns
    ("server", JobClass.INTERACTIVE, 10, 0.3, 3.7),
    ("images", JobClass.BATCH, 10, 1.0, 7.1),
    ("notebook", JobClass.INTERACTIVE, 10, 0.15, 14.3),
    ("training", JobClass.BATCH, 12, 0.0, 0.0),
)


class DayLink(Link):
    """A link of any speed, whose directions are at work together from the first GiB on."""

    def __init__(self, node: VirtualNode, gib_s: float) -> None:
        super().__init__(node, GIB)
        self._speed = gib_s / FAST_GIB_S

    def rate(self, program: Program, mover: Mover, *, opposite: bool) -> float:
        return super().rate(program, mover, opposite=opposite) * self._speed


def day(policy: str, *, seconds: int = 300, gib_s: float = FAST_GIB_S, heavier_gib: int = 0) -> dict[str, Any]:
    """The figures of one policy.  `heavier_gib`: what each program has more."""
    jobs = [
        Job(
            name, number * SECOND_NS // 10, FOREVER_NS, memory_bytes=(gib + heavier_gib) * GIB, job_class=job_class,
            burst_ns=round(burst_s * SECOND_NS), think_ns=round(think_s * SECOND_NS),
        )
        for number, (name, job_class, gib, burst_s, think_s) in enumerate(_PROGRAMS)
    ]  # fmt: skip
    settings = Settings(policy=policy)
    link = partial(DayLink, gib_s=gib_s)
    world = VirtualNode(jobs, 1, CAPACITY, settings, link=link, shared_report_ns=FIRST_REPORT_NS)
    world.run_until(world.now_ns + seconds * SECOND_NS)
    done = {task.job.name: _done(world, task) / (seconds * SECOND_NS) for task in world.tasks}
    server, images, notebook, _ = world.tasks
    moved = sum(card.link.moved_bytes for card in world.cards.values())
    return {
        "ttft_s": _spread(server),
        "cell_s": _spread(notebook),
        "image_s": _spread(images),
        "training": round(done["training"], 3),
        "training_of_left": round(done["training"] / (1.0 - sum(done.values()) + done["training"]), 3),
        "moved_gib_per_minute": round(moved / GIB * 60 / seconds),
        "replaced": world.replaced(),
    }


def _done(world: VirtualNode, task: Task) -> int:
    world.work(task)
    return task.done_ns


def _spread(task: Task) -> dict[str, float]:
    waits_s = [wait_ns / SECOND_NS for wait_ns in task.waits_ns]
    return {f"p{rank}": round(percentile(waits_s, rank / 100), 3) for rank in (50, 99)}
