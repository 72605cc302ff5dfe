"""What cuMemAlloc costs in memory mode `swap`: `python -m nvshare.bench.memory.alloc --json`.

A small C program (alloc_loop.c) makes so many allocations of a size and frees them again, without the hook and under it
with the lease held, in turns.  The quietest round of a run counts, the median over the runs is told.

JSON: `sizes`: for each size in bytes `plain_alloc_ns`, `swap_alloc_ns`, `plain_free_ns`, `swap_free_ns` per call and
`alloc_ratio`, `free_ratio` (swap over plain, from the medians); `worst_alloc_ratio`; `simulated`; `machine`.

On the simulated GPU the driver's own part is made up, so ratios there say nothing about a card.

Non-goals: what moving memory costs (bench/swap.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvshare.bench.harness.command import parser_for, run_benchmark, simulated
from nvshare.bench.harness.fixture import PROGRAMS, BenchError, Fixture, compile_program, fixture, machine
from nvshare.bench.harness.progress import track

KIB, MIB = 1 << 10, 1 << 20

CASES: Final = ((512, 1000), (64 * KIB, 500), (2 * MIB, 100), (64 * MIB, 8))
"""Bytes of an allocation, and how many there are at a time."""

SOURCE = PROGRAMS / "alloc_loop.c"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: nanoseconds per call in its quietest round."""

    alloc_ns: float
    free_ns: float


def run_loop(stand: Fixture, program: Path, size_bytes: int, count: int, *, hooked: bool, rounds: int) -> Sample:
    """One process.  Raises BenchError when it fails."""
    command = [str(program), str(size_bytes), str(count), str(rounds)]
    process = stand.start(command, hooked=hooked, name="alloc", options=("--memory=swap",) if hooked else ())
    out, _ = process.communicate(timeout=300)
    if process.returncode != 0:
        raise BenchError(f"{' '.join(command)}: exit code {process.returncode}")
    told = json.loads(out)
    return Sample(min(told["alloc_ns"]), min(told["free_ns"]))


def compare(stand: Fixture, program: Path, size_bytes: int, count: int, *, pairs: int, rounds: int) -> dict[str, float]:
    """Runs without and with the hook in turns; medians."""
    taken: dict[bool, list[Sample]] = {False: [], True: []}
    for pair in track(range(pairs), f"{size_bytes} bytes, pair"):
        for hooked in (False, True) if pair % 2 == 0 else (True, False):
            taken[hooked].append(run_loop(stand, program, size_bytes, count, hooked=hooked, rounds=rounds))
    plain_alloc, swap_alloc = (statistics.median(one.alloc_ns for one in taken[hooked]) for hooked in (False, True))
    plain_free, swap_free = (statistics.median(one.free_ns for one in taken[hooked]) for hooked in (False, True))
    return {
        "plain_alloc_ns": round(plain_alloc, 1),
        "swap_alloc_ns": round(swap_alloc, 1),
        "alloc_ratio": round(swap_alloc / plain_alloc, 3),
        "plain_free_ns": round(plain_free, 1),
        "swap_free_ns": round(swap_free, 1),
        "free_ratio": round(swap_free / plain_free, 3),
    }


def measure(*, simulate: str | None, pairs: int, rounds: int) -> dict[str, Any]:
    """The whole benchmark on one coordinator."""
    with tempfile.TemporaryDirectory() as scratch, fixture(simulate=simulate) as stand:
        program = compile_program(SOURCE, Path(scratch))
        sizes = {str(size): compare(stand, program, size, count, pairs=pairs, rounds=rounds) for size, count in CASES}
    return {
        "sizes": sizes,
        "worst_alloc_ratio": max(one["alloc_ratio"] for one in sizes.values()),
        "simulated": simulate is not None,
        "machine": machine(),
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    return measure(simulate=simulated(options, "1x1GiB"), pairs=options.pairs, rounds=options.rounds)


def _show(result: dict[str, Any]) -> None:
    for size, one in result["sizes"].items():
        print(
            f"{int(size):>9} B"
            f"  alloc {one['plain_alloc_ns']:.0f} -> {one['swap_alloc_ns']:.0f} ns ({one['alloc_ratio']} x)"
            f"  free {one['plain_free_ns']:.0f} -> {one['swap_free_ns']:.0f} ns ({one['free_ratio']} x)"
        )


def main() -> int:
    """Command line."""
    parser = parser_for("memory.alloc", "Cost of cuMemAlloc in mode swap")
    parser.add_argument("--pairs", type=int, default=5, help="runs without and with the hook, in turns (default 5)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds in a run; the quietest counts (default 20)")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
