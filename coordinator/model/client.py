"""A connected client."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.placement import NOT_PLACED, Placement
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.protocol.messages import MemoryMode

if TYPE_CHECKING:
    from nvshare.coordinator.model.seat import Seat


@dataclass(slots=True)
class Identity:
    """A client's identity; `group` as in `events.ClientRegistered`.  It never changes."""

    name: str
    program: str
    process_id: int
    user_id: int
    group: str
    allocation: str = ""
    """Of the slot that `group` names: one of the same name may be made anew while programs of this one live."""

    def __str__(self) -> str:
        return f"{self.name} (process {self.process_id})"


@dataclass(slots=True)
class HostShare:
    """A client's share of pinned host memory.  Changed by engine/memory/host_budget.py."""

    asked: bool = False
    """It has asked for a share, so it takes part in the host budget."""
    share_bytes: int = 0
    claim_bytes: int = 0
    """The amount of its first question, or of a smaller one since."""


class ParkState(enum.Enum):
    """How far a client is on its way out of the GPUs; see engine/parking/parking.py."""

    RUNNING = "running"
    PREPARING = "preparing"
    LEAVING = "leaving"
    CLOSING = "closing"
    SAVING = "saving"
    PARKED = "parked"
    WAKING = "waking"


_CLOSED: Final = frozenset({ParkState.CLOSING, ParkState.SAVING, ParkState.PARKED, ParkState.WAKING})


@dataclass(slots=True)
class Move:
    """The move of a client to another GPU.  Changed by engine/parking/."""

    target: str = ""
    """The GPU on which it is to come back; "": the one that it has left."""
    why: str = ""
    """The reason of the last attempt."""
    tried_at_ns: int | None = None
    source: str = ""
    """The GPU from which it was moved last; "": it was never moved."""
    source_why: str = ""


@dataclass(slots=True)
class Parking:
    """Changed by engine/parking/, `state` also by engine/recovery.py."""

    state: ParkState = ParkState.RUNNING
    since_ns: int = 0
    """When it began to leave, or to close."""
    why: str = ""
    """The reason of the last refusal or failure."""
    refused_at: int = -1
    """The number of its leases then: it is not tried again before the next one."""
    retry_at_ns: int | None = None
    """The next attempt to wake it, after one that has failed."""
    unwanted: bool = False
    """To be woken as soon as the checkpoint is made."""
    began_ns: int = 0
    """When it began to leave last."""
    move: Move = field(default_factory=Move)

    @property
    def closed(self) -> bool:
        """Its hook lets no call through: it has no lease, and moves no memory."""
        return self.state in _CLOSED


@dataclass(slots=True, eq=False)
class Client:
    """One connection.  Changed by engine/operator_commands.py."""

    client_id: int
    identity: Identity
    memory_mode: MemoryMode
    memory_auto: bool
    """The hook chose the mode."""
    registered_at_ns: int
    facts: Facts
    time_owner: str
    """As `JobView.owner`."""
    placement: Placement = NOT_PLACED
    linked: bool = False
    """Its GPUs reach each other: it is a gang of itself, if it is in no other."""
    parking: Parking = field(default_factory=Parking)
    host: HostShare = field(default_factory=HostShare)
    stopped: bool = False
    """Its process is stopped.  Changed by engine/stopped.py."""
    seats: dict[int, Seat] = field(default_factory=dict)
    """By the client's own ordinal of the GPU."""

    @property
    def used_seats(self) -> list[Seat]:
        """Seats on GPUs where it has memory or has asked for a turn; all, if there are none.

        A program that asks for a GPU's memory size has a seat there, and PyTorch does so for each GPU that it sees.
        """
        used = [seat for seat in self.seats.values() if seat.place.active or seat.memory.allocated_bytes]
        return used or list(self.seats.values())

    @property
    def owner(self) -> str:
        """The user, or the allocation of a slot (after "#"), whose programs count together with it."""
        identity = self.identity
        return f"slot {identity.group}#{identity.allocation}" if identity.group else f"user {identity.user_id}"
