"""The operator's decisions for the core.  The shell validates; the core asserts.  The records never change."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from nvshare.coordinator.protocol.messages import UNBOUNDED, Sharing

MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000
RECONNECT_NS: Final = SECOND_NS
"""After a start, clients of an earlier coordinator connect again within this time."""


class OverdueAction(enum.Enum):
    """The action on a client whose drain passes its deadline.  Other clients run beside it in any case."""

    NOTHING = "nothing"
    DEMOTE = "demote"
    """It runs only when nobody else waits, until it gives a lease back in time."""
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantumSettings:
    """Length of turns."""

    quantum_ns: int | None = None
    """None: automatic."""
    switch_share: float = 0.05
    """Automatic quantum: the share of time that switching may cost; each GPU begins with this."""
    quantum_min_ns: int = 20 * MILLISECOND_NS
    quantum_max_ns: int = 60 * SECOND_NS
    """Bounds of the automatic quantum."""
    longest_wait_ns: int = 5 * SECOND_NS
    """An automatic quantum is short enough for this wait, unless switching would then cost more than a fifth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Duties of a lease holder."""

    drain_deadline_ns: int = 10 * SECOND_NS
    overdue_action: OverdueAction = OverdueAction.NOTHING
    pacing_budget_ns: int = 10 * MILLISECOND_NS
    """Submitted GPU time that a client may have unfinished while others use the same GPU."""
    idle_release_ns: int = 2 * MILLISECOND_NS
    silent_ns: int = SECOND_NS
    """A member without a turn that reports no progress for this time leaves the running set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Moves of memory, and the host memory behind them."""

    move_deadline_ns: int = 30 * SECOND_NS
    """After this time the next client is granted with the memory that is there."""
    move_stall_ns: int = 5 * SECOND_NS
    """An order without a report for this time has stalled."""
    host_budget_bytes: int = UNBOUNDED
    """Pinned host memory that all clients of the node may have together."""
    host_fair_times: int = 8
    """An owner may have at most this many times what is left for others; 0: there are no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the core."""

    policy: str = "auto"
    sharing: Sharing = Sharing.AUTO
    users_first: bool = True
    """Time is divided between users and slots, then between the programs of each; otherwise between programs."""
    quantum: QuantumSettings = field(default_factory=QuantumSettings)
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    max_clients: int = 1024
    check_invariants: bool = False
    """Checks all invariants after each event, O(clients): for tests.  Otherwise a cheap subset."""
    event_log_length: int = 4096
