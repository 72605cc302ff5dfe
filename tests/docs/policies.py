"""Pictures of what each policy does to the same four jobs on one GPU: `python -m tests.docs.policies` draws them anew.

The core and the policies are the real ones; jobs and the card are models, as in `nvshare.bench.simulate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from nvshare.bench.simulate.jobs import GIB
from nvshare.bench.virtual_node.node import BEGIN_NS, FIRST_REPORT_NS, Job, Segment, VirtualNode
from nvshare.coordinator.model.settings import SECOND_NS, Settings
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import BUILT_IN

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "policies"

QUANTUM_S: Final = 2
SHOWN_S: Final = 62
LANE, GAP, LEFT, TOP, SECOND_WIDTH = 26, 8, 92, 6, 9
COLOURS: Final = ("#b2182b", "#2166ac", "#1b7837", "#8c6d31")


def four_jobs() -> list[Job]:
    """One user's notebook and training, another user's short job with a deadline, and work for what is left."""

    def one(name: str, at_s: int, work_s: float, user: int, **more: Any) -> Job:
        return Job(name, at_s * SECOND_NS, round(work_s * SECOND_NS), memory_bytes=GIB, user=user, **more)

    bursts = {"burst_ns": 3 * SECOND_NS // 2, "think_ns": 6 * SECOND_NS}
    return [
        one("notebook", 5, 9.0, 1, busy=0.5, priority=10, job_class=JobClass.INTERACTIVE, **bursts),
        one("training", 0, 25.0, 1),
        one("short", 12, 7.5, 2, deadline_ns=12 * SECOND_NS),
        one("spare", 0, 15.5, 2, job_class=JobClass.BEST_EFFORT),
    ]


def picture(policy: str) -> str:
    """The time line of one policy."""
    settings = Settings(policy=policy, quantum_ns=QUANTUM_S * SECOND_NS)
    world = VirtualNode(four_jobs(), 1, 80 * GIB, settings, shared_report_ns=FIRST_REPORT_NS)
    world.segments = []
    world.run()
    width, height = LEFT + SHOWN_S * SECOND_WIDTH + 10, TOP + 4 * (LANE + GAP) + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f"<title>Four jobs under {policy}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for lane, task in enumerate(world.tasks):
        base = TOP + (lane + 1) * LANE + lane * GAP
        arrives, ends = _x(task.job.arrives_ns + BEGIN_NS), _x(task.ends_ns)
        parts.append(f'<text x="{LEFT - 8}" y="{base - 8}" text-anchor="end">{task.job.name}</text>')
        parts.append(
            f'<rect x="{arrives}" y="{base - LANE}" width="{ends - arrives:.1f}" height="{LANE}" fill="#eee"/>'
        )
        parts.append(f'<path d="{_outline(merged(world.segments, lane), base)}" fill="{COLOURS[lane]}"/>')
        if task.job.deadline_ns:
            due = _x(task.job.arrives_ns + task.job.deadline_ns + BEGIN_NS)
            parts.append(f'<path d="M{due} {base - LANE - 3}V{base + 3}" stroke="black" stroke-dasharray="3 2"/>')
    base = TOP + 4 * (LANE + GAP)
    for second in range(0, SHOWN_S + 1, 10):
        x = LEFT + second * SECOND_WIDTH
        parts.append(f'<path d="M{x} {base - GAP}v4" stroke="black"/>')
        parts.append(f'<text x="{x}" y="{base + 9}" text-anchor="middle">{second} s</text>')
    return "\n".join([*parts, "</svg>", ""])


def merged(segments: list[Segment], number: int) -> list[tuple[int, int, float]]:
    """The segments of one job; those that meet at the same speed are one."""
    found: list[tuple[int, int, float]] = []
    for _, begin_ns, end_ns, speed in (one for one in segments if one[0] == number):
        if found and found[-1][1] == begin_ns and abs(found[-1][2] - speed) < 0.01:
            found[-1] = (found[-1][0], end_ns, found[-1][2])
        else:
            found.append((begin_ns, end_ns, speed))
    return found


def _outline(segments: list[tuple[int, int, float]], base: int) -> str:
    """A bar for each segment, as high as the job is fast."""
    bars = ((_x(begin_ns), _x(end_ns), round(LANE * speed, 1)) for begin_ns, end_ns, speed in segments)
    return "".join(f"M{left} {base}v{-height:g}H{right}v{height:g}z" for left, right, height in bars)


def _x(at_ns: int) -> float:
    return round(LEFT + (at_ns - BEGIN_NS) / SECOND_NS * SECOND_WIDTH, 1)


if __name__ == "__main__":
    for name in BUILT_IN:
        (FOLDER / f"{name}.svg").write_text(picture(name), encoding="utf-8")
