"""A connected client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import Rank

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

    def __str__(self) -> str:
        return f"{self.name} (process {self.process_id})"


@dataclass(slots=True)
class HostShare:
    """A client's share of pinned host memory.  Changed by memory/host_budget.py."""

    asked: bool = False
    """It has asked for a share, so it takes part in the host budget."""
    share_bytes: int = 0
    claim_bytes: int = 0
    """The amount of its first question, or of a smaller one since."""


@dataclass(slots=True, eq=False)
class Client:
    """One connection.  Changed by engine/operator_commands.py."""

    client_id: int
    identity: Identity
    memory_mode: MemoryMode
    memory_auto: bool
    """The hook chose the mode."""
    memory_limit_bytes: int
    """For GPUs that it attaches later."""
    registered_at_ns: int
    rank: Rank
    gang: str
    time_owner: str
    """As `JobView.owner`."""
    spatial: bool = False
    paused: bool = False
    host: HostShare = field(default_factory=HostShare)
    seats: dict[int, Seat] = field(default_factory=dict)
    """By the client's own ordinal of the GPU."""

    @property
    def owner(self) -> str:
        """The user or slot whose programs count together with it."""
        identity = self.identity
        return f"slot {identity.group}" if identity.group else f"user {identity.user_id}"
