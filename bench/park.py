"""Parking of idle programs: `python -m nvshare.bench.park --json`.

Method: one PyTorch program with `--gib` of memory and a captured graph, in mode `swap`.  `cycles` times it is parked by
`nvshare-ctl park` and makes a step, which wakes it; it checks all its memory and the graph at each step.  Park is the
time from the request until the state `parked`; wake is the time of the step less that of the same step while it runs.
Then `--idle` programs with a context each are parked together.  Memory is NVML's figure of the card.  Where there are
two GPUs, a program with the last size's memory moves to the other one and back, `--moves` times in all, each followed
by a step; it stands still from the request until that step ends, less the time of the step.

Bars: parked in 1 s and awake in 0.6 s, each plus the bytes at 45 GiB/s; less than 16 MiB left on the card; no mismatch;
moved in 2 s plus twice the bytes at 45 GiB/s.
Non-goals: the time of eviction alone (bench.memory.swap).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import time
from typing import Any, Final

from nvshare.bench.harness.command import add_figures, parser_for, run_benchmark, simulated
from nvshare.bench.harness.fixture import BenchError, Fixture, coordinator, percentile, uncoordinated
from nvshare.bench.harness.worker_group import Member, closing
from nvshare.coordinator.cli.ctl_call import call, call_and_wait
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system.runtime_dir import RuntimeDir

GIB: Final = 1 << 30
LINK: Final = 45 * GIB
WAIT_S: Final = 180.0


def park(stand: Fixture, name: str) -> float:
    """Seconds until the program is parked.  Raises BenchError with the reason if it is not."""
    began = time.monotonic()
    told = call_and_wait(RuntimeDir(stand.directory), api.ParkClient(client=name))
    if told["parking"] != "parked":
        raise BenchError(f"{name} is not parked: {told['why']}")
    return time.monotonic() - began


def used_bytes(stand: Fixture) -> int:
    """Used memory of the first card."""
    look = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).used)"
    with stand.start([sys.executable, "-c", look], hooked=False) as asked:
        assert asked.stdout is not None
        return int(asked.stdout.read())


def program(stand: Fixture, name: str, mib: int, library: str) -> Member:
    command = [sys.executable, "-m", "nvshare.bench.workloads.parked", "--mib", str(mib), "--with", library]
    return Member(stand, command, hooked=True, name=name, options=("--memory=swap",))


def one(stand: Fixture, mib: int, cycles: int, library: str) -> dict[str, Any]:
    """One program, parked and woken `cycles` times."""
    before = used_bytes(stand)
    member = program(stand, "one", mib, library)
    with closing([member]):
        member.answer(WAIT_S)
        with_it = used_bytes(stand)
        steps = [member.ask("step", WAIT_S) for _ in range(3)]
        plain_s = statistics.median(each["seconds"] for each in steps)
        parks, wakes, wrong, left = [], [], 0, 0
        for cycle in range(cycles):
            parks.append(park(stand, "one"))
            left = max(left, used_bytes(stand) - before) if cycle < 3 else left
            told = member.ask("step", WAIT_S)
            wakes.append(max(0.0, told["seconds"] - plain_s))
            wrong += not told["right"]
        size = mib << 20
        return {
            "gib": size / GIB,
            "cycles": cycles,
            "mismatches": wrong,
            "park_s": {"p50": percentile(parks, 0.5), "max": max(parks), "bar": 1 + size / LINK},
            "wake_s": {"p50": percentile(wakes, 0.5), "max": max(wakes), "bar": 0.6 + size / LINK},
            "left_mib": left / (1 << 20),
            "had_mib": (with_it - before) / (1 << 20),
        }


def many(stand: Fixture, count: int, library: str) -> dict[str, Any]:
    """Programs with little memory, all parked, then all woken."""
    before = used_bytes(stand)
    members = [program(stand, f"idle {number}", 16, library) for number in range(count)]
    with closing(members):
        for number, member in enumerate(members):
            member.answer(WAIT_S)
            park(stand, f"idle {number}")
        left = used_bytes(stand) - before
        told = [member.ask("step", WAIT_S) for member in members]
    return {
        "programs": count,
        "left_mib": left / (1 << 20),
        "mismatches": sum(not each["right"] for each in told),
        "wake_s": {"p50": percentile([each["seconds"] for each in told], 0.5)},
    }


def moved(stand: Fixture, mib: int, moves: int, library: str) -> dict[str, Any]:
    """One program, to the second GPU and back."""
    member = program(stand, "moving", mib, library)
    with closing([member]):
        member.answer(WAIT_S)
        plain_s = statistics.median(member.ask("step", WAIT_S)["seconds"] for _ in range(3))
        standing, wrong = [], 0
        for number in range(moves):
            began = time.monotonic()
            request = api.MigrateClient(client="moving", gpu=str((number + 1) % 2))
            told = call_and_wait(RuntimeDir(stand.directory), request)
            if told["why"]:
                raise BenchError(f"the program is not moved: {told['why']}")
            wrong += not member.ask("step", WAIT_S)["right"]
            standing.append(max(0.0, time.monotonic() - began - plain_s))
    size = mib << 20
    return {"gib": size / GIB, "standing_s": standing, "bar": 2 + 2 * size / LINK, "mismatches": wrong}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    simulate = simulated(options, "2x8GiB")
    library = "torch" if simulate is None and importlib.util.find_spec("torch") is not None else "driver"
    with uncoordinated(simulate=simulate) as stand, coordinator(stand, []):
        found: dict[str, Any] = {"library": library}
        with contextlib.suppress(KeyboardInterrupt):
            found["sizes"] = [
                one(stand, round(float(gib) * 1024), options.cycles if index == 0 else 5, library)
                for index, gib in enumerate(options.gib.split(","))
            ]
            found["idle"] = many(stand, options.idle, library)
            gpus = len(call(RuntimeDir(stand.directory), api.Status())["gpus"])
            if gpus > 1 and options.moves:
                last_mib = round(float(options.gib.rpartition(",")[2]) * 1024)
                found["moved"] = moved(stand, last_mib, options.moves, library)
    return found


def fault(result: dict[str, Any]) -> str:
    """What is wrong with the result."""
    parts = [*result["sizes"], result["idle"], *([result["moved"]] if "moved" in result else [])]
    wrong = sum(each["mismatches"] for each in parts)
    return f"{wrong} results were wrong" if wrong else ""


def show(result: dict[str, Any]) -> None:
    """Text."""
    for each in result["sizes"]:
        park, wake = each["park_s"], each["wake_s"]
        print(
            f"{each['gib']:g} GiB, {each['cycles']} times: parked in {park['p50']:.2f} s (most {park['max']:.2f}, bar "
            f"{park['bar']:.2f}), awake in {wake['p50']:.2f} s (most {wake['max']:.2f}, bar {wake['bar']:.2f}); "
            f"{each['left_mib']:.0f} of {each['had_mib']:.0f} MiB left; {each['mismatches']} mismatches"
        )
    idle = result["idle"]
    print(f"{idle['programs']} idle programs: {idle['left_mib']:.0f} MiB left; awake in {idle['wake_s']['p50']:.2f} s")
    if "moved" in result:
        told = result["moved"]
        times = ", ".join(f"{each:.2f}" for each in told["standing_s"])
        print(f"moved to the other GPU and back: {times} s (bar {told['bar']:.2f}); {told['mismatches']} mismatches")


def main() -> int:
    """Entry point."""
    parser = parser_for("park", "idle programs that leave the card and come back")
    add_figures(
        parser,
        gib=("1,20", "sizes of the program's memory"),
        cycles=(20, "parks and wakes of the first size"),
        idle=(10, "programs parked together"),
        moves=(4, "of a program between two GPUs"),
    )
    return run_benchmark(parser, measure, show, fault)


if __name__ == "__main__":
    sys.exit(main())
