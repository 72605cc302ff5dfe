"""Memory of seats and GPUs: usage, moves, growth, room, and the switch of a lease that waits for memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvshare.coordinator.model.statistics import MoveStatistics, RecentSum, SeatMoveStatistics
from nvshare.coordinator.protocol.messages import MOST_BYTES, Target

if TYPE_CHECKING:
    from nvshare.coordinator.model.seat import Seat


@dataclass(slots=True)
class SeatMemory:
    """Memory of one client on one GPU.

    The first four fields are changed by `claims.set_usage` alone, `growth` by engine/memory/admission.py.
    """

    allocated_bytes: int = 0
    resident_bytes: int = 0
    pinned_bytes: int = 0
    host_bytes: int = 0
    released_bytes: int = 0
    """What the program itself has freed under pressure, as it reports."""
    prepared_bytes: int = 0
    """Pinned host memory that an eviction finds ready, as it reports."""
    reserved_bytes: int = 0
    """The client may allocate up to this without asking again."""
    limit_bytes: int = 0
    """0: none."""
    highest_limit_bytes: int = 0
    """Since it attached; 0: none.  What it has may be more than its limit, if that has fallen."""
    attached_bytes: int = 0
    """Allocated as it attached, by its own word.  It may be more than its limit, and may come back to the GPU."""
    growth: Growth | None = None
    reported: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Allocated, resident, pinned and host memory by the last report, as `claims.set_usage` takes them."""
    unconfirmed_bytes: int = 0
    """Reported, but neither promised nor shown by the driver's figures: it does not count.  `set_usage` changes it."""
    looked_bytes: int = 0
    """The most resident memory at any look.  This and the next are changed by engine/memory/checks.py."""
    accused: bool = False
    """The log names the client as one that reports more than it has."""
    claimed_bytes: int = 0
    """As `claims.claim` has counted it."""
    needed_bytes: int = 0
    """Allocated or claimed, as `claims.claim` has counted it."""


@dataclass(slots=True, eq=False)
class Growth:
    """A client's question for room that is not answered yet.  Changed by engine/memory/admission.py."""

    total_bytes: int
    asked_ns: int
    deadline_ns: int
    lacking_bytes: int = 0
    """The card lacks this much of it, whatever the figures say, and no client was told to make room yet."""
    waits: bool = False
    """Others make room on the card, by evictions and by parking (engine/parking/parking.py)."""
    evicts: bool = False
    """Some were evicted, so the driver is worth another question."""


@dataclass(slots=True, eq=False)
class Move:
    """A client is on its way to its target.  Changed by engine/memory/moves.py."""

    out: bool
    target_bytes: int
    goal_bytes: int
    """Where it ends; at a switch a move up waits at its target until that rises."""
    bytes: int
    """From where it began to its goal."""
    started_ns: int
    heard_ns: int
    """When it began, or its client last came further, or its target rose again."""
    exposed_before_ns: int
    """The GPU's clock of exposed moves when it began."""
    moving_before_ns: int
    """The last of `SeatMoves.sums` when it began."""
    unhindered: bool
    """Its only target is its goal, so its time measures the speed of the link."""
    moved_bytes: int = 0
    stalled: bool = False
    waits: bool = False
    """The client is at rest at a target that is to rise."""

    @property
    def moving(self) -> bool:
        """It goes on by itself; otherwise it waits for a higher target, or its client hangs."""
        return not (self.stalled or self.waits)


@dataclass(frozen=True, slots=True)
class Rest:
    """A client goes no further towards a target."""

    grants: int
    """`LeaseStatistics.grants` then."""
    out: bool
    target_bytes: int


@dataclass(slots=True)
class Ending:
    """Memory of a client that is gone, while its process has not ended or others may map it.

    Changed by engine/memory/claims.py and engine/memory/checks.py.
    """

    bytes: int
    until_ns: int
    """From then on it is not waited for."""
    exported_bytes: int
    """The part that other processes may map, and that then stays after the end."""
    ended: bool = False
    """The process has ended: the driver's figures say what others hold of the exported part."""
    asked: bool = False
    """They were asked for after that."""


@dataclass(slots=True)
class SeatMoves:
    """Moves of one client on one GPU.  Changed by engine/memory/moves.py."""

    move: Move | None = None
    """Also one that nobody waits for any more."""
    told: Target = field(default_factory=lambda: Target(0, 0, 0))
    """The newest, with the newest answers."""
    asked: tuple[int, int] = (0, 0)
    """Numbers of the newest questions for room and for pins."""
    open: dict[int, int] = field(default_factory=dict)
    """By number: the targets that the client may still obey.  Empty without a move."""
    sums: tuple[int, int, int] = (0, 0, 0)
    """Bytes moved out and in since it attached, and the time that this took, by its own word."""
    rest: Rest | None = None
    """How the last target was missed, if it was."""
    statistics: SeatMoveStatistics = field(default_factory=SeatMoveStatistics)
    recent: RecentSum = field(default_factory=RecentSum)
    """Bytes moved out and in."""


@dataclass(slots=True)
class SeatRoom:
    """Room for one client on its GPU.  Changed by engine/memory/room.py and engine/memory/pinning.py."""

    immovable_bytes: int = 0
    promised_bytes: int = 0
    """The client was allowed to make this much immovable, and has not reported it yet."""
    lacking_bytes: int = 0
    """The client's need beyond its room; 0: it fits."""
    unschedulable: bool = False
    """It gave its lease back unused, and gets none until it fits, or until `retry_at_ns` if it was refused room."""
    refused: bool = False
    """It was refused room under its present lease: by its limit, or by memory of others that does not move."""
    retry_at_ns: int = 0
    logged_at_ns: int | None = None


@dataclass(slots=True, eq=False)
class Immovable:
    """Memory of one GPU that cannot move.  Changed by engine/memory: room.py, pinning.py and claims.py."""

    bytes: int = 0
    questions: dict[int, int] = field(default_factory=dict)
    """By client: the bytes of questions for pins that are not answered yet."""
    ending: dict[int, Ending] = field(default_factory=dict)
    """By process id: memory that leaves the GPU with its process."""
    stale: bool = False
    """A seat's room must be computed again."""
    limits_sent: bool = False
    """A client was told of less room than the capacity."""
    unschedulable: int = 0
    """How many seats are unschedulable."""


@dataclass(slots=True, eq=False)
class Overflow:
    """Memory that does not fit on one GPU, as clients were told.  Changed by engine/memory/client_settings.py."""

    bytes: int = 0
    reported: dict[int, None] = field(default_factory=dict)
    """Clients whose usage has changed since they were told.  `claims.set_usage` adds them."""


@dataclass(slots=True, eq=False)
class GpuMemory:
    """Memory of one GPU.  `claims.set_usage` changes the sums."""

    total_bytes: int
    capacity_bytes: int
    integrated: bool = False
    """The GPU has the host's memory: programs there share `total_bytes` with all else, and moves make no room."""
    allocated_bytes: int = 0
    resident_bytes: int = 0
    host_bytes: int = 0
    claimed_bytes: int = 0
    needed_bytes: int = 0
    """Sums over the seats."""
    overflow: Overflow = field(default_factory=Overflow)
    changed_groups: dict[str, None] = field(default_factory=dict)
    """Owners of slots' programs whose memory has changed since they were told.  `claims.claim` adds them."""
    evictable: dict[int, Seat] = field(default_factory=dict)
    """By client: seats with resident memory."""
    moving: dict[int, Seat] = field(default_factory=dict)
    """By client: seats of which memory moves."""
    growing: dict[int, Seat] = field(default_factory=dict)
    """By client: seats whose question for room is not answered yet."""
    immovable: Immovable = field(default_factory=Immovable)
    looking: dict[int, int] | None = None
    """A look at the driver's figures is under way: what clients with unconfirmed memory had reported as it began.

    This field and the next four are changed by engine/memory/checks.py, `listed` also by engine/recovery.py.
    """
    look_again: bool = False
    """Another one is to follow: the figures under way may be too old."""
    listed: dict[str, int] = field(default_factory=dict)
    """By process id, in decimal: memory at the newest look."""
    unlisted_bytes: int = MOST_BYTES
    """Used memory that no listed process has, at the newest look; before the first one it may be anything."""
    checked_at_ns: int | None = None
    """When the figures said last how much is used."""
    other_bytes: int = 0
    """Used memory of the card that no client reports, by these figures: contexts, the driver's own, other programs."""
    short: bool = False
    """The card lacked memory that the figures call free.  Set by engine/memory/moves.py."""
    statistics: MoveStatistics = field(default_factory=MoveStatistics)
    recent_moved: RecentSum = field(default_factory=RecentSum)
    """Bytes moved out and in, of clients that have left too."""
    recent_waited: RecentSum = field(default_factory=RecentSum)
    """Time that grants waited for memory.  Both are changed by engine/memory/moves.py."""

    @property
    def kept_bytes(self) -> int:
        """What the host keeps available of a memory that it shares with the GPU."""
        return self.total_bytes // 10 if self.integrated else 0


@dataclass(slots=True, eq=False)
class Switch:
    """The lease is on its way to `seat`; its memory comes first.  Changed by engine/memory/residency.py."""

    seat: Seat
    started_ns: int
    deadline_ns: int
    ran_before_ns: int
    """The turn clock when the switch began."""
    out_before: int
    """Bytes that the GPU had evicted when the switch began."""
    fresh: bool
    """Nothing of the seat was ever evicted as far as is known: what comes in is new, and not copied."""
    done: bool = False
    late: bool = False
    """Ended by its deadline: its time is no measure of a switch."""
