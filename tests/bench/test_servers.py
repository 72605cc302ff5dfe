"""The benchmark of two model servers: its loop and its arithmetic by hand, and its whole path.

Non-goals: figures of a card.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvshare.bench.pairs.programs import Plan
from nvshare.bench.servers import bars, cases, describe, measure_all
from nvshare.bench.workloads.serving import TOKENS, Record, serve
from tests.bench.test_benches_run import started
from tests.conftest import Built

DYING = """
import json, os, sys
print(json.dumps({"ready": True, "versions": {"fake": "1"}}), flush=True)
for line in sys.stdin:
    if "LD_PRELOAD" in os.environ:
        sys.exit("the card is on fire")
    print(json.dumps({"rate": 10.0, "first_ms": [1.0, 3.0], "answers": [[0, "ab", 1]]}), flush=True)
"""
"""A server that fails under the hook."""


class Slots:
    """Tokens that depend on the prompt alone; each piece of work takes a moment of the clock."""

    def __init__(self, count: int) -> None:
        self.last = [0] * count
        self.steps = 0

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        self.last[slot] = sum(prompt) % 1000
        return self.last[slot]

    def step(self) -> list[int]:
        self.steps += 1
        self.last = [token * 7 % 1000 for token in self.last]
        return self.last


class Requests(Record):
    """A window that ends with a number of requests instead of a time."""

    left = 20

    def open(self) -> bool:
        return self.left > 0

    def next(self) -> tuple[int, list[int]]:
        self.left -= 1
        return super().next()


def answered(in_flight: int) -> dict[int, str]:
    """The digests by prompt of a window."""
    record, slots = Requests(0.0, time.monotonic() + 600, 512), Slots(in_flight)
    serve(slots, in_flight, record)
    told = record.told()
    found = {prompt: digest for prompt, digest, _ in told["answers"]}
    assert len(found) == len(told["answers"]), "a prompt has two answers"
    assert (len(told["first_ms"]), slots.steps >= TOKENS) == (Requests.left, True)
    return found


def test_answers_do_not_depend_on_the_neighbours_in_the_batch() -> None:
    """Broken: tokens would be counted to another slot's request, so that no mismatch would mean anything."""
    few, many = answered(2), answered(8)
    both = few.keys() & many.keys()
    assert len(both) > 10
    assert all(few[prompt] == many[prompt] for prompt in both)


def test_figures_by_hand() -> None:
    """Broken: a server would be compared with another's rate or tokens, or a wrong token be overlooked."""
    answers = {("first", 2, 0): "ab", ("second", 2, 0): "cd"}
    told: list[dict[str, Any]] = [
        {"rate": 50.0, "first_ms": [1.0, 2.0], "answers": [[0, "ab", 3], [1, "new", 1]]},
        {"rate": 30.0, "first_ms": [9.0], "answers": [[0, "ab", 2], [0, "cd", 1]]},
    ]
    found = describe(answers, 2, told, [{"tokens_per_s": 100.0}, {"tokens_per_s": 40.0}])
    assert (found["part"], found["parts"]) == (0.625, [0.5, 0.75])
    assert (found["first_ms"], found["requests"], found["other_tokens"]) == ({"p50": 2.0, "p99": 9.0}, 3, 2)


def test_bars_by_hand() -> None:
    """Broken: a bar that is missed would be said to be reached, or one without a figure be judged."""
    ways: dict[str, Any] = {
        "native": {"2": {"part": 0.5}, "8": {"part": 0.6}}, "default": {"2": {"part": 0.49}, "8": {"failed": "dead"}},
        "default_mps": {"2": {"part": 0.6}}, "mps_halves": {"2": {"part": 0.61}}, "mps": {"skipped": "no daemon"},
    }  # fmt: skip
    assert bars(ways) == {
        "default": {"2": {"value": 0.49, "least": 0.5, "reached": False}},
        "default_mps": {"2": {"value": 0.6, "least": 0.5917, "reached": True}},
    }


def test_a_server_that_fails_says_why(built: Built, tmp_path: Path) -> None:
    """Broken: a failure under one way would take the figures of the others along, or its cause would be lost."""
    program = tmp_path / "dying.py"
    program.write_text(DYING, encoding="utf-8")
    plan = Plan(lambda name: [sys.executable, str(program)], "1x1GiB", 0.05, 0.01, time.monotonic() + 600)
    told = measure_all(plan, [2], cases(64), ["native", "default"])
    assert told["ways"]["native"]["2"]["part"] == 1.0
    assert "the card is on fire" in told["ways"]["default"]["2"]["failed"]
    late = Plan(plan.command, plan.simulate, 0.05, 0.01, time.monotonic())
    assert measure_all(late, [2], cases(64), ["default"])["ways"] == {"default": {"skipped": "no time left"}}


def test_the_command(built: Built) -> None:
    """Broken: two servers that do not fit together would lose memory or tokens, or never move."""
    words = ("--json", "--simulate", "--in-flight=2", "--seconds=0.5", "--settle=0.1", "--ways=native,mps,beyond")
    done = started("nvshare.bench.servers", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["simulated"], told["server"]) == (True, "double")
    assert min(one["tokens_per_s"] for one in told["alone"]["2"]) > 0
    assert "nvidia-cuda-mps-control" in told["ways"]["mps"]["skipped"]
    both = [told["ways"][name]["2"] for name in ("native", "beyond")]
    assert [each["other_tokens"] for each in both] == [0, 0]
    assert both[1]["moved_gib"] > 0, "24 MiB do not fit into 16"
