"""Cost of a switch when programs together exceed the card: `python -m nvshare.bench.memory.oversubscribe`.

Method: the real coordinator, with a capacity of a few GiB, and jobs (`workloads/resident.py`) under the hook in mode
`swap`, which start together once all are ready.  A job alone is the same program without the hook on the whole card.

- two_of_60: two jobs of 60 % of the capacity, a fixed quantum: bytes moved out at a hand-over, over the overflow.
- three_of_45: three jobs of 45 %, 1 s quantum: the share of the time of memory orders in which a grant waited for them.
- training: two jobs of 90 %, automatic quantum at a share of 5 % and of 2 %: time until both have ended, over the sum
  of their times alone; the quanta and the waits for memory in between; one job alone under the hook over the same
  without it, which is what the hook itself adds to each of these figures.
- notebooks: two jobs of 60 % that think between bursts; the same figure.

Every job compares its memory; a difference fails the run.

Non-goals: how fast memory moves (nvshare.bench.memory.swap).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from nvshare.bench.harness.command import parser_for, run_benchmark, show_each
from nvshare.bench.harness.fixture import BenchError, Fixture, fixture
from nvshare.coordinator.system.devices import real_card

MIB = 1 << 20
CASES = ("two_of_60", "three_of_45", "training", "notebooks")
SHARES = (5, 2)
"""Per cent that switching may cost, for `training`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A job.  `percent` of the capacity; `steps` of `step_ms`; `burst` steps between pauses of `think_ms`."""

    percent: int
    steps: int
    step_ms: float
    burst: int = 0
    think_ms: float = 0.0

    def command(self, capacity_bytes: int, seed: int) -> list[str]:
        """Command of the job."""
        words = {
            "mib": capacity_bytes * self.percent // 100 // MIB, "steps": self.steps, "step-ms": self.step_ms,
            "burst": self.burst, "think-ms": self.think_ms, "seed": seed,
        }  # fmt: skip
        return [
            sys.executable,
            "-m",
            "nvshare.bench.workloads.resident",
            *(f"--{name}={value}" for name, value in words.items()),
        ]


@dataclass(frozen=True, slots=True)
class Scene:
    """The GPU and the length of the jobs.  `scale` shortens them all."""

    simulate: str | None
    capacity_bytes: int
    scale: float

    def shape(self, percent: int, seconds: float, step_ms: float, **more: Any) -> Shape:
        """A job of so many seconds of GPU time."""
        return Shape(percent, max(2, round(seconds * self.scale * 1000 / step_ms)), step_ms, **more)

    def coordinator(self, quantum: str, *more: str) -> Any:
        """The real one."""
        return fixture(simulate=self.simulate, quantum=quantum, more=(f"--capacity={self.capacity_bytes}", *more))


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError(f"a job ended with exit code {process.wait()}")
    return json.loads(line)


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def together(
    here: Fixture, scene: Scene, shapes: Sequence[Shape], *, hooked: bool = True
) -> tuple[float, dict[str, int]]:
    """Seconds until all have ended, and what the coordinator counted meanwhile."""
    with ExitStack() as stack:
        jobs = []
        for seed, shape in enumerate(shapes):
            job = here.start(
                shape.command(scene.capacity_bytes, seed), hooked=hooked, name=f"job{seed}",
                options=["--memory=swap"], stdin=subprocess.PIPE,
            )  # fmt: skip
            stack.callback(_end, job)
            jobs.append(job)
            _line(job)
        before = _counters(here)
        for job in jobs:
            _go(job)
        ends = [_line(job) for job in jobs]
        after = _counters(here)
    if any(end["mismatches"] for end in ends):
        raise BenchError("a job found memory that is not what it wrote")
    seconds = (max(end["ended_ns"] for end in ends) - min(end["began_ns"] for end in ends)) / 1e9
    return seconds, {name: after[name] - before[name] for name in before}


def with_turns(
    here: Fixture, scene: Scene, shapes: Sequence[Shape]
) -> tuple[float, dict[str, int], dict[str, list[float]]]:
    """As `together` with an automatic quantum; and what each turn was given and each order was waited for."""
    with here.events(nudge=("set", "quantum", "auto")) as events:
        seconds, counted = together(here, scene, shapes)
    turns = [event["quantum_ns"] for event in events if event["kind"] == "granted"]
    waits = [event["exposed_ns"] for event in events if event["kind"] == "moved" and event["exposed_ns"]]
    return seconds, counted, {"quanta_ms": _ms(turns), "waited_orders_ms": _ms(waits)}


def _ms(times_ns: Sequence[int]) -> list[float]:
    return [round(time_ns / 1e6, 1) for time_ns in times_ns]


def _counters(here: Fixture) -> dict[str, int]:
    gpu = here.control("status")["gpus"][0]
    names = ("handovers", "evicted_bytes", "restored_bytes", "evict_orders", "failed_orders", "late_switches")
    return {name: gpu[name] for name in (*names, "moved_ns", "exposed_move_ns", "hidden_move_ns")}


def alone(scene: Scene, shape: Shape) -> float:
    """Seconds of one job without the hook."""
    with scene.coordinator("100ms") as here:
        return together(here, scene, [shape], hooked=False)[0]


def _mib(size: float) -> float:
    return round(size / MIB, 1)


def two_of_60(scene: Scene) -> dict[str, Any]:
    """Bytes moved against what must move."""
    shape = scene.shape(60, 3.0, 10.0)
    with scene.coordinator("250ms") as here:
        seconds, counted = together(here, scene, [shape, shape])
    switches = max(1, counted["evict_orders"])
    overflow = scene.capacity_bytes // 5
    return {
        "seconds": round(seconds, 2), "switches": switches, "overflow_mib": _mib(overflow),
        "out_per_switch_mib": _mib(counted["evicted_bytes"] / switches),
        "out_over_necessary": round(counted["evicted_bytes"] / switches / overflow, 4), **_health(counted),
    }  # fmt: skip


def three_of_45(scene: Scene) -> dict[str, Any]:
    """Share of memory moves that is hidden behind computing."""
    shape = scene.shape(45, 5.0, 10.0)
    with scene.coordinator("1s" if scene.scale == 1 else "100ms") as here:
        seconds, counted = together(here, scene, [shape] * 3)
    moving = counted["exposed_move_ns"] + counted["hidden_move_ns"]
    return {
        "seconds": round(seconds, 2), "handovers": counted["handovers"], "move_s": round(moving / 1e9, 3),
        "exposed_share": round(counted["exposed_move_ns"] / moving, 4) if moving else 0.0, **_health(counted),
    }  # fmt: skip


def training(scene: Scene) -> dict[str, Any]:
    """Cost of sharing at all."""
    shape = scene.shape(90, 12.0, 20.0)
    both_alone = 2 * alone(scene, shape)
    with scene.coordinator("auto") as here:
        hooked = together(here, scene, [shape])[0]
    found: dict[str, Any] = {
        "sum_alone_s": round(both_alone, 2), "one_hooked_over_alone": round(2 * hooked / both_alone, 4)
    }  # fmt: skip
    for share in SHARES:
        with scene.coordinator("auto", f"--switch-share={share}%") as here:
            seconds, counted, turns = with_turns(here, scene, [shape, shape])
        found[f"at_{share}_percent"] = {
            "seconds": round(seconds, 2), "over_sum": round(seconds / both_alone, 4),
            "handovers": counted["handovers"], "waited_for_memory_s": round(counted["moved_ns"] / 1e9, 3),
            **turns, **_health(counted),
        }  # fmt: skip
    return found


def notebooks(scene: Scene) -> dict[str, Any]:
    """Jobs that leave the card alone half of the time."""
    shape = scene.shape(60, 4.0, 10.0, burst=30, think_ms=500.0 * min(1.0, 4 * scene.scale))
    both_alone = 2 * alone(scene, shape)
    with scene.coordinator("auto") as here:
        seconds, counted = together(here, scene, [shape, shape])
    return {
        "sum_alone_s": round(both_alone, 2), "seconds": round(seconds, 2),
        "over_sum": round(seconds / both_alone, 4), "handovers": counted["handovers"], **_health(counted),
    }  # fmt: skip


def _health(counted: Mapping[str, int]) -> dict[str, int]:
    return {name: counted[name] for name in ("failed_orders", "late_switches")}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = options.simulate or not real_card()
    capacity = int((options.capacity_gib or (0.25 if simulate else 4.0)) * (1 << 30)) // MIB * MIB
    card = f"1x{4 * capacity}" if simulate else None
    scene = Scene(card, capacity, options.scale or (0.1 if simulate else 1.0))
    cases = {"two_of_60": two_of_60, "three_of_45": three_of_45, "training": training, "notebooks": notebooks}
    found = {name: cases[name](scene) for name in options.case or CASES}
    return {**found, "capacity_gib": capacity / (1 << 30), "simulated": simulate}


def main() -> int:
    """Command line."""
    parser = parser_for("memory.oversubscribe", "More memory than the card has")
    parser.add_argument("--capacity-gib", type=float, help="what clients may have resident (default 4, simulated 0.25)")
    parser.add_argument("--scale", type=float, help="length of the jobs (default 1, simulated 0.1)")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    return run_benchmark(parser, _measure, show_each)


if __name__ == "__main__":
    sys.exit(main())
