"""Events as people read them."""

from __future__ import annotations

import re
import time
from typing import Any

from nvshare.coordinator.cli.views.events import Narrator
from tests.unit.cli import replies

MS = 1_000_000
NOON_NS = int(time.mktime((2026, 7, 1, 12, 0, 0, 0, 0, -1))) * 10**9


def test_events_name_clock_gpu_and_program() -> None:
    """Broken if a reader had to look up numbers, or units were wrong."""
    narrator = Narrator(replies.status(replies.three_programs()), NOON_NS)
    seen: list[dict[str, Any]] = [
        {"kind": "granted", "uuid": "GPU-0", "client": 1, "name": "x", "waited_ns": 12_340_000, "waiters": 2},
        {"kind": "released", "uuid": "GPU-0", "client": 1, "drained": True, "held_ns": 1_234 * MS, "drain_ns": 0},
        {"kind": "registered", "client": 9, "name": "new.py", "program": "python", "process": 1, "user": 0},
        {"kind": "plan", "uuid": "GPU-0", "running": "9,2", "why": "side by side"},
        {"kind": "refused", "uuid": None, "client": 9, "bytes": 1 << 30, "why": "host"},
        {"kind": "gone", "client": 9, "name": "new.py"},
        {"kind": "quantum", "uuid": "GPU-0", "quantum_ns": 5 * MS, "automatic": False},
        {"kind": "gang_gathered", "gang": "g", "gpus": 2},
        {"kind": "granted", "uuid": "GPU-unknown", "client": 77, "name": "late.py", "waited_ns": 0},
        {"kind": "registered", "client": 78, "user": 5},
    ]  # fmt: skip
    lines = [narrator.line({"seq": index, "at_ns": index * MS, **event}) for index, event in enumerate(seen)]
    assert [re.sub(r"\s{2,}", "|", line) for line in lines] == [
        "12:00:00.000|GPU 0|granted|train.py (root): waited 12.3ms, waiters 2",
        "12:00:00.001|GPU 0|released|train.py (root): held 1234ms",
        "12:00:00.002|registered|new.py (root)",
        "12:00:00.003|GPU 0|plan|new.py (root), study.ipynb (root): side by side",
        "12:00:00.004|refused|new.py (root): 1GiB, host",
        "12:00:00.005|gone|new.py (root)",
        "12:00:00.006|GPU 0|quantum|quantum 5.00ms",
        "12:00:00.007|gang gathered|gang g, gpus 2",
        "12:00:00.008|granted|late.py",
        "12:00:00.009|registered|client c78",
    ]
