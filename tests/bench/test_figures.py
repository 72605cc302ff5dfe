"""The benchmarks' arithmetic, on events and stamps written out by hand.

Non-goals: timings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nvshare.bench.handover import evaluate, turns
from nvshare.bench.harness.fixture import BenchError, percentile, read_events, spread

WHERE = {"uuid": "GPU-0", "waited_ns": 0}
DRAINED = {"uuid": "GPU-0", "drained": True}
EVENTS = [
    {"kind": "granted", "at_ns": 100, "client": 1, "name": "a", "lease": 1, **WHERE},
    {"kind": "revoked", "at_ns": 1_000, "client": 1, "lease": 1},
    {"kind": "released", "at_ns": 1_500, "client": 1, "lease": 1, "drain_ns": 300, "opened_at_ns": 150, **DRAINED},
    {"kind": "granted", "at_ns": 1_510, "client": 2, "name": "b", "lease": 2, **WHERE},
    {"kind": "revoked", "at_ns": 3_000, "client": 2, "lease": 2},
    {"kind": "released", "at_ns": 3_400, "client": 2, "lease": 2, "drain_ns": 250, "opened_at_ns": 1_560, **DRAINED},
    {"kind": "granted", "at_ns": 3_410, "client": 1, "name": "a", "lease": 3, **WHERE},
]


def test_hand_over_is_what_lies_beyond_the_drain() -> None:
    """From revoke to the first call, without the drain: anything else flatters or blames the wrong part."""
    samples = evaluate(EVENTS, {"b": [(500, 1_600)], "a": [(0, 160), (2_000, 3_500)]})
    assert samples.first_call_ns == [1_600 - 1_000 - 300, 3_500 - 3_000 - 250]
    assert samples.release_ns == [1_500 - 1_000 - 300, 3_400 - 3_000 - 250]
    assert samples.grant_ns == [10, 10]
    assert samples.open_ns == [1_560 - 1_510]
    assert samples.drain_ns == [300, 250]


def test_a_program_that_was_not_waiting_is_no_sample() -> None:
    """Who asks after the revoke measures its own idleness."""
    samples = evaluate(EVENTS, {"b": [(1_200, 1_600)], "a": []})
    assert samples.first_call_ns == []
    assert sum(samples.without.values()) == 2


def test_idle_and_undrained_releases_are_no_hand_over() -> None:
    """An early release was not revoked; a drain past its deadline has no length."""
    idle = [event for event in EVENTS if event["kind"] != "revoked"]
    assert turns(idle)[0] == []
    undrained = [event | {"drained": False} if event["kind"] == "released" else event for event in EVENTS]
    assert turns(undrained)[0] == []


def test_a_follower_that_failed_is_said(tmp_path: Path) -> None:
    """Its error is a line of the log: a figure from the events before it would be wrong."""
    log = tmp_path / "events.jsonl"
    log.write_text('{"kind": "granted"}\n{"kind": "revo', encoding="utf-8")
    assert read_events(log) == [{"kind": "granted"}]
    log.write_text('{"kind": "granted"}\n{"error": {"code": "no_coordinator", "text": "gone"}}\n', encoding="utf-8")
    with pytest.raises(BenchError, match="gone"):
        read_events(log)


def test_percentiles() -> None:
    """Nearest rank: an odd definition would not compare with anybody's figures."""
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.99) == 7.0
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "repetitions": 3}
