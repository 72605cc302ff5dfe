"""A *seat*: one client on one GPU, and the transitions that it may make.

    IDLE ──request──> WAITING ──chosen──> NEXT ──memory is there──> HOLDING ──revoke──> REVOKING ──deadline──> OVERDUE
      ^                  ^ └──────────────grant─────────────────────^  │                   │                     │
      └──────────────────┴──────────────────────release─────────────────┴───────────────────┴─────────────────────┘

Rules:
- A seat changes phase through `Seat.enter` only, along `TRANSITIONS`.
- A seat is in `gpu.leases.by_client` exactly in the phases `WITH_LEASE`.
- A seat is in `gpu.wait_queue` exactly when it is WAITING and schedulable, and its client is not paused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.gang import GangTurn
from nvshare.coordinator.model.memory import SeatMemory, SeatMoves, SeatRoom
from nvshare.coordinator.model.statistics import SeatStatistics
from nvshare.coordinator.protocol.messages import GpuSettings
from nvshare.scheduler_policies.api import ClientView

if TYPE_CHECKING:
    from nvshare.coordinator.model.client import Client
    from nvshare.coordinator.model.gpu import Gpu


class Phase(enum.Enum):
    """Where a seat stands."""

    IDLE = "idle"
    WAITING = "waiting"
    NEXT = "next"
    HOLDING = "holding"
    REVOKING = "revoking"
    OVERDUE = "overdue"


IDLE, WAITING, NEXT, HOLDING, REVOKING, OVERDUE = Phase
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
    """Where a seat stands in turn order.  Changed by engine/leases.py."""

    attached_at_ns: int
    turn: int
    """Unique on its GPU; the seat that attached or released longest ago has the least.  Constant while it waits."""
    waiting_since_ns: int | None = None
    last_released_ns: int | None = None
    demoted: bool = False
    active: bool = False
    """It has asked for the GPU at least once.  Clients that only look at the GPU do not cause pacing of others."""
    view: ClientView | None = None
    """Cached while the seat waits; None when something in it has changed."""


@dataclass(slots=True)
class Lease:
    """The lease of a seat, or its last one.  Changed by engine/leases.py; a gang's turn moves `quantum_ends_ns`."""

    lease_id: int = 0
    granted_at_ns: int | None = None
    quantum_ends_ns: int = 0
    quantum_since_ns: int = 0
    """When the present quantum began: with the grant, a renewal, or a change of policy."""
    handed_over_from_ns: int | None = None
    """When the GPU became free for this lease, if another client had it and no memory had to move."""
    revoked_at_ns: int = 0
    drain_deadline_ns: int | None = None
    stray: bool = False
    """The client claimed a lease that is not its own.  It is revoked, and never counts as the holder's."""
    waiters_sent: bool = False
    """The holder knows that others wait."""
    alerted: bool = False
    """The holder and the next client know that the turn ends; see engine/standby.py."""

    def begin_quantum(self, now_ns: int, quantum_ns: int) -> None:
        """The lease ends after this quantum if others wait."""
        self.quantum_since_ns, self.quantum_ends_ns = now_ns, now_ns + quantum_ns


@dataclass(slots=True)
class SentSettings:
    """What the client was sent of the GPU's settings.  Changed by memory/client_settings.py."""

    epoch: int = -1
    settings: GpuSettings | None = None
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
    gang_turn: GangTurn = field(default_factory=GangTurn)
    statistics: SeatStatistics = field(default_factory=SeatStatistics)

    def enter(self, phase: Phase) -> None:
        """The only way to change phase."""
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    @property
    def schedulable(self) -> bool:
        """It may be in the wait queue."""
        return not self.client.paused and not self.room.unschedulable

    def held_ns(self, now_ns: int) -> int:
        """Time in leases, the present one included."""
        used_ns, granted_at_ns = self.statistics.used_ns, self.lease.granted_at_ns
        return used_ns if granted_at_ns is None else used_ns + now_ns - granted_at_ns

    def view(self, now_ns: int) -> ClientView:
        """What a policy sees.  While the seat waits nothing in it depends on the time, so it is cached."""
        place, granted_at_ns = self.place, self.lease.granted_at_ns
        if place.view is not None and granted_at_ns is None:
            return place.view
        client, memory, statistics = self.client, self.memory, self.statistics
        place.view = ClientView(
            client.client_id,
            client.identity.name,
            client.priority,
            place.attached_at_ns,
            place.waiting_since_ns,
            granted_at_ns,
            place.last_released_ns,
            self.held_ns(now_ns),
            statistics.leases,
            statistics.submissions,
            memory.allocated_bytes,
            memory.resident_bytes,
            client.identity.user_id,
            client.weight,
            client.identity.group,
            client.time_owner,
        )
        return place.view
