"""A *seat*: one client on one GPU, the transitions that it may make, and the queue of those that wait.

    IDLE ──request──> WAITING ──chosen──> NEXT ──memory is there──> HOLDING ──revoke──> REVOKING ──deadline──> OVERDUE
      ^                  ^ └──────────────grant─────────────────────^  │                   │                     │
      └──────────────────┴──────────────────────release─────────────────┴───────────────────┴─────────────────────┘

Rules:
- A seat changes phase through `Seat.enter` only, along `TRANSITIONS`.
- A seat is in `gpu.leases.by_client` exactly in the phases `WITH_LEASE`.
- A seat is in `gpu.wait_queue` exactly when it is WAITING and schedulable.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.client import ParkState
from nvshare.coordinator.model.memory import SeatMemory, SeatMoves, SeatRoom
from nvshare.coordinator.model.statistics import RecentSum, SeatStatistics
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.api import Allotment, JobView, Memory, Progress, State, Turn

if TYPE_CHECKING:
    from nvshare.coordinator.model.client import Client
    from nvshare.coordinator.model.gpu import Gpu


class Phase(enum.Enum):
    """The phase of a seat."""

    IDLE = "idle"
    WAITING = "waiting"
    NEXT = "next"
    HOLDING = "holding"
    REVOKING = "revoking"
    OVERDUE = "overdue"


class Contention(enum.Enum):
    """What a holder knows of others that want its turn."""

    WAITERS = "others wait"
    QUIET = "nobody waits"
    NONE = "nobody waited when its turn ended"


IDLE, WAITING, NEXT, HOLDING, REVOKING, OVERDUE = Phase
_STATES: Final = {
    IDLE: State.WAITING,
    WAITING: State.WAITING,
    NEXT: State.COMING,
    HOLDING: State.RUNNING,
    REVOKING: State.RUNNING,
    OVERDUE: State.RUNNING,
}
WITH_LEASE: Final = frozenset({HOLDING, REVOKING, OVERDUE})
TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    IDLE: frozenset({WAITING, HOLDING, REVOKING}),  # the latter two: a claim after reconnection
    WAITING: frozenset({NEXT, HOLDING}),
    NEXT: frozenset({WAITING, HOLDING}),
    HOLDING: frozenset({IDLE, REVOKING}),
    REVOKING: frozenset({IDLE, OVERDUE}),
    OVERDUE: frozenset({IDLE}),
}


@dataclass(slots=True)
class Place:
    """A seat's place in turn order, and its recent use of the GPU.  Changed by engine/leases.py."""

    attached_at_ns: int
    turn: int
    """Unique on its GPU; the seat that attached or released longest ago has the least.  Constant while it waits."""
    waiting_since_ns: int | None = None
    last_released_ns: int | None = None
    charged_ns: int = 0
    """Time in leases up to the last one that a policy was told of."""
    demoted: bool = False
    active: bool = False
    """It has asked for the GPU at least once.  Clients that only look at the GPU do not cause pacing of others."""
    view: JobView | None = None
    """Cached; None when something in it has changed."""
    recent: RecentSum = field(default_factory=RecentSum)


@dataclass(slots=True)
class Lease:
    """The lease of a seat, or its last one.  Changed by engine/leases.py, its turn by engine/reconcile.py."""

    lease_id: int = 0
    granted_at_ns: int | None = None
    began_ns: int = 0
    """When the present turn began: with the grant, or with the end of the turn before."""
    quiet_before_ns: int = 0
    """The GPU's quiet clock at the grant."""
    ends_ns: int | None = None
    """The end of the present turn, if others wait.  None: the lease lasts as long as the plan names the client."""
    interrupted: bool = False
    """A gang's slot cut the turn short: the client keeps its place in turn order."""
    called: bool = False
    """The lease belongs to a slot of its gang: the policy of this GPU has not named the client."""
    handed_over_from_ns: int | None = None
    """When the GPU became free for this lease, if another client had it and no memory had to move."""
    revoked_at_ns: int = 0
    drain_deadline_ns: int | None = None
    stray: bool = False
    """The client claimed a lease that is not its own.  It is revoked, and never counts as the holder's.  If the client
    cannot have had it, the seat stays IDLE, and its requests wait for its release."""
    contention: Contention = Contention.QUIET
    alerted: bool = False
    """The holder and the next client know that the turn ends; see engine/leases.py."""


_NO_REPORT: Final = messages.Progress(0, 0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class SeatProgress:
    """One client on one GPU.  Changed by engine/progress.py."""

    last: messages.Progress = _NO_REPORT
    """The newest report, at the latest as of when it came."""
    rate: float = 0.0
    """Work a second between the last two reports, if the running set was the same."""
    step_rate: float = 0.0
    measured_for_ns: int = 0
    alone_rate: float = 0.0
    alone_at_ns: int = 0
    alone_is_guess: bool = False
    """It was measured while the client filled its queue."""
    busy_alone: float = 0.0
    ahead_ns: float = 0.0
    """Lead of the client over its rate alone."""
    recent: RecentSum = field(default_factory=lambda: RecentSum(span_ns=20_000_000_000))
    """Work as it was reported."""

    def view(self) -> Progress:
        """The progress as a policy sees it."""
        return Progress(
            self.last.work,
            self.rate,
            self.alone_rate,
            self.busy_alone,
            self.last.at_ns,
            self.measured_for_ns,
            self.alone_at_ns,
        )


@dataclass(slots=True)
class SentSettings:
    """Settings of the GPU that the client was sent.  Changed by engine/memory/client_settings.py."""

    epoch: int = -1
    settings: messages.GpuSettings | None = None
    allotment: Allotment | None = None
    """The newest one, which `settings` tells."""
    prepare_bytes: int = 0
    """Host memory that the client was told to have ready."""


@dataclass(slots=True, eq=False)
class Seat:
    """One client on one GPU.  Its records name the modules that change them."""

    client: Client
    gpu: Gpu
    ordinal: int
    place: Place
    memory: SeatMemory
    phase: Phase = IDLE
    lease: Lease = field(default_factory=Lease)
    moves: SeatMoves = field(default_factory=SeatMoves)
    room: SeatRoom = field(default_factory=SeatRoom)
    sent: SentSettings = field(default_factory=SentSettings)
    progress: SeatProgress = field(default_factory=SeatProgress)
    statistics: SeatStatistics = field(default_factory=SeatStatistics)

    def enter(self, phase: Phase) -> None:
        """The only way to change phase."""
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
        self.place.view = None

    @property
    def schedulable(self) -> bool:
        """It may be in the wait queue."""
        client = self.client
        runs = client.parking.state in (ParkState.RUNNING, ParkState.PREPARING)
        return runs and not (client.facts.paused or client.stopped or self.room.unschedulable)

    @property
    def in_debt(self) -> bool:
        """Its owner has overstayed: it waits while others want the GPU."""
        return self.client.owner in self.gpu.leases.debts

    def held_ns(self, now_ns: int) -> int:
        """Time in leases, the present one included."""
        used_ns, granted_at_ns = self.statistics.used_ns, self.lease.granted_at_ns
        return used_ns if granted_at_ns is None else used_ns + now_ns - granted_at_ns

    def view(self) -> JobView:
        """The seat as a policy sees it.  Nothing in it depends on the time, so it is cached."""
        place = self.place
        if place.view is None:
            client, lease, memory = self.client, self.lease, self.memory
            state = _STATES[self.phase]
            place.view = JobView(
                client.client_id,
                client.identity.name,
                state,
                Turn(
                    place.turn,
                    place.attached_at_ns,
                    place.waiting_since_ns,
                    lease.granted_at_ns,
                    lease.began_ns,
                    self.statistics.used_ns,
                    place.charged_ns,
                    place.last_released_ns,
                ),
                client.facts.rank,
                self.progress.view(),
                Memory(max(memory.allocated_bytes, memory.claimed_bytes), memory.resident_bytes),
                client.identity.user_id,
                client.time_owner,
                client.facts.gang,
                client.facts.spatial,
            )
        return place.view


class WaitQueue:
    """The seats that wait for a GPU and may be granted, each once, in turn order.

    Joining and leaving cost O(log n) comparisons.  The policies' view is made once per change."""

    __slots__ = ("_demoted", "_seats", "_shown", "_turns", "_views")

    def __init__(self) -> None:
        self._turns: list[int] = []
        self._shown: list[JobView] = []  # in the order of turns
        self._seats: dict[int, Seat] = {}  # by turn
        self._views: tuple[JobView, ...] | None = None
        self._demoted = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, seat: Seat) -> bool:
        return self._seats.get(seat.place.turn) is seat

    def join(self, seat: Seat) -> None:
        """Inserts the seat at its place in turn order."""
        turn = seat.place.turn
        assert turn not in self._seats
        index = bisect_left(self._turns, turn)
        self._turns.insert(index, turn)
        self._shown.insert(index, seat.view())
        self._seats[turn] = seat
        self._demoted += seat.place.demoted
        self._views = None

    def leave(self, seat: Seat) -> None:
        """Removes the seat: it was chosen, paused or is gone."""
        turn = seat.place.turn
        index = bisect_left(self._turns, turn)
        del self._seats[turn], self._turns[index], self._shown[index]
        self._demoted -= seat.place.demoted
        self._views = None

    def changed(self, seat: Seat) -> None:
        """Something that a policy sees of the seat has changed.  The seat need not be in the queue."""
        seat.place.view = None
        if seat in self:
            self._shown[bisect_left(self._turns, seat.place.turn)] = seat.view()
            self._views = None

    def views_without(self, seats: Iterable[Seat]) -> tuple[JobView, ...]:
        """`views` without some of the seats in the queue, in less than linear comparisons."""
        if self.hides:
            clients = {seat.client.client_id for seat in seats}
            return tuple(view for view in self.views() if view.client not in clients)
        shown = list(self._shown)
        for index in sorted((bisect_left(self._turns, seat.place.turn) for seat in seats), reverse=True):
            del shown[index]
        return tuple(shown)

    @property
    def hides(self) -> bool:
        """Demoted clients wait, which a policy does not see as long as others do."""
        return self._demoted > 0

    def hides_seat(self, seat: Seat) -> bool:
        """A policy does not see this seat, because others wait that are not demoted."""
        return seat.place.demoted and self._demoted < len(self._shown)

    def seats(self) -> list[Seat]:
        """Waiting seats in turn order."""
        return [self._seats[turn] for turn in self._turns]

    def views(self) -> tuple[JobView, ...]:
        """The candidates of a policy: the queue without demoted seats, unless there are no others."""
        if self._views is None:
            shown = self._shown
            if 0 < self._demoted < len(shown):
                shown = [seat.view() for seat in self.seats() if not seat.place.demoted]
            self._views = tuple(shown)
        return self._views
