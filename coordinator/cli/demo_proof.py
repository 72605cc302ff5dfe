"""Counts overlaps between the work of two processes on a real GPU.

Each kernel of the demo's program logs the GPU's clock (%globaltimer) at its start and its end.  Copies are not logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TIMER_RESOLUTION_NS = 2_000
"""%globaltimer advances in steps of 32 ns to about 1 us, so two readings can be wrong by up to two steps."""


def violations(intervals: Mapping[str, Sequence[tuple[int, int]]], tolerance_ns: int = TIMER_RESOLUTION_NS) -> int:
    """Number of (start, end) intervals that overlap an earlier one of another process by more than the tolerance."""
    ordered = sorted((start, end, process) for process, own in intervals.items() for start, end in own)
    violating = 0
    ends: dict[str, int] = {}
    for start, end, process in ordered:
        others = max((latest for other, latest in ends.items() if other != process), default=0)
        if min(end, others) - start > tolerance_ns:
            violating += 1
        ends[process] = max(ends.get(process, 0), end)
    return violating
