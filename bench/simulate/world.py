"""A node in virtual time: jobs as clients of the real core, and cards that run what holds a lease.

A program behaves as the hook does: it attaches, requests, reports progress, drains, gives an idle lease back while
others wait, and moves its memory as ordered.  Between two events nothing changes its speed, so time passes from event
to event.

What is coarser than in life:
- Messages take no time.  A hand-over costs `DRAIN_NS`, and then `RESTART_NS` of work until the queue is full again.
- Progress is reported every 100 ms, as in life, for 0.3 s after each change of the running set.  Each later pause is
  three times as long, up to `SHARED_REPORT_NS` beside others and `LONE_REPORT_NS` alone.  So best-effort work finds its
  rate later than in life.  Nobody reports to a policy that does not read reports.
- A job is placed on the cards with the fewest jobs when it arrives, and stays there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from nvshare.bench.simulate.card import shares
from nvshare.bench.simulate.jobs import Job
from nvshare.bench.simulate.link import Link
from nvshare.bench.simulate.records import BEGIN_NS, FIRST_REPORT_NS, Card, Program, Task
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Send, SetTimer
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Settings
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import create

DRAIN_NS: Final = 2 * MILLISECOND_NS
RESTART_NS: Final = 10 * MILLISECOND_NS
SHARED_REPORT_NS: Final = 5 * SECOND_NS
LONE_REPORT_NS: Final = 60 * SECOND_NS
SILENT_NS: Final = Settings().silent_ns
INTERRUPTED_NS: Final = 50 * MILLISECOND_NS
"""A lease that ends sooner is hardly worth its switch."""

Segment = tuple[int, int, int, float]
"""Job, from, to, speed."""


class World:
    """The node, its event queue, and what has happened."""

    def __init__(self, jobs: Sequence[Job], gpus: int, capacity_bytes: int, settings: Settings) -> None:
        self.now_ns = BEGIN_NS
        silent_ns = LONE_REPORT_NS + SILENT_NS  # the model gives idle leases back after `SILENT_NS` itself
        self.scheduler = Scheduler(create, replace(settings, silent_ns=silent_ns))
        self._reports = getattr(create(settings.policy, ""), "reads_progress", False)
        self.cards = {f"GPU-{number}": Card(f"GPU-{number}", capacity_bytes, Link(self)) for number in range(gpus)}
        self.tasks = [Task(number, job) for number, job in enumerate(jobs)]
        self.programs: dict[int, Program] = {}
        self.entitled: dict[int, float] = {}
        self.handled = self.handovers = self.left = 0
        self.interrupted = 0
        """Leases that were taken back within `INTERRUPTED_NS`."""
        self.segments: list[Segment] | None = None
        """Filled if it is a list."""
        self.shared_report_ns = SHARED_REPORT_NS
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = self._timer = 0
        for card in self.cards.values():
            self.give(events.GpuAdded(card.uuid, "model", capacity_bytes, capacity_bytes))
        for task in self.tasks:
            self.after(task.job.arrives_ns, partial(self._arrive, task))
        self.left = len(self.tasks)

    # --- time ---------------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Schedules an action.  Actions of the same time run in the order of their scheduling."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_ns + delay_ns, self._sequence, action))

    def run(self, tell: Callable[[int], None] = lambda left: None) -> None:
        """Runs until all jobs have ended.  `tell` gets the number of jobs that are left, now and then."""
        steps = 0
        while self.left:
            assert self._queue, f"{self.left} jobs wait for ever"
            self.now_ns, _, action = heapq.heappop(self._queue)
            action()
            steps += 1
            if steps % 20_000 == 0:
                tell(self.left)

    def give(self, event: events.Event) -> None:
        """Passes an event to the core and carries out its commands."""
        self.handled += 1
        for command in self.scheduler.handle(event, self.now_ns):
            if type(command) is Send:
                self._receive(self.programs[command.client], command.message)
            elif type(command) is SetTimer:
                self._set_timer(command.deadline_ns)

    def replaced(self) -> int:
        """On how many GPUs the core has replaced the policy."""
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
        task.left_ns, task.burst_left_ns, task.at_ns = job.work_ns, job.burst_ns or job.work_ns, self.now_ns
        for card in cards[: job.gpus]:
            client = len(self.programs) + 1
            program = self.programs[client] = Program(client, task, card)
            task.programs.append(program)
            card.pass_time(self.now_ns, self.entitled)
            card.tasks[task.number] = task
            task.crowd -= card.crowd
        gang = job.name if job.gpus > 1 else ""
        for program in task.programs:
            client, mode = program.client, MemoryMode.SWAP
            self.give(
                events.ClientRegistered(
                    client,
                    messages.Hello(1, job.name, "job", 0, job.priority, mode, 0, "", gang=gang),
                    client,
                    job.user,
                )
            )
            if job.job_class is not JobClass.BATCH or job.deadline_ns:
                deadline_ns = self.now_ns + job.deadline_ns if job.deadline_ns else None
                self.give(events.Profiled(client, job.job_class, 0.0, 1.0, deadline_ns, False))
            self.give(events.Received(client, messages.AttachGpu(0, program.card.uuid, 1 << 30, 0, False, 0, 0, 0)))
            if job.memory_bytes:
                self._report_memory(program)
        for program in task.programs:
            self.give(events.Received(program.client, messages.Request(0)))

    def _report_memory(self, program: Program) -> None:
        size, resident = program.task.job.memory_bytes, program.resident_bytes
        self.give(events.Received(program.client, messages.MemoryReport(0, size, resident, 0, 0)))

    def _milestone(self, task: Task, at_ns: int) -> None:
        """A job's timer: it or its burst ends, unless it has been slower than was foreseen."""
        if at_ns != task.milestone_ns:
            return
        task.milestone_ns = None
        if task.speed == 0.0:
            return
        self._work(task)
        if task.left_ns < 1.0:
            self._end(task)
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
            if program.waiters:
                self._release(program, program.lease_id, idle=True)
            elif program.lease_id:
                self.after(SILENT_NS, partial(self._leave, program, program.lease_id))

    def _leave(self, program: Program, lease_id: int) -> None:
        """A program beside others has been idle for long."""
        if program.task.thinking and len(program.card.holders) > 1:
            self._release(program, lease_id, idle=True)

    def _wake(self, task: Task) -> None:
        for program in task.programs:
            program.card.pass_time(self.now_ns, self.entitled)
        task.thinking, task.burst_left_ns = False, task.job.burst_ns
        for program in task.programs:
            if program.lease_id == 0:
                self.give(events.Received(program.client, messages.Request(0)))
            else:
                self._changed(program.card)

    def _end(self, task: Task) -> None:
        task.ends_ns, task.speed = self.now_ns, 0.0
        self.left -= 1
        for program in task.programs:
            card = program.card
            card.pass_time(self.now_ns, self.entitled)
            task.crowd += card.crowd
            del card.tasks[task.number]
            program.lease_id, program.move = 0, None
            if card.holders.pop(program.client, None) is not None:
                self._changed(card)
            self.give(events.ClientGone(program.client))

    # --- leases -------------------------------------------------------------------------------------------------------

    def _receive(self, program: Program, message: messages.Message) -> None:
        kind = type(message)
        if kind is messages.Grant:
            self._granted(program, message)  # type: ignore[arg-type]
        elif kind is messages.Revoke:
            lease_id = program.lease_id
            self.after(DRAIN_NS, lambda: self._release(program, lease_id, idle=False))
        elif kind is messages.Waiters:
            program.waiters = message.waiters > 0  # type: ignore[attr-defined]
            if program.waiters and program.task.thinking:
                lease_id = program.lease_id
                self.after(0, lambda: self._release(program, lease_id, idle=True))
        elif kind is messages.Allot:
            program.rate = message.rate / 1000  # type: ignore[attr-defined]
            self._watch(program, message.watch)  # type: ignore[attr-defined]
            if program.lease_id:
                self._update(program.card)
        elif kind is messages.MemoryReserved:
            self._reserved(program, message)  # type: ignore[arg-type]
        elif kind in (messages.Evict, messages.Restore, messages.MoveCredit):
            program.card.link.order(program, message)

    def _granted(self, program: Program, grant: messages.Grant) -> None:
        task, card = program.task, program.card
        program.lease_id, program.granted_ns, program.waiters = grant.lease_id, self.now_ns, grant.waiters > 0
        self.handovers += 1
        if program.watch.since_ns is not None:
            program.watch.since_ns = self.now_ns
        self._work(task)
        task.left_ns += RESTART_NS
        task.burst_left_ns += RESTART_NS
        task.lost_ns += RESTART_NS
        card.holders[program.client] = program
        self._changed(card)
        if not program.complete:
            self.after(0, lambda: self._ask_for_room(program, grant.lease_id))

    def _ask_for_room(self, program: Program, lease_id: int) -> None:
        """As a hook in mode `swap` does for memory that no order has brought in."""
        program.card.link.end(program)
        if program.lease_id == lease_id and not program.complete:
            program.asked += 1
            total = program.task.job.memory_bytes
            self.give(events.Received(program.client, messages.ReserveMemory(0, program.asked, total)))

    def _reserved(self, program: Program, answer: messages.MemoryReserved) -> None:
        if answer.sequence != program.asked or program.lease_id == 0 or program.complete:
            return
        lease_id, total = program.lease_id, program.task.job.memory_bytes
        if answer.bytes < total:
            self.after(DRAIN_NS, lambda: self._release(program, lease_id, idle=False))
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
        drain_ns = 0 if idle else DRAIN_NS
        released = events.Received(
            program.client,
            messages.Release(
                0,
                lease_id,
                messages.ReleaseReason.IDLE if idle else messages.ReleaseReason.REVOKED,
                True,
                wanted,
                drain_ns,
                program.granted_ns,
                1,
            ),
        )
        self.give(released)

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
                self._work(task)
                task.speed = speed
                if speed:
                    self._await_milestone(task)

    def _work(self, task: Task) -> None:
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
            longest_ns = self.shared_report_ns if len(card.tasks) > 1 else LONE_REPORT_NS
            card.pause_ns = min(3 * card.pause_ns, longest_ns)
        self._arm_report(card)
        for program in list(card.holders.values()):
            if program.lease_id and program.works:
                self._report(program)

    def _report(self, program: Program) -> None:
        task = program.task
        self._work(task)
        self._watch(program, program.watch.since_ns is not None)
        busy_ns, watched_ns = int(program.watch.total_ns * task.job.busy), program.watch.total_ns
        report = (0, program.lease_id, self.now_ns, task.done_ns, busy_ns, watched_ns)
        self.give(events.Received(program.client, messages.Progress(*report, steps=0)))

    def _watch(self, program: Program, watch: bool) -> None:
        if program.watch.since_ns is not None and program.lease_id:
            program.watch.total_ns += self.now_ns - program.watch.since_ns
        program.watch.since_ns = self.now_ns if watch else None
