"""Jobs in virtual time: their programs are clients of the real engine, and cards run what holds a lease.

A program behaves as the hook does: it attaches, requests, reports progress, drains, gives an idle lease back while
others wait, and moves its memory to its targets.  Between two events nothing changes its speed, so time passes from
event to event.

What is coarser than in life:
- Messages take no time.  A hand-over costs `drain_ns`, and then `restart_ns` of work until the queue is full again.
- Progress is reported every 100 ms, as in life, for 0.3 s after each change of the running set.  Each later pause is
  three times as long, up to `SHARED_REPORT_NS` beside others and `LONE_REPORT_NS` alone.  So best-effort work finds its
  rate later than in life.  Programs do not report to a policy that does not read reports.
- A job is placed on the cards with the fewest jobs when it arrives, and stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from nvshare.bench.virtual_node.card import shares
from nvshare.bench.virtual_node.client import Client
from nvshare.bench.virtual_node.clock import Clock
from nvshare.bench.virtual_node.link import Link, Mover
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Settings
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import create

BEGIN_NS: Final = SECOND_NS
"""The engine's time at the first arrival."""
DRAIN_NS: Final = 2 * MILLISECOND_NS
RESTART_NS: Final = 10 * MILLISECOND_NS
FIRST_REPORT_NS: Final = SECOND_NS // 10
SHARED_REPORT_NS: Final = 5 * SECOND_NS
LONE_REPORT_NS: Final = 60 * SECOND_NS
SILENT_NS: Final = Settings().silent_ns
INTERRUPTED_NS: Final = 50 * MILLISECOND_NS
"""A lease that ends sooner is hardly worth its switch."""
FOREVER_NS: Final = 1 << 62

Segment = tuple[int, int, int, float]
"""Job, from, to, speed."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job: a program, or as many programs as `gpus`, which step together."""

    name: str
    arrives_ns: int
    work_ns: int
    """Computing time of the job alone."""
    busy: float = 1.0
    """The part of this time in which it keeps the card busy."""
    memory_bytes: int = 0
    gpus: int = 1
    user: int = 0
    priority: int = 0
    job_class: JobClass = JobClass.BATCH
    deadline_ns: int = 0
    """After its arrival; 0: none."""
    burst_ns: int = 0
    think_ns: int = 0
    """It computes for `burst_ns`, then waits for its user for `think_ns`, and so on; 0: it always computes."""

    @property
    def alone_ns(self) -> int:
        """Time of the job alone on its cards, waits included."""
        waits = (self.work_ns - 1) // self.burst_ns if self.burst_ns else 0
        return self.work_ns + waits * self.think_ns


@dataclass(slots=True, eq=False)
class Watch:
    """Time in leases during which the engine wants counts of the work."""

    since_ns: int | None = None
    total_ns: int = 0


@dataclass(slots=True, eq=False)
class Program(Client):
    """One client of the engine: a job's process on one card."""

    task: Task
    card: Card
    lease_id: int = 0
    """0: it holds none."""
    granted_ns: int = 0
    rate: float = 1.0
    watch: Watch = field(default_factory=Watch)
    waiters: bool = False
    idle_release_ns: int = 0
    idle_since_ns: int = 0
    """Since then it has done nothing and others have waited, if both is so."""
    speed: float = 0.0
    resident_bytes: int = 0
    asked: bool = False
    """Its newest question for room is open."""
    mover: Mover = field(default_factory=Mover)

    @property
    def missing_bytes(self) -> int:
        """Its memory that is off the card."""
        return self.task.job.memory_bytes - self.resident_bytes

    @property
    def complete(self) -> bool:
        """All its memory is on the card."""
        return self.missing_bytes <= 0 and not self.mover.piece

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
    woke_ns: int | None = None
    """Since when it has wanted to compute and has not begun."""
    waits_ns: list[int] = field(default_factory=list)
    """From each arrival or wake to the first work."""
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


class VirtualNode(Clock):
    """The cards, their jobs, and what has happened."""

    def __init__(
        self,
        jobs: Sequence[Job],
        gpus: int,
        capacity_bytes: int,
        settings: Settings,
        *,
        link: Callable[[VirtualNode], Link] = Link,
        drain_ns: int = DRAIN_NS,
        restart_ns: int = RESTART_NS,
        shared_report_ns: int = SHARED_REPORT_NS,
    ) -> None:
        super().__init__()
        silent_ns = LONE_REPORT_NS + SILENT_NS  # the model gives idle leases back after `SILENT_NS` itself
        self.settings = replace(settings, silent_ns=silent_ns)
        self.scheduler = Scheduler(create, self.settings)
        self._reports = getattr(create(settings.policy, ""), "reads_progress", False)
        self.drain_ns, self.restart_ns, self._shared_report_ns = drain_ns, restart_ns, shared_report_ns
        self.cards = {f"GPU-{number}": Card(f"GPU-{number}", capacity_bytes, link(self)) for number in range(gpus)}
        self.tasks = [Task(number, job) for number, job in enumerate(jobs)]
        self.programs: dict[int, Program] = {}
        self.entitled: dict[int, float] = {}
        self.handled = self.handovers = 0
        self.interrupted = 0
        """Leases that were taken back within `INTERRUPTED_NS`."""
        self.segments: list[Segment] | None = None
        """Filled if it is a list."""
        self.left = len(self.tasks)
        self._timer = 0
        for card in self.cards.values():
            self.give(events.GpuAdded(card.uuid, "model", capacity_bytes, capacity_bytes))
        for task in self.tasks:
            self.after(task.job.arrives_ns, partial(self._arrive, task))

    # --- the engine ---------------------------------------------------------------------------------------------------

    def run(self, tell: Callable[[int], None] = lambda left: None) -> None:
        """Runs until all jobs have ended.  `tell` gets the number of jobs that are left, now and then."""
        steps = 0
        while self.left:
            assert self.step(FOREVER_NS), f"{self.left} jobs wait for ever"
            steps += 1
            if steps % 20_000 == 0:
                tell(self.left)

    def handle(self, event: events.Event) -> list[commands.Command]:
        """Passes an event to the engine."""
        self.handled += 1
        return self.scheduler.handle(event, self.now_ns)

    def give(self, event: events.Event) -> None:
        """Passes an event to the engine and carries out its commands."""
        for command in self.handle(event):
            if type(command) is commands.Send:
                self.receive(self.programs[command.client], command.message)
            elif type(command) is commands.SetTimer:
                self._set_timer(command.deadline_ns)

    def replaced(self) -> int:
        """On how many GPUs the engine has replaced the policy."""
        return sum(gpu.rules.policy_failures > 0 for gpu in self.scheduler.snapshot(self.now_ns).gpus)

    def _set_timer(self, deadline_ns: int | None) -> None:
        self._timer += 1
        number = self._timer
        if deadline_ns is not None:
            self.after(max(0, deadline_ns - self.now_ns), lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number == self._timer:
            self.give(events.TimerFired())

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _arrive(self, task: Task) -> None:
        job, cards = task.job, sorted(self.cards.values(), key=lambda card: (len(card.tasks), card.uuid))
        task.left_ns, task.burst_left_ns = job.work_ns, job.burst_ns or job.work_ns
        task.at_ns = task.woke_ns = self.now_ns
        for card in cards[: job.gpus]:
            client = len(self.programs) + 1
            program = self.programs[client] = Program(client, self.give, task, card)
            task.programs.append(program)
            card.pass_time(self.now_ns, self.entitled)
            card.tasks[task.number] = task
            task.crowd -= card.crowd
        for program in task.programs:
            self.connect(program)
        for program in task.programs:
            program.request()

    def connect(self, program: Program, *, wanted: bool = False) -> None:
        """A program says hello, claims the lease that it holds, and reports its memory."""
        job = program.task.job
        gang = job.name if job.gpus > 1 else ""
        program.register(job.name, user_id=job.user, priority=job.priority, gang=gang)
        if job.job_class is not JobClass.BATCH or job.deadline_ns:
            program.profile(job.job_class, self.now_ns + job.deadline_ns if job.deadline_ns else None)
        program.attach(program.card.uuid, lease_id=program.lease_id, wanted=wanted, memory=program.resident_bytes)
        if job.memory_bytes:
            self._report_memory(program)

    def _report_memory(self, program: Program) -> None:
        size, resident = program.task.job.memory_bytes, program.resident_bytes
        program.report(allocated=size, resident=resident, host=size - resident)

    def _milestone(self, task: Task, at_ns: int) -> None:
        """A job's timer: it or its burst ends, unless it has been slower than was foreseen."""
        if at_ns != task.milestone_ns:
            return
        task.milestone_ns = None
        if task.speed == 0.0:
            return
        self.work(task)
        if task.left_ns < 1.0:
            self.end(task)
            return
        if task.job.burst_ns == 0 or task.burst_left_ns >= 1.0:
            self._await_milestone(task)
            return
        for program in task.programs:
            program.card.pass_time(self.now_ns, self.entitled)
        task.thinking = True
        self.after(task.job.think_ns, lambda: self._wake(task))
        for program in task.programs:
            self._update(program.card)
            program.idle_since_ns = self.now_ns
            self._consider_idle(program, program.lease_id)
            if program.lease_id:
                self.after(SILENT_NS, partial(self._leave, program, program.lease_id))

    def _consider_idle(self, program: Program, lease_id: int) -> None:
        """Gives an idle lease back after the time that the engine has set, if others still wait then."""
        if not (program.task.thinking and program.waiters and program.lease_id == lease_id):
            return
        left_ns = program.idle_since_ns + program.idle_release_ns - self.now_ns
        if left_ns <= 0:
            self._release(program, lease_id, idle=True)
        else:
            self.after(left_ns, lambda: self._consider_idle(program, lease_id))

    def _leave(self, program: Program, lease_id: int) -> None:
        """A program beside others has been idle for long."""
        if program.task.thinking and len(program.card.holders) > 1:
            self._release(program, lease_id, idle=True)

    def _wake(self, task: Task) -> None:
        for program in task.programs:
            program.card.pass_time(self.now_ns, self.entitled)
        task.thinking, task.burst_left_ns, task.woke_ns = False, task.job.burst_ns, self.now_ns
        for program in task.programs:
            if program.lease_id == 0:
                program.request()
            else:
                self._changed(program.card)

    def end(self, task: Task) -> None:
        """A job is done: its processes end."""
        task.ends_ns, task.speed = self.now_ns, 0.0
        self.left -= 1
        for program in task.programs:
            card = program.card
            card.pass_time(self.now_ns, self.entitled)
            task.crowd += card.crowd
            del card.tasks[task.number]
            program.lease_id = 0
            card.link.forget(program)
            if card.holders.pop(program.client, None) is not None:
                self._changed(card)
            program.end()

    # --- leases -------------------------------------------------------------------------------------------------------

    def receive(self, program: Program, message: messages.Message) -> None:
        """Handles a message as the hook does."""
        kind = type(message)
        if kind is messages.Grant:
            self._granted(program, message)  # type: ignore[arg-type]
        elif kind is messages.Revoke:
            lease_id = program.lease_id
            self.after(self.drain_ns, lambda: self._release(program, lease_id, idle=False))
        elif kind is messages.Waiters:
            if not program.waiters:
                program.idle_since_ns = self.now_ns
            program.waiters = message.waiters > 0  # type: ignore[attr-defined]
            lease_id = program.lease_id
            self.after(0, lambda: self._consider_idle(program, lease_id))
        elif kind is messages.GpuSettings:
            self._set(program, message)  # type: ignore[arg-type]
        elif kind is messages.Target:
            program.card.link.aim(program, message)  # type: ignore[arg-type]
            self._reserved(program, message)  # type: ignore[arg-type]

    def _set(self, program: Program, settings: messages.GpuSettings) -> None:
        program.idle_release_ns = settings.idle_release_ns
        self._watch(program, settings.watch)
        if program.rate != settings.rate / 1000:
            program.rate = settings.rate / 1000
            if program.lease_id:
                self._update(program.card)

    def _granted(self, program: Program, grant: messages.Grant) -> None:
        task, card = program.task, program.card
        program.lease_id, program.granted_ns, program.waiters = grant.lease_id, self.now_ns, grant.waiters > 0
        self.handovers += 1
        if program.watch.since_ns is not None:
            program.watch.since_ns = self.now_ns
        self.work(task)
        task.left_ns += self.restart_ns
        task.burst_left_ns += self.restart_ns
        task.lost_ns += self.restart_ns
        card.holders[program.client] = program
        self._changed(card)
        if not program.complete:
            self.after(0, lambda: self._ask_for_room(program, grant.lease_id))

    def _ask_for_room(self, program: Program, lease_id: int) -> None:
        """As a hook in mode `swap` does for memory that no target has brought in."""
        program.card.link.end(program)
        if program.lease_id == lease_id and not program.complete:
            program.asked = True
            program.ask_room(program.task.job.memory_bytes)

    def _reserved(self, program: Program, answer: messages.Target) -> None:
        if answer.answers != program.states[0].asks or not program.asked or program.lease_id == 0 or program.complete:
            return
        program.asked = False
        lease_id, total = program.lease_id, program.task.job.memory_bytes
        if answer.total_bytes < total:
            self.after(self.drain_ns, lambda: self._release(program, lease_id, idle=False))
            return
        program.resident_bytes = total
        program.card.check_room()
        self._changed(program.card)
        self.after(0, lambda: self._report_memory(program) if program.lease_id == lease_id else None)

    def _release(self, program: Program, lease_id: int, *, idle: bool) -> None:
        if program.lease_id != lease_id or lease_id == 0:
            return
        if self._reports:
            self._report(program)
            if program.lease_id != lease_id:
                return
        program.lease_id = 0
        self.interrupted += not idle and self.now_ns - program.granted_ns < INTERRUPTED_NS
        wanted = not program.task.thinking
        del program.card.holders[program.client]
        self._changed(program.card)
        drain_ns = 0 if idle else self.drain_ns
        opened_ns = program.granted_ns
        program.release(lease_id, idle=idle, wanted=wanted, drain_ns=drain_ns, opened_at_ns=opened_ns)

    # --- speeds -------------------------------------------------------------------------------------------------------

    def _changed(self, card: Card) -> None:
        """Other programs run on the card than before."""
        self._update(card)
        card.pause_ns, card.changed_ns = FIRST_REPORT_NS, self.now_ns
        self._arm_report(card)

    def _update(self, card: Card) -> None:
        """The speeds of the card's programs, and of their jobs."""
        before, card.working = card.working, [one for one in card.holders.values() if one.works]
        for program in before:
            program.speed = 0.0
        got = shares([min(program.task.job.busy, program.rate) for program in card.working])
        for program, part in zip(card.working, got, strict=True):
            program.speed = part / program.task.job.busy
        for program in (*before, *card.working):
            task = program.task
            speed = program.speed if len(task.programs) == 1 else min([member.speed for member in task.programs])
            if speed != task.speed:
                self.work(task)
                task.speed = speed
                if speed:
                    if task.woke_ns is not None:
                        task.waits_ns.append(self.now_ns - task.woke_ns)
                        task.woke_ns = None
                    self._await_milestone(task)

    def work(self, task: Task) -> None:
        """Does a job's work since the last call."""
        done = (self.now_ns - task.at_ns) * task.speed
        if self.segments is not None and done:
            self.segments.append((task.number, task.at_ns, self.now_ns, task.speed))
        task.left_ns -= done
        task.burst_left_ns -= done
        task.at_ns = self.now_ns

    def _await_milestone(self, task: Task) -> None:
        ahead_ns = min(task.left_ns, task.burst_left_ns) if task.job.burst_ns else task.left_ns
        at_ns = self.now_ns + max(1, int(ahead_ns / task.speed) + 1)
        if task.milestone_ns is None or at_ns < task.milestone_ns:
            task.milestone_ns = at_ns
            self.after(at_ns - self.now_ns, lambda: self._milestone(task, at_ns))

    # --- reports ------------------------------------------------------------------------------------------------------

    def _arm_report(self, card: Card) -> None:
        card.reports += 1
        if card.holders and self._reports:
            number = card.reports
            self.after(card.pause_ns, lambda: self._report_all(card, number))

    def _report_all(self, card: Card, number: int) -> None:
        if number != card.reports:
            return
        if self.now_ns - card.changed_ns > 2 * FIRST_REPORT_NS:
            longest_ns = self._shared_report_ns if len(card.tasks) > 1 else LONE_REPORT_NS
            card.pause_ns = min(3 * card.pause_ns, longest_ns)
        self._arm_report(card)
        for program in list(card.holders.values()):
            if program.lease_id and program.works:
                self._report(program)

    def _report(self, program: Program) -> None:
        task = program.task
        self.work(task)
        self._watch(program, program.watch.since_ns is not None)
        busy_ns, watched_ns = int(program.watch.total_ns * task.job.busy), program.watch.total_ns
        program.progress(program.lease_id, self.now_ns, task.done_ns, busy_ns, watched_ns)

    def _watch(self, program: Program, watch: bool) -> None:
        if program.watch.since_ns is not None and program.lease_id:
            program.watch.total_ns += self.now_ns - program.watch.since_ns
        program.watch.since_ns = self.now_ns if watch else None
