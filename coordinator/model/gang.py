"""Gangs: programs that run at the same time on several GPUs; see gangs/coscheduling.py for the terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvshare.coordinator.model.gpu import Gpu
    from nvshare.coordinator.model.seat import Seat


@dataclass(frozen=True, slots=True)
class Chosen:
    """A member that its policy has chosen, and when that was on its GPU's turn clock."""

    seat: Seat
    waiting_since_ns: int | None
    clock_ns: int


@dataclass(slots=True, eq=False)
class Gang:
    """All seats of clients that name it.  Changed by gangs/coscheduling.py and engine/assembly.py."""

    name: str
    seats: list[Seat] = field(default_factory=list)
    pending_since_ns: int | None = None
    chosen: dict[str, Chosen] = field(default_factory=dict)
    """By GPU: the member that the policy there has chosen since the last turn."""
    protected: set[str] = field(default_factory=set)
    """GPUs whose policy chose a member that had to wait for the others.  Policies there do not preempt that turn."""
    reserved: dict[str, Gpu] = field(default_factory=dict)
    """GPUs that are being freed for the gang, or are free and wait for the others."""
    gathering_since_ns: int | None = None
    """The reserved GPUs wait for each other.  None: each is granted as soon as it can be."""
    deadline_ns: int = 0
    """How long they wait."""
    quantum_ns: int = 0
    ends_ns: int = 0
    """The end of the present turn, or of the last one."""
    turns: int = 0
    gathered_ns: int = 0
    """Time for which GPUs were reserved, in all."""


@dataclass(slots=True)
class GangTurn:
    """One seat as a member or neighbour of gangs.  Changed by gangs/coscheduling.py and engine/assembly.py."""

    gang: Gang | None = None
    protected_from_gangs: bool = False
    """No gang may interrupt this turn."""
    protected_from_policy: bool = False
    """The policy chose this turn earlier and may have forgotten why, so it is not asked about preemption."""
    co_scheduled_at_ns: int | None = None
    """From this time the lease is a co-scheduled turn of its gang."""
    accounted_until_ns: int = 0
    """The lease has been set against the debt of gangs up to this time."""
    remaining_ns: int = 0
    """What is left of a turn that a gang interrupted.  The seat keeps its place in turn order."""


@dataclass(slots=True)
class GpuGangs:
    """What gangs have of one GPU.  Changed by gangs/coscheduling.py."""

    reserved_for: Gang | None = None
    debt_ns: int = 0
    """Time of co-scheduled turns that turns of the policy have not made up for yet."""
