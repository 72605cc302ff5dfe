"""Revoking from a deep queue: `python -m nvshare.bench.drains --json`.

1. `drain_ms`: of two programs (saturate.c) that submit short kernels as far ahead as the driver lets them, under a
   quantum of 20 ms with the coordinator's default pacing budget, as their releases tell; `graph_drain_ms`: the same of
   two that replay graphs of 20 kernels (replay.c), where as many launches hold 20 times the work.  The first drain
   stands apart (`first`): its queue was filled when nobody else was there, under the coarse bound of a lone program.
2. `throughput_cost`: of being paced, with the hand-overs that come with it, under a quantum of 500 ms. Two programs
   (replay.c) run so many short kernels one after the other, each alone under the hook, and then both together: 1 - (the
   sum of their times alone) / (the time until both are done). The mean of the repetitions.

Non-goals: hand-overs' other times (handover.py); what replays cost (`nvshare.bench.compatibility --case driver`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvshare.bench.harness.command import add_figures, parser_for, run_benchmark, simulated
from nvshare.bench.harness.fixture import (
    PROGRAMS,
    BenchError,
    Fixture,
    compile_program,
    fixture,
    percentile,
    spread,
)
from nvshare.bench.harness.progress import track
from nvshare.bench.harness.worker_group import Member, closing, nanoseconds, steps_for

READY_TIMEOUT_S = 60.0
KERNELS = 20
"""Kernels in a step of replay.c."""
QUANTUM = "20ms"
"""Under which drains are watched."""


def saturate(stand: Fixture, program: Path, options: argparse.Namespace) -> None:
    """Two programs at once, each under the hook."""
    command = [str(program), str(options.seconds), str(int(options.kernel_us * 1000)), str(options.depth)]
    group = [stand.start(command, hooked=True, name=f"saturate-{number}") for number in range(2)]
    try:
        for process in group:
            process.communicate(timeout=options.seconds + 60)
            if process.returncode != 0:
                raise BenchError(f"saturate: exit code {process.returncode}")
    finally:
        for process in group:
            if process.poll() is None:
                process.kill()
                process.wait()


def drains_ms(events: Iterable[Mapping[str, Any]]) -> tuple[list[float], int]:
    """Milliseconds that each revoked holder took to drain, and how many passed their deadline."""
    revoked: set[int] = set()
    found: list[float] = []
    overdue = 0
    for event in events:
        if event["kind"] == "revoked":
            revoked.add(event["lease"])
        elif event["kind"] == "released" and event["lease"] in revoked:
            if event["drained"]:
                found.append(event["drain_ns"] / 1e6)
            else:
                overdue += 1
    return found, overdue


def drains(simulate: str | None, work: Callable[[Fixture], object]) -> dict[str, Any]:
    """Drains while something runs."""
    with fixture(simulate=simulate, quantum=QUANTUM) as stand:
        with stand.events(nudge=("set", "quantum", QUANTUM)) as events:
            work(stand)
        found, overdue = drains_ms(events)
    if len(found) < 2:
        raise BenchError(f"only {len(found)} drains were seen")
    first, *paced = found
    percentiles = {f"p{round(share * 100)}": round(percentile(paced, share), 3) for share in (0.5, 0.9, 0.99, 1.0)}
    return percentiles | {"first": round(first, 3), "drains": len(found), "overdue": overdue}


def together_ns(group: Sequence[Member], line: str, timeout_s: float) -> int:
    """Time until all programs have done a command that they get at once."""
    began = time.monotonic_ns()
    for member in group:
        member.tell(line)
    for member in group:
        if "ns" not in (told := member.answer(timeout_s)):
            raise BenchError(f"{member.name}: {line}: {told}")
    return time.monotonic_ns() - began


def replay_together(stand: Fixture, program: Path, seconds: float) -> None:
    """Two programs that replay graphs as fast as they can."""
    group = [Member(stand, [str(program)], hooked=True, name=f"replay-{number}") for number in range(2)]
    with closing(group):
        for member in group:
            member.answer(READY_TIMEOUT_S)
        steps = steps_for(group[0], "graph", seconds / 2, READY_TIMEOUT_S)
        together_ns(group, f"time graph {steps}", seconds + READY_TIMEOUT_S)


def pacing(simulate: str | None, program: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Throughput that two programs lose together against one after the other."""
    command = [str(program), str(round(options.kernel_us * 1000))]
    timeout_s = 10 * options.seconds + READY_TIMEOUT_S
    alone, together = [], []
    with fixture(simulate=simulate, quantum="500ms") as stand:
        group = [Member(stand, command, hooked=True, name=f"busy-{number}") for number in range(2)]
        with closing(group):
            for member in group:
                member.answer(READY_TIMEOUT_S)
            steps = max(steps_for(member, "busy", options.seconds, timeout_s) for member in group)
            line = f"time busy {steps}"
            for _ in track(range(options.repetitions), "repetition"):
                alone.append([nanoseconds(member, line, timeout_s) for member in group])
                together.append(together_ns(group, line, timeout_s))
    costs = [1 - sum(two) / both for two, both in zip(alone, together, strict=True)]
    a_second = [KERNELS * steps * 1e9 * len(two) for two in alone]
    return {
        "throughput_cost": round(statistics.mean(costs), 5),
        "costs": [round(cost, 5) for cost in costs],
        "alone_kernels_per_s": spread([count / sum(two) for count, two in zip(a_second, alone, strict=True)]),
        "two_kernels_per_s": spread([count / both for count, both in zip(a_second, together, strict=True)]),
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = simulated(options, "1x1GiB")
    with tempfile.TemporaryDirectory() as place:
        program, replay = (compile_program(PROGRAMS / name, Path(place)) for name in ("saturate.c", "replay.c"))
        return {
            "simulated": simulate is not None,
            "drain_ms": drains(simulate, lambda stand: saturate(stand, program, options)),
            "graph_drain_ms": drains(simulate, lambda stand: replay_together(stand, replay, options.seconds)),
            **pacing(simulate, replay, options),
            "kernel_us": options.kernel_us,
            "depth": options.depth,
        }


def _show(result: dict[str, Any]) -> None:
    print(f"drains in ms: {result['drain_ms']}, of graphs {result['graph_drain_ms']}")
    print(f"throughput cost {100 * result['throughput_cost']:.2f} %")


def main() -> int:
    """Command line."""
    parser = parser_for("drains", "Drains of deep queues")
    add_figures(
        parser,
        seconds=(4.0, "each run of a saturating program"),
        repetitions=(5, "of the comparison of throughput"),
        kernel_us=(5.0, "length of one kernel"),
        depth=(5000, "kernels in flight at most"),
    )
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
