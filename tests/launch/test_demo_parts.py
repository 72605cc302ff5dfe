"""The demo's pure parts: what it reads out of events, how it judges overlap."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.cli.demo import PROGRAMS, result_of
from nvshare.coordinator.cli.demo_proof import TIMER_RESOLUTION_NS, violations
from nvshare.coordinator.cli.trace.recording import record

GPU = "GPU-1"


def granted(at_ns: int, client: int, lease: int, waited_ns: int = 0) -> dict[str, Any]:
    name = list(PROGRAMS)[client]
    return {"kind": "granted", "at_ns": at_ns, "uuid": GPU, "client": client, "name": name, "lease": lease} | {
        "waited_ns": waited_ns
    }


def released(
    at_ns: int, client: int, lease: int, *, opened_at_ns: int, drain_ns: int = 0, drained: bool = True
) -> dict[str, Any]:
    return {
        "kind": "released",
        "at_ns": at_ns,
        "uuid": GPU,
        "client": client,
        "lease": lease,
        "opened_at_ns": opened_at_ns,
        "drain_ns": drain_ns,
        "drained": drained,
    }


def test_figures_come_from_the_opened_gate_to_the_release() -> None:
    """Else a program's table line would count the time before its gate opened, or that of another program."""
    events = [
        granted(1_000, 0, 1),
        released(58_000, 0, 1, opened_at_ns=1_100),
        granted(58_100, 1, 2, waited_ns=57_000),
        released(91_000, 1, 2, opened_at_ns=58_200),
    ]
    found = record(event | {"seq": sequence} for sequence, event in enumerate(events))
    result = result_of(True, found, 0)
    assert (result["gpus"], result["handovers"], result["violations"]) == (1, 1, 0)
    steady, copies, bursty = result["clients"]
    assert (steady["leases"], steady["gpu_seconds"], steady["max_wait_ms"]) == (1, 0.0001, 0)
    assert (copies["leases"], copies["gpu_seconds"], copies["max_wait_ms"]) == (1, 0.0, 0.057)
    assert bursty["leases"] == 0


_INTERVALS = st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 9_000)), max_size=12).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


@given(st.dictionaries(st.sampled_from("abc"), _INTERVALS), st.integers(0, 3_000))
def test_violations_are_found_exactly_where_intervals_overlap(
    intervals: dict[str, list[tuple[int, int]]], tolerance_ns: int
) -> None:
    """Else the demo would call overlapping work exclusive, or the other way round."""
    flat = sorted((start, end, name) for name, own in intervals.items() for start, end in own)
    expected = sum(
        any(other != name and min(end, other_end) - start > tolerance_ns for _, other_end, other in flat[:index])
        for index, (start, end, name) in enumerate(flat)
    )
    assert violations(intervals, tolerance_ns) == expected


def test_the_timers_steps_are_no_violation() -> None:
    """Else a card whose timer advances in steps of 1 us would fail without cause."""
    touching = {"a": [(10_000, 20_000)], "b": [(20_000 - TIMER_RESOLUTION_NS, 30_000)]}
    assert violations(touching) == 0
    assert violations({"a": [(10_000, 20_000)], "b": [(19_999 - TIMER_RESOLUTION_NS, 30_000)]}) == 1
