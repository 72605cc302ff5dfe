"""The benchmark of a workstation's day: its arithmetic by hand, the broker, and the whole path on a simulated GPU.

Non-goals: figures of a card.
"""

from __future__ import annotations

import json
import time
from typing import Any

from nvshare.bench.day.figures import bars, describe
from nvshare.bench.day.ways import NAMES, Plan, Record
from tests.bench.test_benches_run import started
from tests.conftest import Built

ALONE = {"server": {"rate": 100.0}, "images": {"rate": 0.5}, "notebook": {"rate": 1.0}, "training": {"rate": 10.0}}


def plan(**changes: Any) -> Plan:
    """A short day of small programs."""
    usual: dict[str, Any] = {
        "simulate": "1x512MiB", "seconds": 3.0, "drain_s": 60.0, "capacity_mib": 64, "deadline": time.monotonic() + 300,
        "sizes_mib": {"server": 24, "images": 24, "notebook": 24, "training": 24}, "tell": lambda line: None,
    }  # fmt: skip
    return Plan(**usual | changes)


def test_figures_by_hand() -> None:
    """Broken: late work would count as done, waits of unserved requests would vanish, or the wrong death be named."""
    records = {name: Record() for name in NAMES}
    records["server"].done = [
        (0.0, {"first": 0.5, "end": 2.0, "count": 50, "digest": ""}),
        (1.0, {"first": 3.0, "end": 11.0, "count": 50, "digest": ""}),
    ]
    records["server"].missed = [30.0]
    records["images"].failed = "images: ended with exit code 1: CUDA out of memory"
    records["notebook"].failed = "notebook: silent for 3 s"
    records["training"] = Record(steps=50, stepped_s=12.5)
    told = describe(plan(seconds=10.0), records, 0.0, 3 << 30, ALONE)
    assert told["oom"] == ["images"]
    assert set(told["failed"]) == {"images", "notebook"}
    assert (told["ttft_s"], told["requests"], told["unserved"]) == ({"p50": 2.0, "p99": 30.0}, 3, 1)
    assert (told["tokens_per_s"], told["training_share"], told["left_for_training"]) == (5.0, 0.4, 0.95)
    assert (told["moved_gib"], told["makespan_s"]) == (3.0, None)


def test_bars_by_hand() -> None:
    """Broken: a bar that is missed would be said to be reached."""
    good: dict[str, Any] = {"failed": {}, "unserved": 0, "ttft_s": {"p99": 0.4}, "work": 1.3}
    good |= {"training_share": 0.4, "left_for_training": 0.45}
    reload = good | {"unserved": 9, "ttft_s": {"p99": 4.0}, "work": 1.0}
    found = bars({"reload": reload, "nvshare": good}, 10.0, 50.0)
    assert list(found) == ["nvshare"]
    assert all(one["reached"] for one in found["nvshare"].values())
    assert found["nvshare"]["ttft_p99_s"] == {"value": 0.4, "most": 0.5, "reached": True}
    bad = good | {"failed": {"images": "dead"}, "ttft_s": {"p99": 0.9}, "training_share": 0.3, "work": 1.2}
    assert not any(one["reached"] for one in bars({"reload": reload, "nvshare": bad}, 10.0, 50.0)["nvshare"].values())
    assert not bars({"nvshare": good | {"ttft_s": None}}, 10.0, 50.0)["nvshare"]["ttft_p99_s"]["reached"]


def test_the_command(built: Built) -> None:
    """Broken: without a coordinator nobody would run out of memory, or with one somebody would; work would be lost; or
    a run would end without its JSON."""
    words = ("--json", "--simulate", "--seconds=1", "--drain=60", "--ways=none,reload,nvshare")
    done = started("nvshare.bench.day", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["simulated"], told["server"]) == (True, "double")
    none, reload, ours = (told["ways"][name] for name in ("none", "reload", "nvshare"))
    assert set(none["oom"]) == set(none["failed"]) == {"notebook", "training"}
    assert reload["failed"] == ours["failed"] == {}
    assert reload["unserved"] == ours["unserved"] == 0
    assert (none["moved_gib"], reload["moved_gib"]) == (None, None)
    assert ours["moved_gib"] > 0, "160 MiB do not fit into 96"
    assert ours["training_share"] > 0
    assert {"failures", "ttft_p99_s", "training_of_left"} <= set(told["bars"]["nvshare"])
