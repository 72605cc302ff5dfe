"""The demo's pure parts: what it reads out of events, how it judges overlap, the strip of time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.cli.demo_ledger import Ledger
from nvshare.coordinator.cli.demo_proof import TIMER_RESOLUTION_NS, violations

GPU = "GPU-1"


def granted(at_ns: int, client: int, lease: int, waited_ns: int = 0) -> dict[str, Any]:
    name = "abc"[client]
    return {"kind": "granted", "at_ns": at_ns, "uuid": GPU, "client": client, "name": name, "lease": lease} | {
        "waited_ns": waited_ns
    }


def revoked(at_ns: int, client: int, lease: int) -> dict[str, Any]:
    return {"kind": "revoked", "at_ns": at_ns, "uuid": GPU, "client": client, "lease": lease}


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


def ledger_of(*events: dict[str, Any]) -> Ledger:
    ledger = Ledger(["a", "b"])
    for sequence, event in enumerate(events):
        ledger.take(event | {"seq": sequence})
    return ledger


def test_a_handover_costs_from_the_revocation_to_the_next_opening_less_the_drain() -> None:
    """Else the demo would show the drain, which is the programs' own work, as the coordinator's cost."""
    ledger = ledger_of(
        granted(1_000, 0, 1),
        revoked(50_000, 0, 1),
        released(58_000, 0, 1, opened_at_ns=1_100, drain_ns=7_000),
        granted(58_100, 1, 2, waited_ns=57_000),
        revoked(90_000, 1, 2),
        released(91_000, 1, 2, opened_at_ns=58_200, drain_ns=500),
    )
    assert ledger.handover_ns == [58_200 - 50_000 - 7_000]
    assert ledger.handovers == 1
    first, second = ledger.clients["a"], ledger.clients["b"]
    assert (first.holds, first.max_wait_ns) == ([(1_100, 58_000)], 0)
    assert (second.holds, second.held_ns, second.max_wait_ns) == ([(58_200, 91_000)], 32_800, 57_000)


def test_a_client_that_dies_with_its_lease_holds_it_no_longer() -> None:
    """Else its time would go on counting."""
    ledger = ledger_of(granted(1_000, 0, 1), {"kind": "gone", "at_ns": 4_000, "client": 0, "name": "a"})
    ledger.take({"kind": "other", "at_ns": 9_000, "seq": 2})
    assert ledger.clients["a"].held_ns == 3_000


def test_lost_events_are_counted() -> None:
    """Else figures from half of the events would be shown as if they were whole."""
    ledger = Ledger([])
    for sequence in (7, 8, 12):
        ledger.take({"kind": "other", "at_ns": 1, "seq": sequence})
    assert ledger.lost == 3


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
