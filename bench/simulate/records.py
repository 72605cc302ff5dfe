"""Jobs that have arrived, their programs, and the cards that these are on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nvshare.bench.simulate.jobs import SECOND_NS, Job
from nvshare.bench.simulate.link import Link, Move

FIRST_REPORT_NS: Final = SECOND_NS // 10
BEGIN_NS: Final = SECOND_NS
"""The core's time at the first arrival."""


@dataclass(slots=True, eq=False)
class Watch:
    """Time in leases during which the core wants counts of the work."""

    since_ns: int | None = None
    total_ns: int = 0


@dataclass(slots=True, eq=False)
class Program:
    """One client of the core: a job's process on one card."""

    client: int
    task: Task
    card: Card
    lease_id: int = 0
    """0: it holds none."""
    granted_ns: int = 0
    rate: float = 1.0
    watch: Watch = field(default_factory=Watch)
    waiters: bool = False
    speed: float = 0.0
    resident_bytes: int = 0
    asked: int = 0
    """Number of its last question for room."""
    move: Move | None = None

    @property
    def complete(self) -> bool:
        """All its memory is on the card."""
        return self.resident_bytes >= self.task.job.memory_bytes

    @property
    def works(self) -> bool:
        """It computes, if it holds a lease."""
        return not self.task.thinking and self.complete


@dataclass(slots=True, eq=False)
class Task:
    """A job that has arrived."""

    number: int
    job: Job
    programs: list[Program] = field(default_factory=list)
    left_ns: float = 0.0
    """Work that is left."""
    burst_left_ns: float = 0.0
    thinking: bool = False
    speed: float = 0.0
    at_ns: int = 0
    """When the figures above were brought up to date."""
    milestone_ns: int | None = None
    """When its timer fires: at its end, or at the end of its burst, or earlier."""
    lost_ns: int = 0
    """Work that hand-overs have cost."""
    crowd: float = 0.0
    ends_ns: int = 0

    @property
    def done_ns(self) -> int:
        """Useful work so far, as the hook counts it."""
        return max(0, int(self.job.work_ns + self.lost_ns - self.left_ns) - self.lost_ns)


@dataclass(slots=True, eq=False)
class Card:
    """One GPU."""

    uuid: str
    capacity_bytes: int
    link: Link
    tasks: dict[int, Task] = field(default_factory=dict)
    holders: dict[int, Program] = field(default_factory=dict)
    working: list[Program] = field(default_factory=list)
    reports: int = 0
    """Number of the next report's timer; older timers are void."""
    pause_ns: int = FIRST_REPORT_NS
    changed_ns: int = 0
    """When other programs began or ceased to run."""
    crowd: float = 0.0
    """Jobs present, summed over time."""
    wanted_ns: int = 0
    """Time in which a job wanted the card."""
    at_ns: int = BEGIN_NS

    def check_room(self) -> None:
        """Asserts that the resident memory fits on the card."""
        resident = sum(one.resident_bytes for task in self.tasks.values() for one in task.programs if one.card is self)
        assert resident <= self.capacity_bytes, f"{resident} bytes on {self.uuid}"

    def pass_time(self, now_ns: int, entitled: dict[int, float]) -> None:
        """Counts the time since the last call; the users present are entitled to equal parts of it."""
        span_ns, self.at_ns = now_ns - self.at_ns, now_ns
        if span_ns and self.tasks:
            self.crowd += span_ns * len(self.tasks)
            users = {task.job.user for task in self.tasks.values()}
            for user in users:
                entitled[user] = entitled.get(user, 0.0) + span_ns / len(users)
            if any(not task.thinking for task in self.tasks.values()):
                self.wanted_ns += span_ns
