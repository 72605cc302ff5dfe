"""The comparison inside one process: what is found and switched, that it must be proved, and its arithmetic.

Non-goals: timings.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench.harness.fixture import fixture
from nvshare.bench.harness.in_process import Block, Plan, compare, figures, switch_environment
from nvshare.bench.harness.worker_group import Member, closing
from tests.conftest import Built

PROGRAM = """
import ctypes, json, mmap, sys
from nvshare.bench.compatibility.cases import switch

cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
cuda.cuMemAlloc_v2(ctypes.byref(memory), 4096)

names = ("cuMemsetD8_v2", "cuLaunchKernel_ptsz", "cuMemAlloc_v2", "cuMemFree_v2", "cuStreamBeginCapture_v2")
seen = [ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value for name in names]
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
table = (ctypes.c_uint64 * len(names)).from_buffer(page, 64)
table[:] = seen

def calls(which):
    before = switch.answer(which)
    for _ in range(10):
        cuda.cuMemsetD8_v2(memory, 1, 4096)
    cuda.cuCtxSynchronize()
    after = switch.answer(which)
    return {"changed": before["changed"], "calls": after["calls"] - before["calls"], "table": list(table)}

found = switch.answer("look")
if "error" not in found:
    found = {"seen": seen, "found": found, "direct": calls("direct"), "hook": calls("hook")}
print(json.dumps(found))
"""


@pytest.fixture(name="switch")
def compiled_switch(tmp_path: Path) -> dict[str, str]:
    """in_process.c, and what tells a program where it is."""
    return switch_environment(tmp_path)


def run_program(tmp_path: Path, switch: dict[str, str], *, hooked: bool) -> dict[str, Any]:
    """Output of the program above."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    with fixture(simulate="1x64MiB") as stand:
        command = [sys.executable, str(program)]
        process = stand.start(command, hooked=hooked, name="tables", extra={**switch, "PYTHONPATH": root})
        out, _ = process.communicate()
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(out)
    return told


def test_tables_are_found_and_switched(built: Built, tmp_path: Path, switch: dict[str, str]) -> None:
    """Addresses that stay the hook's, or that are not put back, would give a figure of something else."""
    told = run_program(tmp_path, switch, hooked=True)
    assert told["found"]["functions"]["cuMemsetD8_v2"] >= 2, "the table, and what ctypes keeps by itself"
    assert told["direct"]["changed"] == told["hook"]["changed"] == told["found"]["words"]
    launching, keeping = slice(0, 2), slice(2, None)
    assert all(new != old for new, old in zip(told["direct"]["table"][launching], told["seen"][launching], strict=True))
    assert told["direct"]["table"][keeping] == told["seen"][keeping], "the hook must know what is allocated"
    assert told["hook"]["table"] == told["seen"]
    assert (told["direct"]["calls"], told["hook"]["calls"]) == (0, 10)


def test_without_the_hook_there_is_nothing_to_compare(built: Built, tmp_path: Path, switch: dict[str, str]) -> None:
    """A comparison of the driver with itself would be told as a hook that costs nothing."""
    told = run_program(tmp_path, switch, hooked=False)
    assert told == {"error": "in one process: no function of the driver is wrapped: is the program under the hook?"}


class Scripted(Member):
    """A program that answers from a list of counts, without being one."""

    def __init__(self, counts: Iterator[dict[str, Any]]) -> None:
        self._counts = counts

    def ask(self, line: str, timeout_s: float) -> dict[str, Any]:
        """Every turn takes 10 ms."""
        if line.startswith("time"):
            return {"ns": 10_000_000}
        return {"words": 3} if line.startswith("by look") else next(self._counts)


WARM_UP, TURNS = "dh", "hddhdhhd"


def counts(*, changed: int, hook: int, direct: int) -> Iterator[dict[str, Any]]:
    """Answers to `by`, before and after each turn."""
    calls = 0
    for which in itertools.chain(WARM_UP, itertools.cycle(TURNS)):
        yield {"changed": changed, "calls": calls}
        calls += direct if which == "d" else hook
        yield {"changed": 0, "calls": calls}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"changed": 0, "hook": 5, "direct": 0}, "no address was switched"),
        ({"changed": 3, "hook": 0, "direct": 0}, "no call passed the gate"),
        ({"changed": 3, "hook": 5, "direct": 4}, "only 20 %"),
    ],
)
def test_what_is_not_proved_is_no_figure(script: dict[str, int], reason: str) -> None:
    """A switch that does nothing gives 0 %, which is what one would like to see."""
    told = compare([Scripted(counts(**script))], "x", Plan(0.0))
    assert set(told) == {"failed"}
    assert reason in told["failed"]


def test_what_is_proved_is_a_figure() -> None:
    """Calls that go by the hook in spite of all are told: they are not in the figure."""
    told = compare([Scripted(counts(changed=3, hook=200, direct=10))], "x", Plan(0.0))
    assert (told["bypassed"], told["switched"], told["slowdown"]) == (0.95, 3, 0.0)


def blocks(cost: float, *, seed: int, drift: float = 0.0) -> list[Block]:
    """Turns with noise of 1 %, some of them disturbed, the machine slowing down meanwhile."""
    chance = random.Random(seed)
    now = 1000.0

    def turn(factor: float) -> float:
        nonlocal now
        now *= 1 + drift
        disturbed = 1.5 if chance.random() < 0.05 else 1.0
        return now * factor * chance.gauss(1, 0.01) * disturbed

    made = []
    for number in range(100):
        taken = {}
        for place in (0, 1, 2, 3) if number % 2 == 0 else (1, 0, 3, 2):
            taken[place] = turn(1 + cost if place in (0, 3) else 1.0)
        made.append(Block((taken[0], taken[3]), (taken[1], taken[2])))
    return made


@pytest.mark.parametrize("drift", [0.0, 0.001])
@pytest.mark.parametrize("seed", range(4))
def test_one_percent_is_seen_and_nothing_is_nothing(seed: int, drift: float) -> None:
    """An interval that misses what is there, or a control that is not zero, would make every figure worthless."""
    found = figures([blocks(0.01, seed=seed, drift=drift)])
    assert 0.004 < found["slowdown_min"] < 0.01 < found["slowdown_max"] < 0.016
    same = figures([blocks(0.0, seed=seed, drift=drift)])
    assert same["slowdown_min"] <= 0.0 <= same["slowdown_max"]
    for one in (found, same):
        assert one["control_min"] <= 0.0 <= one["control_max"]


def test_the_luck_of_one_process_widens_the_interval() -> None:
    """One process in which the hook is dear would be told as all of them, or not at all."""
    runs = [blocks(cost, seed=seed) for seed, cost in enumerate((0.0, 0.0, 0.03))]
    found = figures(runs)
    assert [round(one, 2) for one in found["of_each"]] == [0.0, 0.0, 0.03]
    assert 0.005 < found["slowdown"] < 0.015
    assert found["slowdown_min"] < 0.005
    assert found["slowdown_max"] > 0.015
    assert found["blocks"] == 300


def test_one_unproved_process_is_no_figure() -> None:
    """A process whose calls cannot be led past the hook would count as one in which the hook costs nothing."""
    good, bad = counts(changed=3, hook=200, direct=0), counts(changed=0, hook=5, direct=0)
    assert "failed" in compare([Scripted(good), Scripted(bad)], "x", Plan(0.0))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed (extra cupy)")
def test_cupy(built: Built, tmp_path: Path, switch: dict[str, str]) -> None:
    """A real libcudart keeps its addresses in tables of its own, which nobody told us of."""
    command = [sys.executable, "-m", "nvshare.bench.compatibility.cases.host", "cupy"]
    with fixture(simulate="1x1GiB") as stand:
        member = Member(stand, command, hooked=True, name="cupy", extra=switch)
        with closing([member]):
            member.answer(60)
            told = compare([member], "cupy.async", Plan(0.2), pools=True)
    assert told.get("failed") is None
    assert told["bypassed"] == 1.0
    assert told["switched"] == told["words"] > 100
