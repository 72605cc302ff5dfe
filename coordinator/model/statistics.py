"""Counters and sums for metrics and `nvshare-ctl`.  No decision reads them, except `LeaseStatistics.grants`."""

from __future__ import annotations

from dataclasses import dataclass


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
    """How long grants waited for memory.  The next two sum up orders: exposed while a grant waits, else hidden."""
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
