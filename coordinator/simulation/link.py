"""The cost of switching in simulated time: jobs with more memory than the GPU, a link of known speed, the real engine.

The link moves `one_way` bytes a nanosecond in one direction, and `both_ways` in both together; orders of the same
direction share it.  Jobs keep the rules of `swap` mode: they restore only within their credit, report progress after
each step, and run only with all their memory.

Invariants: no randomness.  Every step checks the resident memory against the capacity (invariant 4).  Figures from here
are simulated and are labelled so wherever they are shown.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from nvshare.coordinator.engine.scheduler import PolicyFactory, Scheduler, Settings
from nvshare.coordinator.engine.snapshot import GpuSnapshot
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.programs.side import Move

GIB: Final = 1 << 30
STEP_BYTES: Final = 64 << 20
UUID: Final = "GPU-link"
MESSAGE_NS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Speeds measured on the target machine, in bytes a nanosecond."""

    one_way: float = 50 * GIB / SECOND_NS
    both_ways: float = 85 * GIB / SECOND_NS
    first_out: float | None = None
    """Evictions for which host memory must be allocated; None: as fast as others."""
    fresh: float | None = None
    """Restores of memory that was never evicted, without a copy; None: as fast as others."""


@dataclass(slots=True, eq=False)
class JobMemory:
    """Memory of one job."""

    size_bytes: int
    resident_bytes: int = 0
    host_bytes: int = 0
    host_ready_bytes: int = 0
    """Allocated host memory."""


@dataclass(slots=True, eq=False)
class Job:
    """A program that computes whenever it holds the lease."""

    number: int
    memory: JobMemory
    connection: int = 0
    lease_id: int = 0
    open: bool = False
    alive: bool = True
    order: Move | None = None
    granted_at_ns: int = 0
    turns: int = 0
    asks: bool = True
    """It requests the GPU whenever it has no lease."""
    left_ns: int | None = None
    """Remaining computation, as of the last grant; None: it never ends."""
    ended_ns: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of the time `elapsed_ns`."""

    elapsed_ns: int
    switches: int
    held_ns: int
    out_bytes: int
    in_bytes: int
    exposed_ns: int
    hidden_ns: int
    waited_ns: int
    quantum_ns: int

    @property
    def exposed_share(self) -> float:
        """Exposed share of the time of memory orders, by the engine's accounts."""
        moved_ns = self.exposed_ns + self.hidden_ns
        return self.exposed_ns / moved_ns if moved_ns else 0.0

    @property
    def lost_share(self) -> float:
        """Share of the time without computation."""
        return 1.0 - self.held_ns / self.elapsed_ns


class LinkWorld:
    """One GPU."""

    def __init__(
        self,
        policies: PolicyFactory,
        sizes: tuple[int, ...],
        capacity_bytes: int,
        settings: Settings,
        *,
        link: Link | None = None,
        drain_ns: int = 2 * MILLISECOND_NS,
        open_ns: int = 0,
        asks: bool = True,
    ) -> None:
        self.policies = policies
        self.capacity_bytes = capacity_bytes
        self.settings = settings
        self.link = link or Link()
        self.drain_ns = drain_ns
        self.open_ns = open_ns
        """Time from a grant to the first work, in which the program wakes up."""
        self.now_ns = SECOND_NS
        self.most_resident_bytes = 0
        self.jobs = [Job(number, JobMemory(size), asks=asks) for number, size in enumerate(sizes)]
        self.connections: dict[int, Job] = {}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._timer = 0
        self._flowing = {True: 0, False: 0}
        self.scheduler = self._start(None)
        for job in self.jobs:
            self._connect(job)

    # --- time -------------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Schedules an action.  Actions of the same time run in the order of their scheduling."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_ns + delay_ns, self._sequence, action))

    def run(self, for_ns: int) -> None:
        """Lets time pass."""
        end_ns = self.now_ns + for_ns
        while self._queue and self._queue[0][0] <= end_ns:
            self.now_ns, _, action = heapq.heappop(self._queue)
            action()
        self.now_ns = end_ns

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass event by event until the condition holds; asserts that it does within a minute."""
        end_ns = self.now_ns + 60 * SECOND_NS
        while not condition():
            assert self._queue, "the event queue is empty"
            assert self._queue[0][0] <= end_ns, "the condition did not become true in time"
            self.now_ns, _, action = heapq.heappop(self._queue)
            action()

    # --- the coordinator --------------------------------------------------------------------------------------------

    def _start(self, holder: Job | None) -> Scheduler:
        self.scheduler = Scheduler(self.policies, self.settings)
        lease = max(job.lease_id for job in self.jobs)
        size, until_ns = self.capacity_bytes, self.now_ns + 2 * SECOND_NS
        expected = None if holder is None else 100 + holder.number
        self._give(events.GpuAdded(UUID, "Simulated", size, size, lease + 1, expected, until_ns))
        return self.scheduler

    def restart(self, away_ns: int = 5 * MILLISECOND_NS) -> None:
        """Kills the coordinator and starts another, to which all jobs reconnect.  Orders are lost."""
        holder = next((job for job in self.jobs if job.open), None)
        self.connections.clear()
        self._timer += 1
        for job in self.jobs:
            job.order = None
        self._start(holder)
        for job in self.jobs:
            if job.alive:
                self.after(away_ns, lambda j=job: self._connect(j))  # type: ignore[misc]

    def _give(self, event: events.Event) -> None:
        for command in self.scheduler.handle(event, self.now_ns):
            if isinstance(command, commands.Send):
                connection, message = command.client, command.message
                self.after(MESSAGE_NS, lambda c=connection, m=message: self._hear(c, m))  # type: ignore[misc]
            elif isinstance(command, commands.SetTimer):
                self._timer += 1
                if command.deadline_ns is not None:
                    number = self._timer
                    self.after(max(0, command.deadline_ns - self.now_ns), lambda n=number: self._fire(n))  # type: ignore[misc]

    def _fire(self, number: int) -> None:
        if number == self._timer:
            self._give(events.TimerFired())

    def sight(self) -> GpuSnapshot:
        """The GPU as seen by the engine."""
        (gpu,) = self.scheduler.snapshot(self.now_ns).gpus
        return gpu

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _connect(self, job: Job) -> None:
        self._sequence += 1
        job.connection = number = self._sequence
        self.connections[number] = job
        pid = 100 + job.number
        self._give(
            events.ClientRegistered(
                number, messages.Hello(1, f"j{job.number}", "job", 0, 0, messages.MemoryMode.SWAP, 0, ""), pid, 0
            )
        )
        lease = job.lease_id if job.open else 0
        self._give(
            events.Received(
                number,
                messages.AttachGpu(
                    0,
                    UUID,
                    1 << 30,
                    lease,
                    job.asks and not job.open,
                    job.memory.size_bytes,
                    job.memory.resident_bytes,
                    0,
                ),
            )
        )
        self._report(job)

    def _report(self, job: Job) -> None:
        memory = job.memory
        off = memory.size_bytes - memory.resident_bytes  # a hook also reports memory that was never resident
        self._give(
            events.Received(job.connection, messages.MemoryReport(0, memory.size_bytes, memory.resident_bytes, 0, off))
        )

    def kill(self, job: Job) -> None:
        """Kills a job; the coordinator notices a millisecond later."""
        job.alive = False
        job.open = False
        job.order = None
        job.memory.resident_bytes = job.memory.size_bytes = job.memory.host_bytes = 0
        number = job.connection
        self.after(MILLISECOND_NS, lambda: self._gone(number))

    def _gone(self, number: int) -> None:
        if self.connections.pop(number, None) is not None:
            self._give(events.ClientGone(number))

    def _hear(self, connection: int, message: messages.Message) -> None:
        job = self.connections.get(connection)
        if job is None or not job.alive:
            return
        if isinstance(message, messages.Grant):
            if not job.open:
                assert job.order is None, "a grant while memory moves"
                job.open, job.lease_id, job.granted_at_ns = True, message.lease_id, self.now_ns
                job.turns += 1
                if job.left_ns is not None:
                    lease_id = job.lease_id
                    self.after(self.open_ns + job.left_ns, lambda: self._done(job, lease_id))
        elif isinstance(message, messages.Revoke):
            self.after(self.drain_ns, lambda: self._release(job, message.lease_id))
        elif isinstance(message, messages.Evict):
            self._begin(job, Move(True, message.order_id, message.bytes, message.bytes))
        elif isinstance(message, messages.Restore):
            self._begin(job, Move(False, message.order_id, message.bytes, message.credit_bytes))
        elif isinstance(message, messages.MoveCredit) and job.order is not None:
            job.order.credit = max(job.order.credit, message.credit_bytes)
            if job.order.waiting:
                job.order.waiting = False
                self._step(job, job.order)

    def _release(self, job: Job, lease_id: int) -> None:
        if not job.open or job.lease_id != lease_id:
            return
        job.open = False
        if job.left_ns is not None:
            job.left_ns -= max(0, self.now_ns - job.granted_at_ns - self.open_ns)
        opened_ns, drain_ns = job.granted_at_ns, self.drain_ns
        self._give(
            events.Received(
                job.connection,
                messages.Release(0, lease_id, messages.ReleaseReason.REVOKED, True, job.asks, drain_ns, opened_ns, 1),
            )
        )

    def ask(self, job: Job) -> None:
        """Makes a job request the GPU from now on."""
        job.asks = True
        if not job.open:
            self._give(events.Received(job.connection, messages.Request(0)))

    def begin(self, job: Job, work_ns: int) -> None:
        """Gives a job its remaining computation, after which it ends."""
        job.left_ns = work_ns
        if job.open:
            lease_id = job.lease_id
            job.granted_at_ns = self.now_ns
            self.after(work_ns, lambda: self._done(job, lease_id))
        self.ask(job)

    def _done(self, job: Job, lease_id: int) -> None:
        if job.open and job.lease_id == lease_id:
            job.ended_ns = self.now_ns
            self.kill(job)

    # --- the link ---------------------------------------------------------------------------------------------------

    def _begin(self, job: Job, transfer: Move) -> None:
        assert not job.open, "memory moves under running work"
        assert job.order is None, "a second order"
        job.order = transfer
        self._step(job, transfer)

    def _step(self, job: Job, transfer: Move) -> None:
        size, memory = min(STEP_BYTES, transfer.credit - transfer.moved), job.memory
        if size <= 0:
            transfer.waiting = True
            return
        self._flowing[transfer.evict] += 1
        opposite = self._flowing[not transfer.evict] > 0
        rate = (self.link.both_ways / 2 if opposite else self.link.one_way) / self._flowing[transfer.evict]
        if transfer.evict and self.link.first_out is not None and memory.host_bytes + size > memory.host_ready_bytes:
            rate = min(rate, self.link.first_out)
        if not transfer.evict and self.link.fresh is not None and memory.host_bytes == 0:
            rate = self.link.fresh
        if not transfer.evict:  # mapped before the copy
            memory.resident_bytes += size
            self._check()
        self.after(int(size / rate), lambda: self._arrive(job, transfer, size))

    def _arrive(self, job: Job, transfer: Move, size: int) -> None:
        memory = job.memory
        self._flowing[transfer.evict] -= 1
        if job.order is not transfer:  # the job or the coordinator was killed meanwhile: unmap
            if job.alive and not transfer.evict:
                memory.resident_bytes -= size
            return
        transfer.moved += size
        memory.host_bytes += size if transfer.evict else -min(size, memory.host_bytes)
        memory.host_ready_bytes = max(memory.host_ready_bytes, memory.host_bytes)
        if transfer.evict:
            memory.resident_bytes -= size
        finished = transfer.moved >= transfer.size
        if finished:
            job.order = None
        self._give(
            events.Received(job.connection, messages.MoveProgress(0, transfer.order_id, transfer.moved, 1, finished, 0))
        )
        if finished:
            self._report(job)
        else:
            self._step(job, transfer)

    def _check(self) -> None:
        resident = sum(job.memory.resident_bytes for job in self.jobs)
        self.most_resident_bytes = max(self.most_resident_bytes, resident)
        assert resident <= self.capacity_bytes, f"invariant 4: {resident} on {self.capacity_bytes}"


@dataclass(slots=True)
class Meter:
    """Measures from its construction on, by the engine's counters."""

    world: LinkWorld
    start: GpuSnapshot = field(init=False)
    start_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.world.sight()
        self.start_ns = self.world.now_ns

    def read(self) -> Outcome:
        """Figures since the construction."""
        now, start = self.world.sight(), self.start
        return Outcome(
            elapsed_ns=self.world.now_ns - self.start_ns,
            switches=now.statistics.handovers - start.statistics.handovers,
            held_ns=now.statistics.held_ns - start.statistics.held_ns,
            out_bytes=now.moves.evicted_bytes - start.moves.evicted_bytes,
            in_bytes=now.moves.restored_bytes - start.moves.restored_bytes,
            exposed_ns=now.moves.exposed_move_ns - start.moves.exposed_move_ns,
            hidden_ns=now.moves.hidden_move_ns - start.moves.hidden_move_ns,
            waited_ns=now.moves.moved_ns - start.moves.moved_ns,
            quantum_ns=now.rules.quantum_ns,
        )


@dataclass(frozen=True, slots=True)
class Makespan:
    """Result of jobs that began together, with equal computation."""

    over_sum: float
    """Time to the end of the last job, divided by the sum of the jobs' times alone."""
    quanta_ns: tuple[int, ...]
    """The quantum of each turn."""
    between_ends_ns: int


def train(world: LinkWorld, work_ns: int) -> Makespan:
    """Lets each job work alone for a moment, then all together, as nvshare.bench.memory.oversubscribe does."""
    for job in world.jobs:
        world.ask(job)
        world.run(SECOND_NS // 2)
        job.asks = False
    start_ns = world.now_ns
    for job in world.jobs:
        world.begin(job, work_ns)
    grants, quanta = -1, []

    def turned() -> bool:
        return world.sight().statistics.grants != grants or not any(job.alive for job in world.jobs)

    while any(job.alive for job in world.jobs):
        world.until(turned)
        if world.sight().statistics.grants != grants and len(world.connections) > 1:
            quanta.append(world.sight().rules.quantum_ns)
        grants = world.sight().statistics.grants
    ends = [job.ended_ns for job in world.jobs]
    return Makespan((max(ends) - start_ns) / (len(ends) * work_ns), tuple(quanta), max(ends) - min(ends))
