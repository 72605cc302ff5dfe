"""Gangs: programs that run at the same time on several GPUs; see gangs/slots.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvshare.coordinator.model.gpu import Gpu
    from nvshare.coordinator.model.seat import Seat


@dataclass(slots=True, eq=False)
class Slot:
    """One gang has all of its GPUs.  Changed by gangs/slots.py."""

    gang: Gang
    gpus: dict[str, Gpu]
    quantum_ns: int
    began_ns: int
    gather_by_ns: int
    """Until then members that are ready wait for the others."""
    ends_ns: int | None = None
    """None: the members are being gathered."""


@dataclass(slots=True, eq=False)
class Gang:
    """All seats of clients that name it.  Changed by gangs/slots.py."""

    name: str
    seats: list[Seat] = field(default_factory=list)
    slot: Slot | None = None
    due_since_ns: int | None = None
    """A policy named a member, and the gang could not have all of its GPUs yet."""
    turns: int = 0
    gathered_ns: int = 0
    """Time for which its GPUs waited for each other, in all."""
