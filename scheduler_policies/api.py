"""The policy interface: the views that a policy sees, the plan that it answers, and what it may observe.

A policy decides for ONE GPU: who runs now (the *running set*), for how long, at what rate.  It sees frozen views, never
the engine's records, so it cannot break an invariant.  The engine checks each plan, drops members whose memory does not
fit beside the others, and replaces a policy that raises or answers nonsense by round robin.

`decide` is pure: the same views at the same time lead to the same plan, and asking changes nothing.  Only `observe`
changes a policy's state.  Time is an argument: policies use no clock and no randomness.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


class JobClass(enum.IntEnum):
    """The purpose of a program."""

    BATCH = 0
    """The default."""
    INTERACTIVE = 1
    """A person or a request waits for it."""
    BEST_EFFORT = 2
    """It runs in what the others leave."""


class State(enum.IntEnum):
    """The state of a job.  Idle jobs are not shown to a policy."""

    WAITING = 0
    COMING = 1
    """In the running set; its memory is being brought in, or others drain."""
    RUNNING = 2
    """It holds a lease."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A job's claims.  Users and slots cap it."""

    priority: int = 0
    weight: int = 1
    """1 to 10 000, for policies that divide time."""
    job_class: JobClass = JobClass.BATCH
    share_request: float = 0.0
    """The guaranteed share of the GPU's time, 0 to 1; 0: none."""
    share_limit: float = 1.0
    """The job gets at most this share over a second, also when it is alone."""
    deadline_ns: int | None = None
    """When the job should be done."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A job's place in turn order, and its lease.  Times are ns of a monotonic clock."""

    number: int
    """Unique on its GPU.  The job that attached or released longest ago has the least.  Constant while it waits."""
    attached_at_ns: int
    waiting_since_ns: int | None = None
    granted_at_ns: int | None = None
    """None: it holds no lease."""
    began_ns: int = 0
    """When the present turn began: with the grant, or with the end of the turn before."""
    used_ns: int = 0
    """Time in all finished leases.  See `JobView.used_ns` for the present one."""
    charged_ns: int = 0
    """Time in leases up to the last `TurnEnded`, whichever policy was told."""
    last_released_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A job's work by its own count, as the hook reports it.  0: not known (yet)."""

    work: int = 0
    """All that it has done so far, in units of its own."""
    rate: float = 0.0
    """Work a second over the last report of the present running set."""
    alone_rate: float = 0.0
    """The same when the job had the GPU alone."""
    busy_alone: float = 0.0
    """Part of the time, 0 to 1, in which the GPU had work of the job when it ran alone."""
    measured_at_ns: int = 0
    """When `rate` was measured."""
    measured_for_ns: int = 0
    """The span for which the job has run undisturbed in the present running set."""
    alone_at_ns: int = 0
    """When `alone_rate` was measured last."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A job's memory on this GPU, in bytes."""

    allocated_bytes: int = 0
    """Memory that it has allocated, or may allocate without asking."""
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True)
class JobView:
    """One client of this GPU that waits for it or runs."""

    client: int
    name: str
    state: State
    turn: Turn
    rank: Rank = field(default_factory=Rank)
    progress: Progress = field(default_factory=Progress)
    memory: Memory = field(default_factory=Memory)
    user_id: int = 0
    owner: str = ""
    """The user or slot.  Time is divided between owners first, then between the programs of each.  "" for all clients
    if the operator divides time between programs."""
    gang: str = ""
    spatial: bool = False
    """It runs under MPS."""

    def used_ns(self, now_ns: int) -> int:
        """Time in leases, the present one included."""
        granted_at_ns = self.turn.granted_at_ns
        return self.turn.used_ns + (0 if granted_at_ns is None else now_ns - granted_at_ns)

    def uncharged_ns(self, now_ns: int) -> int:
        """Time in leases since the last `TurnEnded`; in a `TurnEnded`, the time that it is about."""
        return self.used_ns(now_ns) - self.turn.charged_ns


@dataclass(frozen=True, slots=True)
class GpuView:
    """The policy's GPU."""

    uuid: str
    capacity_bytes: int
    quantum_ns: int
    """The present quantum, fixed or automatic."""
    exclusive: bool = False
    """The operator wants one job at a time: the engine keeps the first member of a plan only."""
    switch_cost_ns: int = 0
    """Average time from the end of a job's last work to the next job's first: memory, messages."""
    memory_short: bool = False
    """The jobs' memory does not fit beside each other."""
    draining: tuple[JobView, ...] = ()
    """Those that end their work because the plan named them no longer.  They cannot be named before they ask again."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """The allotment of one member of the running set."""

    client: int
    quantum_ns: int | None = None
    """A turn of this length, counted from `Turn.began_ns`.  Once it has passed and the plan still names the job, a new
    turn begins.  The member gives the GPU back early when it is idle and others wait.  None: the job is a member for as
    long as the plan names it, also while it is idle."""
    rate: float = 1.0
    """The part of the time in which its work may keep the GPU busy; held by the hook's gate."""
    pacing_ns: int | None = None
    """Submitted GPU time that it may have unfinished; None: the coordinator's setting."""
    watch: bool = False
    """The hook measures `Progress.busy_alone` during this turn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The wanted state of one GPU.  The engine acts on the difference between the plan and what is."""

    running: tuple[Allotment, ...] = ()
    """The running set, most important first: where not all fit into memory, the last are dropped."""
    order: tuple[int, ...] = ()
    """The next jobs, as far as their order matters; others follow in turn order.  Memory moves ahead by this order."""
    ask_again_ns: int | None = None
    """`decide` is called at this time at the latest.  A plan without a member must name one if jobs wait."""
    why: str = ""
    """For people: one sentence, with figures, without the GPU's name."""
    reports: bool = True
    """A report of progress leads to a `decide`, if the policy reads them.  False: reports are only observed."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A lease ended, also by the end of its client.  `called`: the job ran as a member of its gang's slot, not because
    this GPU's policy named it.  `rate`: that of its last allotment.  `quiet_ns`: how much of the lease passed while no
    other job waited."""

    job: JobView
    now_ns: int
    called: bool = False
    rate: float = 1.0
    quiet_ns: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """A job's progress was reported: `job.progress` is new.  `running`: the clients that ran meanwhile.  `span_ns`: the
    time for which its rate holds."""

    job: JobView
    running: tuple[int, ...]
    now_ns: int
    span_ns: int


@dataclass(frozen=True, slots=True)
class JobLeft:
    """A client has left this GPU."""

    client: int


Happened = TurnEnded | Measured | JobLeft


@runtime_checkable
class Policy(Protocol):
    """The required operation.  `PolicyBase` has defaults for the others."""

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """The plan from now on.  Pure.

        `jobs` holds the jobs that run or come, then those that wait; each in turn order: the job with the oldest
        release is first, and one that never ran counts from its attachment.  Paused jobs, and those that cannot fit,
        are not in it.  Never empty.

        Called when a job begins or ceases to want the GPU, at the end of a turn while others wait, at `ask_again_ns`,
        after a report of progress if the policy reads them, and when a rank, a quantum or what fits has changed; for a
        lone job too.
        """
        ...


class PolicyBase:
    """Defaults of the optional operations.  An operation that is not overridden is never called."""

    reads_progress = False
    """Reports of progress are observed (`Measured`), and lead to a `decide` unless the plan says otherwise."""

    def observe(self, happened: Happened) -> None:
        """The only place that changes the policy's state.  Called before the `decide` that the event leads to."""

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """Longest wait with this number of clients on the GPU, without drains and memory moves; None: no bound.

        The tests check it.  Not called in production.
        """
        return None
