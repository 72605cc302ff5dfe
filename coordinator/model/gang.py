"""Gangs: programs that run at the same time; see engine/gangs/slots.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvshare.coordinator.model.gpu import Gpu
    from nvshare.coordinator.model.seat import Seat
    from nvshare.coordinator.protocol.messages import Progress


@dataclass(slots=True)
class Trial:
    """The progress of a gang and its rivals side by side and in slots.  Changed by engine/gangs/trials.py."""

    seats: frozenset[Seat] = frozenset()
    """The members and their rivals; empty: they are not measured."""
    since_ns: int = 0
    marks: dict[Seat, Progress] = field(default_factory=dict)
    """The beginning of a measurement; empty: none has begun."""
    side_by_side: dict[Seat, float] = field(default_factory=dict)
    """Work a second."""
    in_slots: bool = False
    until_ns: int = 0
    """When the result is void; 0: there is none yet."""
    slots_are_better: bool = False
    """The result."""
    why: str = ""


@dataclass(slots=True, eq=False)
class Gang:
    """All seats of clients that name it.  Changed by engine/gangs/slots.py."""

    name: str
    seats: list[Seat] = field(default_factory=list)
    gpus: dict[str, Gpu] = field(default_factory=dict)
    """The GPUs of its slot; empty: it has none."""
    began_ns: int = 0
    """When its slot began."""
    together_ns: int | None = None
    """Since when all members run in the slot; a slot that lasts for a quantum counts as gathered."""
    caller: str = ""
    """The GPU whose policy called it for the slot."""
    retries: int = 0
    """Slots since then in which a member had to end its drain."""
    told: bool = False
    """The log says that its members do not fit beside each other."""
    trial: Trial = field(default_factory=Trial)
    turns: int = 0
    gathered_ns: int = 0
    """Time from the beginning of slots until all members ran, in all."""
