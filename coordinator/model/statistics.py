"""Counters and sums for metrics and `nvshare-ctl`.  No decision reads them, except `LeaseStatistics.grants`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

RECENT_NS: Final = 60_000_000_000
MARKS: Final = 12
"""A mark replaces the last one if the one before that is younger than this part of the span."""


@dataclass(slots=True)
class LeaseStatistics:
    """Leases of one GPU.  Changed by engine/leases.py."""

    grants: int = 0
    handovers: int = 0
    revokes: int = 0
    idle_releases: int = 0
    overdue: int = 0
    held_ns: int = 0
    waited_ns: int = 0
    max_wait_ns: int = 0


@dataclass(slots=True)
class MoveStatistics:
    """Moves of memory of one GPU.  Changed by engine/memory: moves.py, residency.py and admission.py."""

    moved_ns: int = 0
    """Time that grants waited for memory.  The next two sum up moves: exposed while a grant waits, else hidden."""
    exposed_move_ns: int = 0
    hidden_move_ns: int = 0
    evict_orders: int = 0
    restore_orders: int = 0
    evicted_bytes: int = 0
    """Moved out since the start, not what is out now."""
    restored_bytes: int = 0
    failed_orders: int = 0
    late_switches: int = 0
    refused_reservations: int = 0

    @property
    def moved_bytes(self) -> int:
        """Out and in."""
        return self.evicted_bytes + self.restored_bytes


@dataclass(slots=True)
class SeatStatistics:
    """Leases of one client on one GPU.  Changed by engine/leases.py."""

    used_ns: int = 0
    """Time in finished leases."""
    leases: int = 0
    submissions: int = 0
    revokes: int = 0
    idle_releases: int = 0
    overdue: int = 0
    waited_ns: int = 0
    max_wait_ns: int = 0


@dataclass(slots=True)
class SeatMoveStatistics:
    """Moves of memory of one client on one GPU.  Changed by engine/memory/moves.py."""

    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    hidden_move_ns: int = 0
    exposed_move_ns: int = 0
    failed_orders: int = 0

    @property
    def moved_bytes(self) -> int:
        """Out and in."""
        return self.moved_out_bytes + self.moved_in_bytes


@dataclass(slots=True)
class RecentSum:
    """The growth of a sum during the last minute.  Changed by engine/leases.py, engine/progress.py and
    engine/memory/moves.py."""

    marks: deque[tuple[int, int]] = field(default_factory=deque)
    """(time, sum until then), oldest first.  The first one is at least a span old, or the first of all."""
    span_ns: int = RECENT_NS

    def mark(self, now_ns: int, total: int) -> None:
        """The sum begins or ends to grow, or has grown."""
        marks = self.marks
        while len(marks) > 1 and marks[1][0] <= now_ns - self.span_ns:
            marks.popleft()
        if len(marks) > 1 and now_ns - marks[-2][0] < self.span_ns // MARKS:
            marks.pop()
        marks.append((now_ns, total))

    def growth(self, now_ns: int, total: int, start: tuple[int, int] | None = None, span_ns: int = RECENT_NS) -> float:
        """The growth during the last minute or less, or since a later `start`: (time, sum then); None: the first mark.

        An estimate: even growth between two marks.
        """
        before = start or next(iter(self.marks), (now_ns, total))
        from_ns = max(now_ns - span_ns, before[0])
        for at_ns, sum_then in (*self.marks, (now_ns, total)):
            if at_ns > from_ns:
                part = (from_ns - before[0]) / (at_ns - before[0])
                return max(0.0, total - before[1] - part * (sum_then - before[1]))
            before = (at_ns, sum_then)
        return 0.0

    def share(self, now_ns: int, used_ns: int, attached_at_ns: int) -> float:
        """The part of the last minute, or since it attached, in which a client had a lease.  An estimate."""
        span_ns = min(RECENT_NS, now_ns - attached_at_ns)
        return min(1.0, self.growth(now_ns, used_ns, (attached_at_ns, 0)) / span_ns) if span_ns > 0 else 0.0
