"""Does making host memory ready ahead slow a launch-bound program?  `python -m nvshare.bench.memory.prepare`.

Method: one program under the hook in mode `swap` holds the lease and launches kernels of a microsecond, in turns of
10 ms, with `--gib` allocated.  The coordinator is played here (swap.py): after a third of the time it says that all
of that will probably be evicted, and the hook makes so much host memory ready beside the program.  When it is done is
seen by the size of the process.  Compared are launches a second before, meanwhile and after, in the same process: the
median of the turns, the worst per cent of them, and all launches over all of the time.

Non-goals: how fast the memory is made (nvshare.bench.memory.swap).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nvshare.bench.harness.command import parser_for, run_benchmark, show_each
from nvshare.bench.harness.fixture import BenchError, machine, percentile, real_card
from nvshare.bench.memory.scripted import Coordinator, Program, scene, started
from nvshare.coordinator.protocol import messages

GIB = 1 << 30
TURN_NS = 10_000_000
ENOUGH_TURNS = 5

Turn = tuple[int, int, int]
"""Begin, end, launches."""


def resident_bytes(program: Program) -> int:
    """Of the process, with what was made ready."""
    pages = int(Path(f"/proc/{program.process.pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def until_ready(program: Program, size: int, before: int, within_s: float) -> tuple[int, int]:
    """When nearly so much had been made, and how much it was in the end; monotonic."""
    deadline = time.monotonic() + within_s
    while (made := resident_bytes(program) - before) < size * 31 // 32 and time.monotonic() < deadline:
        time.sleep(0.01)
    return time.monotonic_ns(), made


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Launches a second."""
    if len(turns) < ENOUGH_TURNS:
        raise BenchError(f"only {len(turns)} turns of 10 ms in one of the phases: more --seconds, or another --gib")
    rates = [count / (end - begin) * 1e9 for begin, end, count in turns]
    whole = sum(count for _, _, count in turns) / sum(end - begin for begin, end, _ in turns) * 1e9
    return {
        "turns": len(turns), "median_per_s": round(statistics.median(rates)), "whole_per_s": round(whole),
        "worst_percent_per_s": round(percentile(rates, 0.01)),
    }  # fmt: skip


def measure(coordinator: Coordinator, program: Program, size: int, seconds: float) -> dict[str, Any]:
    """The three phases."""
    coordinator.admit(program, [size])
    program.tell(f"launches {TURN_NS} {round(seconds * 1e9 / TURN_NS)}")
    coordinator.expect(program, messages.Request)
    coordinator.send(program, messages.Restore(gpu=0, order_id=1 << 40, bytes=1 << 50, credit_bytes=1 << 50))
    coordinator.finished(program, 1 << 40, may_be_nothing=True)
    coordinator.send(program, messages.Grant(gpu=0, lease_id=1, quantum_ns=10**12, waiters=0))
    time.sleep(seconds / 3)
    before, told_ns = resident_bytes(program), time.monotonic_ns()
    coordinator.settings(program, prepare_bytes=size)
    ready_ns, made = until_ready(program, size, before, seconds / 3)
    turns: list[Turn] = [tuple(turn) for turn in program.answer()]
    phases = {
        "before": [turn for turn in turns if turn[1] <= told_ns][1:],  # the first one warms up
        "meanwhile": [turn for turn in turns if turn[0] >= told_ns and turn[1] <= ready_ns],
        "after": [turn for turn in turns if turn[0] >= ready_ns],
    }
    found: dict[str, Any] = {name: summary(of) for name, of in phases.items()}
    around = (found["before"]["whole_per_s"] + found["after"]["whole_per_s"]) / 2
    return {
        **found, "made_gib": round(made / GIB, 3), "all_made": made >= size * 31 // 32,
        "seconds_meanwhile": round((ready_ns - told_ns) / 1e9, 3),
        "meanwhile_over_around": round(found["meanwhile"]["whole_per_s"] / around, 4),
    }  # fmt: skip


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = options.simulate or not real_card()
    size = int((options.gib or (0.25 if simulate else 3.5)) * GIB) >> 21 << 21
    bytearray(size)  # in a virtual machine memory that was never used is the hypervisor's to find
    with ExitStack() as stack:
        _, hooked, path = stack.enter_context(scene(options, simulate, size))
        coordinator = stack.enter_context(Coordinator(path, 2 * size))
        program = stack.enter_context(started(hooked))
        found = measure(coordinator, program, size, options.seconds)
    return {**found, "simulated": simulate, "machine": machine()}


def main() -> int:
    """Command line."""
    parser = parser_for("memory.prepare", "Host memory beside launches")
    parser.add_argument("--gib", type=float, help="what the program has (default 3.5, simulated 0.25)")
    parser.add_argument("--seconds", type=float, default=15.0, help="in all (default 15)")
    return run_benchmark(parser, _measure, show_each)


if __name__ == "__main__":
    sys.exit(main())
