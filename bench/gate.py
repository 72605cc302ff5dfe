"""Cost of the gate for a call while the lease is held: `python -m nvshare.bench.gate --json`.

A small C loop (gate_loop.c) calls a cheap gated function through the pointer that the driver's lookup gives, without
the hook and under it in turns; see bench/README.md for why this call and how the figures are made.

JSON: `baseline_ns`, `hooked_ns`, `added_ns` per call; `baseline_instructions`, `hooked_instructions` and
`added_instructions` (null where neither performance counters nor valgrind are to be had); `details`.

Non-goals: other costs of the hook than those of a call that passes an open gate.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvshare.bench.harness.command import add_figures, parser_for, run_benchmark, simulated, track
from nvshare.bench.harness.fixture import (
    PROGRAMS,
    BenchError,
    Fixture,
    compile_program,
    fixture,
    spread,
)
from nvshare.coordinator.system.devices import real_card

CANDIDATES = ("copy0", "memset0", "nofunction")
"""Gated calls that give the driver nothing to do; the cheapest that it accepts is measured."""

CACHEGRIND = ("--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")

SOURCE = PROGRAMS / "gate_loop.c"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of the loop: nanoseconds per call in its quietest round, instructions per call if counted."""

    call_ns: float
    instructions: float | None


def run_loop(stand: Fixture, program: Path, call: str, *, hooked: bool, calls: int, rounds: int) -> Sample:
    """One process.  Raises BenchError when the driver refuses the call."""
    command = [str(program), call, str(calls), str(rounds)]
    process = stand.start(command, hooked=hooked, name=f"gate-{call}")
    out, _ = process.communicate(timeout=300)
    if process.returncode != 0:
        raise BenchError(f"{' '.join(command)}: exit code {process.returncode}")
    told = json.loads(out)
    return Sample(min(told["ns"]), told["instructions"])


def cheapest_call(stand: Fixture, program: Path) -> str:
    """The candidate that costs least without the hook, of those that this driver accepts."""
    costs: dict[str, float] = {}
    for call in CANDIDATES:
        try:
            costs[call] = run_loop(stand, program, call, hooked=False, calls=2000, rounds=5).call_ns
        except BenchError as error:
            sys.stderr.write(f"not used: {error}\n")
    if not costs:
        raise BenchError("the driver accepts none of the calls that this benchmark knows")
    return min(costs, key=lambda call: costs[call])


def compare(stand: Fixture, program: Path, call: str, *, pairs: int, calls: int, rounds: int) -> dict[str, Any]:
    """Baseline and hooked runs in turns; medians, and the median of the paired differences."""
    plain: list[Sample] = []
    hooked: list[Sample] = []
    for pair in track(range(pairs), f"{call}, pair"):
        order = (False, True) if pair % 2 == 0 else (True, False)
        for under_hook in order:
            sample = run_loop(stand, program, call, hooked=under_hook, calls=calls, rounds=rounds)
            (hooked if under_hook else plain).append(sample)
    added = [with_hook.call_ns - without.call_ns for without, with_hook in zip(plain, hooked, strict=True)]
    counted = [
        (without.instructions, with_hook.instructions)
        for without, with_hook in zip(plain, hooked, strict=True)
        if without.instructions is not None and with_hook.instructions is not None
    ]
    return {
        "call": call,
        "baseline": spread([sample.call_ns for sample in plain]),
        "hooked": spread([sample.call_ns for sample in hooked]),
        "added": spread(added),
        "instructions": [statistics.median(column) for column in zip(*counted, strict=True)] if counted else None,
    }


def instructions_by_valgrind(stand: Fixture, program: Path, call: str, *, hooked: bool) -> float | None:
    """Instructions per call by cachegrind: the difference of two loop lengths, so that start-up falls out."""
    valgrind = shutil.which("valgrind")
    if valgrind is None or real_card():  # valgrind cannot follow a real driver
        return None
    totals = []
    lengths = (2000, 12000)
    for length in lengths:
        report = stand.directory / f"valgrind-{length}"
        tool = [valgrind, *CACHEGRIND, f"--log-file={report}"]
        process = stand.start([*tool, str(program), call, str(length), "1"], hooked=hooked, name="gate-count")
        process.communicate(timeout=300)
        found = re.search(r"I\s+refs:\s+([\d,]+)", report.read_text(encoding="utf-8"))
        if process.returncode != 0 or found is None:
            return None
        totals.append(int(found[1].replace(",", "")))
    # The loop runs once as announced and a tenth of it before, as warm-up.
    return (totals[1] - totals[0]) / (1.1 * (lengths[1] - lengths[0]))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate, pairs, calls, rounds = simulated(options, "1x1GiB"), options.pairs, options.calls, options.rounds
    with tempfile.TemporaryDirectory() as scratch, fixture(simulate=simulate) as stand:
        program = compile_program(SOURCE, Path(scratch))
        call = cheapest_call(stand, program)
        gate = compare(stand, program, call, pairs=pairs, calls=calls, rounds=rounds)
        control = compare(stand, program, "context", pairs=2, calls=calls, rounds=rounds)
        launch = compare(stand, program, "launch", pairs=pairs, calls=max(512, calls // 10), rounds=rounds)
        counted, by = gate["instructions"], "performance counters"
        if counted is None:
            pair = [instructions_by_valgrind(stand, program, call, hooked=hooked) for hooked in (False, True)]
            counted, by = (pair, "valgrind") if None not in pair else (None, "not counted")
    return {
        "baseline_ns": round(gate["baseline"]["median"], 2),
        "hooked_ns": round(gate["hooked"]["median"], 2),
        "added_ns": round(gate["added"]["median"], 2),
        "baseline_instructions": counted[0] if counted else None,
        "hooked_instructions": counted[1] if counted else None,
        "added_instructions": round(counted[1] - counted[0], 2) if counted else None,
        "simulated": simulate is not None,
        "details": {"gate": gate, "ungated_control": control, "empty_kernel": launch, "instructions_by": by},
    }


def _show(result: dict[str, Any]) -> None:
    print(f"{result['details']['gate']['call']} on {result['machine']['gpu']}:")
    print(f"{result['baseline_ns']} ns without the hook, {result['hooked_ns']} ns with it and the lease held:")
    print(f"{result['added_ns']} ns added")
    if result["added_instructions"] is not None:
        print(f"{result['added_instructions']} instructions added ({result['details']['instructions_by']})")


def main() -> int:
    """Command line."""
    parser = parser_for("gate", "Cost of a call through the open gate")
    add_figures(
        parser,
        pairs=(7, "runs without and with the hook, in turns"),
        calls=(20000, "calls in a round"),
        rounds=(20, "rounds in a run; the quietest counts"),
    )
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
