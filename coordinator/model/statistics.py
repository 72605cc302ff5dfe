"""Counters and sums for metrics and `nvshare-ctl`.  No decision reads them, except `LeaseStatistics.grants`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

RECENT_NS: Final = 60_000_000_000
MARK_NS: Final = 5_000_000_000
"""Marks are so far apart, or as far as two leases' ends."""


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
    """Memory orders of one GPU.  Changed by memory/orders.py, memory/switching.py and memory/admission.py."""

    moved_ns: int = 0
    """Time that grants waited for memory.  The next two sum up orders: exposed while a grant waits, else hidden."""
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
    """Memory orders of one client on one GPU.  Changed by memory/orders.py."""

    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    hidden_move_ns: int = 0
    exposed_move_ns: int = 0
    failed_orders: int = 0


@dataclass(slots=True)
class RecentUse:
    """Sums of one client's lease time on one GPU during the last minute.  Changed by engine/leases.py."""

    marks: deque[tuple[int, int]] = field(default_factory=deque)
    """(time, lease time until then), oldest first.  The first one is at least a minute old, or from the first grant."""

    def mark(self, now_ns: int, used_ns: int) -> None:
        """A lease begins or ends."""
        marks = self.marks
        if marks and now_ns - marks[-1][0] < MARK_NS:
            return
        while len(marks) > 1 and marks[1][0] <= now_ns - RECENT_NS:
            marks.popleft()
        marks.append((now_ns, used_ns))

    def share(self, now_ns: int, used_ns: int, attached_at_ns: int) -> float:
        """The part of the last minute, or since it attached, in which it had a lease.  An estimate."""
        from_ns = max(now_ns - RECENT_NS, attached_at_ns)
        before = (attached_at_ns, 0)
        for at_ns, then_ns in (*self.marks, (now_ns, used_ns)):
            if at_ns > from_ns:
                part = (from_ns - before[0]) / (at_ns - before[0])
                used_before_ns = before[1] + part * (then_ns - before[1])
                return min(1.0, max(0.0, (used_ns - used_before_ns) / (now_ns - from_ns)))
            before = (at_ns, then_ns)
        return 0.0
