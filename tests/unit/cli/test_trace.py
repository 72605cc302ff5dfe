"""`nvshare-ctl trace`: events become spans, and spans a file that Perfetto opens."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

from nvshare.coordinator.cli.trace.perfetto import LANES, trace
from nvshare.coordinator.cli.trace.recording import Recording, record
from tests.docs import timeline
from tests.unit.cli import replies

MS = 1_000_000


def a_recording() -> Recording:
    """train.py holds the GPU from before, study.ipynb follows, the third one waits on."""
    harness = replies.three_programs()
    harness.milliseconds(10)
    before = replies.status(harness)
    zero = before["now_ns"]
    seen: list[dict[str, Any]] = [
        {"ms": 5, "kind": "plan", "running": "2", "why": "turns"},
        {"ms": 5, "kind": "revoked", "client": 1, "lease": 1, "why": "plan"},
        {"ms": 5, "kind": "evicting", "client": 1, "order": 4, "bytes": 50},
        {"ms": 8, "kind": "released", "client": 1, "lease": 1, "drained": True, "drain_ns": 3 * MS, "opened_at_ns": 0},
        {"ms": 9, "kind": "moved", "client": 1, "order": 4, "evict": True, "moved_bytes": 40},
        {"ms": 9, "kind": "granted", "client": 2, "name": "study.ipynb", "lease": 2, "waited_ns": 19 * MS},
        {"ms": 12, "kind": "released", "client": 2, "lease": 2, "idle": True, "opened_at_ns": zero + 10 * MS},
        {"ms": 20, "kind": "plan", "running": "1", "why": "the next turn"},
    ]
    events = [
        {"seq": 5 + index, "at_ns": zero + each.pop("ms") * MS, "uuid": "GPU-0", **each}
        for index, each in enumerate(seen)
    ]
    events[-1]["seq"] += 3
    harness.milliseconds(30)
    return record(events, before, replies.status(harness))


def spans(recording: Recording, kind: str) -> list[tuple[int, float, float]]:
    found = getattr(recording, kind)
    zero = recording.start_ns
    return [(each.client, (each.start_ns - zero) / MS, (each.end_ns - zero) / MS) for each in found]


def test_events_become_spans_within_the_recording() -> None:
    """Broken if a bar began with the request instead of the opened gate, or an open lease or wait were missing."""
    recording = a_recording()
    assert spans(recording, "leases") == [(1, 0.0, 8.0), (2, 10.0, 12.0)]
    assert spans(recording, "waits") == [(2, 0.0, 9.0), (2, 0.0, 30.0), (3, 0.0, 30.0)]
    assert spans(recording, "moves") == [(1, 5.0, 9.0)]
    assert recording.names[2] == "study.ipynb (root)"
    assert recording.lost == 3


def test_parking_and_migration_are_marked_in_the_programs_lanes() -> None:
    """Broken: a program disappears from its GPU without a word, or the mark is missing where it came from."""
    home, target = "GPU-0", "GPU-1"
    seen: list[dict[str, Any]] = [
        {"kind": "granted", "uuid": home, "client": 1, "name": "train.py", "lease": 1, "waited_ns": 0},
        {"kind": "parking", "uuid": target, "client": 1, "state": "leaving", "why": ""},
        {"kind": "released", "uuid": home, "client": 1, "lease": 1, "idle": False, "opened_at_ns": 0},
        {"kind": "migrated", "uuid": target, "client": 1, "name": "train.py", "from": home, "why": "by the operator"},
        {"kind": "granted", "uuid": target, "client": 1, "name": "train.py", "lease": 2, "waited_ns": 0},
        {"kind": "released", "uuid": target, "client": 1, "lease": 2, "idle": False, "opened_at_ns": 0},
    ]
    events = trace(record({"at_ns": MS + number * MS, **each} for number, each in enumerate(seen)))["traceEvents"]
    marks = [(each["pid"], each["name"], each["args"].get("state")) for each in events if each["ph"] == "i"]
    assert marks == [(gpu, *mark) for gpu in (1, 2) for mark in (("parking", "leaving"), ("migrated", None))]


def test_perfetto_gets_named_lanes_and_microseconds() -> None:
    """Broken if Perfetto showed numbers for programs, or spans of one lane across each other."""
    file = json.loads(json.dumps(trace(a_recording())))
    events = file["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values())[:3] == ["plan", "train.py (root)", "train.py (root), memory"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["GPU 0 (Simulated)"]
    assert all((e["pid"], e["tid"]) in lanes for e in events if e["ph"] != "M")
    plans = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "plan"]
    assert plans == [
        ("train.py (root)", 0, 5_000),
        ("study.ipynb (root)", 5_000, 15_000),
        ("train.py (root)", 20_000, 10_000),
    ]
    assert all(lanes[e["pid"], e["tid"]] == "plan" for e in events if e.get("cat") == "plan")
    assert min(e["tid"] for e in events if e["ph"] != "M") >= LANES, "a lane is no process's main thread"
    (lease,) = (e for e in events if e.get("cat") == "lease" and lanes[e["pid"], e["tid"]] == "study.ipynb (root)")
    assert (lease["ts"], lease["dur"], lease["args"]["idle"]) == (10_000, 2_000, True)
    (move,) = (e for e in events if e["name"] == "evicting")
    assert lanes[move["pid"], move["tid"]] == "train.py (root), memory"
    assert [e["name"] for e in events if e["ph"] == "i"] == ["revoked"]
    assert file["otherData"] == {"lost_events": 3}


def test_a_picture_has_a_row_for_each_program() -> None:
    """Broken if the picture failed, or lost a program."""
    drawn = ElementTree.fromstring(timeline.draw(trace(a_recording())))
    names = [text for each in drawn if each.tag.endswith("text") and (text := each.text) and not text[0].isdigit()]
    assert names == ["train.py (root)", "study.ipynb (root)", f"{replies.LONG} (4123456789)"]
    heights = [each.get("height") for each in drawn if each.tag.endswith("rect")]
    assert (heights.count("28"), heights.count("15"), heights.count("5")) == (2, 3, 1)
