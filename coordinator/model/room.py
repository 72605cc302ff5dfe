"""What bounds a client's memory on a GPU: records, changed by `memory/room.py` and `memory/pinning.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvshare.coordinator.model.events import PinsAsked
    from nvshare.coordinator.model.state import Seat


@dataclass(slots=True)
class Fit:
    """One client on one GPU."""

    immovable_bytes: int = 0
    promised_bytes: int = 0
    """It was told that so much may become immovable, and has not reported so much yet."""
    lacking_bytes: int = 0
    """It needs so much more than can be there; 0: it fits."""
    shut_out: bool = False
    """It gets no lease until it fits, or until `retry_ns` if it was refused room."""
    refused: bool = False
    """Under the lease at hand it was refused room, though it can have some beside what cannot move."""
    retry_ns: int = 0
    said_ns: int | None = None
    """When the log last told of it."""


@dataclass(slots=True, eq=False)
class Immovable:
    """One GPU."""

    bytes: int = 0
    swapping: dict[int, Seat] = field(default_factory=dict)
    """By client: those in mode `swap`."""
    asking: dict[int, PinsAsked] = field(default_factory=dict)
    """By client: questions that are not answered yet; see memory/pinning.py."""
    stale: bool = False
    """Somebody has to be looked at again."""
    told: bool = False
    """Somebody was told of less room than the capacity."""
    shut_out: int = 0
    """Seats that are."""
