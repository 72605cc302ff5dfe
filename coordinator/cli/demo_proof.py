"""Did the work of two processes overlap on one GPU?

On the simulated GPU its trace says when each piece of work ran.  On a real card each kernel of the demo's program wrote
the GPU's own clock (%globaltimer) at its start and at its end; copies are not in that log.

May not go here: how the programs were run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TIMER_RESOLUTION_NS = 2_000
"""%globaltimer advances in steps of 32 ns to about 1 us, so two readings can deceive by up to two steps."""


def violations(intervals: Mapping[str, Sequence[tuple[int, int]]], tolerance_ns: int = TIMER_RESOLUTION_NS) -> int:
    """How many (start, end) intervals overlap an earlier-begun one of another process by more than the tolerance."""
    ordered = sorted((start, end, process) for process, own in intervals.items() for start, end in own)
    violating = 0
    ends: dict[str, int] = {}
    for start, end, process in ordered:
        others = max((latest for other, latest in ends.items() if other != process), default=0)
        if min(end, others) - start > tolerance_ns:
            violating += 1
        ends[process] = max(ends.get(process, 0), end)
    return violating
