"""One GPU in virtual time that plays the plans of a policy, and checks each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nvshare.scheduler_policies.api import (
    GpuView,
    Happened,
    JobLeft,
    JobView,
    Memory,
    Plan,
    Policy,
    Progress,
    Rank,
    State,
    Turn,
    TurnEnded,
)

MS = 1_000_000
SECOND = 1_000 * MS
GPU = GpuView("GPU-0", 100, 100 * MS)


@dataclass(slots=True)
class Job:
    """One client.  It wants the GPU while `wanted` is true."""

    view: JobView
    wanted: bool = False
    drains_at_ns: int | None = None
    drain_ns: int = 0
    rate: float = 1.0
    leases: int = 0
    max_wait_ns: int = 0

    @property
    def client(self) -> int:
        return self.view.client

    def turn(self, **changes: object) -> None:
        self.view = replace(self.view, turn=replace(self.view.turn, **changes))  # type: ignore[arg-type]


def check(plan: Plan, jobs: Sequence[JobView], now_ns: int) -> None:
    """Broken: the engine would replace the policy."""
    known = {job.client for job in jobs}
    running = [allotment.client for allotment in plan.running]
    assert len(set(running)) == len(running)
    assert len(set(plan.order)) == len(plan.order)
    assert known.issuperset(running)
    assert known.issuperset(plan.order)
    assert not set(running) & set(plan.order)
    assert running or (plan.ask_again_ns is not None and plan.ask_again_ns > now_ns)
    assert plan.ask_again_ns is None or plan.ask_again_ns > now_ns
    assert all(one.quantum_ns is None or one.quantum_ns > 0 for one in plan.running)
    assert all(0.0 < one.rate <= 1.0 for one in plan.running)
    assert plan.why


class VirtualGpu:
    """The engine and a card, as far as a policy sees them."""

    hides_drains = False
    """As in the engine: a job that drains is not seen until it asks again.  Then plans change with each drain."""

    def __init__(self, policy: Policy, gpu: GpuView = GPU) -> None:
        self.policy, self.gpu, self.now_ns = policy, gpu, 0
        self.jobs: dict[int, Job] = {}
        self.plan = Plan()
        self.turns: list[int] = []
        """Clients in the order of their grants."""
        self.idle_ns = 0
        self._numbers = self._clients = 0

    def job(self, name: str = "", owner: str = "", *, wanted: bool = True, drain_ns: int = 0, **rank: object) -> Job:
        """A client attaches."""
        self._clients += 1
        view = JobView(
            self._clients,
            name or f"job {self._clients}",
            State.WAITING,
            Turn(self._number(), self.now_ns),
            Rank(**rank),  # type: ignore[arg-type]
            owner=owner,
        )
        job = self.jobs[self._clients] = Job(view, drain_ns=drain_ns)
        if wanted:
            self.want(job)
        return job

    def want(self, job: Job) -> None:
        """The job waits for the GPU."""
        job.wanted = True
        if job.view.state is State.WAITING:
            job.turn(waiting_since_ns=self.now_ns)
        self.ask()

    def idle(self, job: Job) -> None:
        """The job has nothing to do: it gives the GPU back or leaves the queue."""
        job.wanted = False
        if job.view.state is State.RUNNING:
            self._release(job)
        elif job.view.state is State.COMING:
            job.view = replace(job.view, state=State.WAITING)
        self.ask()

    def leave(self, job: Job) -> None:
        """The client is gone."""
        if job.view.state is State.RUNNING:
            self._release(job)
        del self.jobs[job.client]
        self.tell(JobLeft(job.client))
        self.ask()

    def change(self, job: Job, **rank: object) -> None:
        """The operator changes a rank."""
        job.view = replace(job.view, rank=replace(job.view.rank, **rank))  # type: ignore[arg-type]
        self.ask()

    def has(self, *, memory: Memory | None = None, progress: Progress | None = None, job: Job) -> None:
        """Sets what is known of a job."""
        job.view = replace(job.view, memory=memory or job.view.memory, progress=progress or job.view.progress)

    def running(self) -> list[Job]:
        """The holders of leases, those that drain included."""
        return [job for job in self.jobs.values() if job.view.state is State.RUNNING]

    def holder(self) -> Job | None:
        """The only member that runs."""
        members = {one.client for one in self.plan.running}
        return next((job for job in self.running() if job.client in members), None)

    def views(self) -> list[JobView]:
        """Jobs that the policy sees: running and coming ones, then waiting ones in turn order."""
        hidden = [job for job in self.jobs.values() if self.hides_drains and job.drains_at_ns is not None]
        shown = [job.view for job in self.jobs.values() if job not in hidden and (job.wanted or job.view.state)]
        return sorted(shown, key=lambda view: (not view.state, view.turn.number))

    def ask(self) -> None:
        """Asks the policy and applies its plan, until nothing changes."""
        views = self.views()
        if not views:
            self.plan = Plan()
            return
        plan = self.policy.decide(self._view(), views, self.now_ns)
        assert plan == self.policy.decide(self._view(), views, self.now_ns), "decide is not pure"
        check(plan, views, self.now_ns)
        self.plan = plan
        self._apply()
        if self.hides_drains:
            return
        again = self.policy.decide(self._view(), self.views(), self.now_ns)
        assert {one.client for one in again.running} == {one.client for one in plan.running}, (
            "the plan does not stay once it is carried out"
        )

    def _view(self) -> GpuView:
        drains = [job.view for job in self.jobs.values() if self.hides_drains and job.drains_at_ns is not None]
        return replace(self.gpu, draining=tuple(drains))

    def fitting(self) -> list[int]:
        """The members whose memory fits."""
        free = self.gpu.capacity_bytes
        found: list[int] = []
        for one in self.plan.running:
            needs = self.jobs[one.client].view.memory.allocated_bytes
            if not found or needs <= free:
                free -= needs
                found.append(one.client)
        return found[:1] if self.gpu.exclusive else found

    def _apply(self) -> None:
        members = self.fitting()
        allotments = {one.client: one for one in self.plan.running}
        for job in self.jobs.values():
            if job.view.state is State.RUNNING and job.client not in members:
                if job.drains_at_ns is None:
                    job.drains_at_ns = self.now_ns + job.drain_ns
            elif job.view.state is State.RUNNING:
                job.drains_at_ns = None
                job.rate = allotments[job.client].rate
                quantum_ns = allotments[job.client].quantum_ns
                if quantum_ns is not None and job.view.turn.began_ns + quantum_ns <= self.now_ns:
                    job.turn(began_ns=self.now_ns)
            elif job.view.state is State.COMING and job.client not in members:
                job.view = replace(job.view, state=State.WAITING)
            elif job.view.state is State.WAITING and job.client in members:
                job.view = replace(job.view, state=State.COMING)
        if any(job.client not in members for job in self.running()):
            return
        for client in members:
            job = self.jobs[client]
            if job.view.state is State.COMING:
                self._grant(job)

    def _grant(self, job: Job) -> None:
        waiting_since_ns = job.view.turn.waiting_since_ns
        assert waiting_since_ns is not None
        job.max_wait_ns = max(job.max_wait_ns, self.now_ns - waiting_since_ns)
        job.view = replace(job.view, state=State.RUNNING)
        job.turn(waiting_since_ns=None, granted_at_ns=self.now_ns, began_ns=self.now_ns)
        job.rate = next(one.rate for one in self.plan.running if one.client == job.client)
        job.leases += 1
        self.turns.append(job.client)

    def _release(self, job: Job) -> None:
        used_ns = job.view.used_ns(self.now_ns)
        job.view = replace(job.view, state=State.WAITING)
        job.drains_at_ns = None
        waits_from = self.now_ns if job.wanted else None
        job.turn(
            number=self._number(),
            granted_at_ns=None,
            used_ns=used_ns,
            last_released_ns=self.now_ns,
            waiting_since_ns=waits_from,
        )
        self.tell(TurnEnded(job.view, self.now_ns, rate=job.rate))
        job.turn(charged_ns=used_ns)

    def tell(self, happened: Happened) -> None:
        """The policy observes."""
        self.policy.observe(happened)  # type: ignore[attr-defined]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _next_ns(self) -> int | None:
        """The next time at which something happens."""
        times = [job.drains_at_ns for job in self.running() if job.drains_at_ns is not None]
        if any(job.view.state is State.WAITING and job.wanted for job in self.jobs.values()):
            for one in self.plan.running:
                job = self.jobs[one.client]
                if job.view.state is State.RUNNING and one.quantum_ns is not None:
                    times.append(job.view.turn.began_ns + one.quantum_ns)
        if self.plan.ask_again_ns is not None:
            times.append(self.plan.ask_again_ns)
        return min(times, default=None)

    def until(self, end_ns: int) -> None:
        """Plays on."""
        while True:
            next_ns = self._next_ns()
            to_ns = end_ns if next_ns is None else min(end_ns, max(next_ns, self.now_ns))
            self._pass(to_ns)
            if next_ns is None or next_ns > end_ns:
                return
            drained = [
                job for job in self.running() if job.drains_at_ns is not None and job.drains_at_ns <= self.now_ns
            ]
            for job in drained:
                self._release(job)
                self.ask()
            if not drained:
                self.ask()

    def _pass(self, to_ns: int) -> None:
        if not self.running():
            self.idle_ns += to_ns - self.now_ns
        self.now_ns = to_ns

    def play(self, milliseconds: float) -> None:
        """Plays on for this time."""
        self.until(self.now_ns + int(milliseconds * MS))

    def used_ns(self, job: Job) -> int:
        """GPU time of a job so far."""
        return job.view.used_ns(self.now_ns)
