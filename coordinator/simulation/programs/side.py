"""Records of a model: one process on one GPU, with its lease, its memory and its memory order."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvshare.coordinator.protocol import messages


@dataclass(slots=True, eq=False)
class Move:
    """A memory order, carried out in pieces."""

    evict: bool
    order_id: int
    size: int
    credit: int
    moved: int = 0
    waiting: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """The present or last lease.  `newest` and `released` belong to one connection, since a coordinator with a lost
    journal restarts the numbering."""

    number: int = 0
    newest: int = 0
    released: int = 0
    used: bool = False
    """The process has worked under this lease."""
    waiters: int = 0


@dataclass(slots=True, eq=False)
class SideMemory:
    """Memory of one process on one GPU."""

    allocated: int = 0
    resident: int = 0
    pinned: int = 0
    pinning: int = 0
    """Size of an open request for pins."""
    move: Move | None = None
    growing: int = 0
    """Size of an open request for room."""
    requests: int = 0
    """Number of the last request for room."""
    restoring: bool = False
    """The open request is for memory that is missing at a grant; work waits for it."""

    def clear(self) -> None:
        """The process has ended."""
        self.move = None
        self.resident = self.allocated = self.pinned = 0


@dataclass(slots=True, eq=False)
class Counts:
    """The last report of work, and when it was sent."""

    wanted: bool = False
    at_ns: int = 0
    work: int = 0
    watched_ns: int = 0


@dataclass(slots=True, eq=False)
class Side:
    """One process on one GPU.  `open` and `closing` are the gate's states."""

    uuid: str
    ordinal: int
    lease: Lease = field(default_factory=Lease)
    memory: SideMemory = field(default_factory=SideMemory)
    open: bool = False
    closing: bool = False
    wanted: bool = False
    asked: bool = False
    excused: bool = False
    """Other clients may be granted beside this one."""
    busy_until_ns: int = 0
    settings: messages.GpuSettings | None = None
    counts: Counts = field(default_factory=Counts)
