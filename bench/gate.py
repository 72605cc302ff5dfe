"""Cost of the gate for a call while the lease is held: `python -m nvshare.bench.gate --json`.

A small C loop (gate_loop.c) calls a cheap gated function through the pointer that the driver's lookup gives, without
the hook and under it in turns; see bench/README.md for how the figures are made.

JSON: `baseline_ns`, `hooked_ns`, `added_ns` per call; `baseline_instructions`, `hooked_instructions` and
`added_instructions`, counted by valgrind on the simulated GPU, else null; `details`.

Non-goals: other costs of the hook than those of a call that passes an open gate.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
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

CACHEGRIND = ("--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")

SOURCE = PROGRAMS / "gate_loop.c"
CALL = "memset0"
"""A gated call that gives the driver nothing to do."""


def run_loop(stand: Fixture, program: Path, call: str, *, hooked: bool, calls: int, rounds: int) -> float:
    """Nanoseconds a call in the quietest round of one process.  Raises BenchError when the driver refuses the call."""
    command = [str(program), call, str(calls), str(rounds)]
    process = stand.start(command, hooked=hooked, name=f"gate-{call}")
    out, _ = process.communicate(timeout=300)
    if process.returncode != 0:
        raise BenchError(f"{' '.join(command)}: exit code {process.returncode}")
    return float(min(json.loads(out)["ns"]))


def compare(stand: Fixture, program: Path, call: str, *, pairs: int, calls: int, rounds: int) -> dict[str, Any]:
    """Baseline and hooked runs in turns; medians, and the median of the paired differences."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for pair in track(range(pairs), f"{call}, pair"):
        for under_hook in (False, True) if pair % 2 == 0 else (True, False):
            taken[under_hook].append(run_loop(stand, program, call, hooked=under_hook, calls=calls, rounds=rounds))
    added = [after - before for before, after in zip(*taken.values(), strict=True)]
    return {"call": call, "baseline": spread(taken[False]), "hooked": spread(taken[True]), "added": spread(added)}


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
        gate = compare(stand, program, CALL, pairs=pairs, calls=calls, rounds=rounds)
        control = compare(stand, program, "context", pairs=2, calls=calls, rounds=rounds)
        launch = compare(stand, program, "launch", pairs=pairs, calls=max(512, calls // 10), rounds=rounds)
        plain, hooked = (instructions_by_valgrind(stand, program, CALL, hooked=hooked) for hooked in (False, True))
    return {
        "baseline_ns": round(gate["baseline"]["median"], 2),
        "hooked_ns": round(gate["hooked"]["median"], 2),
        "added_ns": round(gate["added"]["median"], 2),
        "baseline_instructions": plain,
        "hooked_instructions": hooked,
        "added_instructions": None if plain is None or hooked is None else round(hooked - plain, 2),
        "simulated": simulate is not None,
        "details": {"gate": gate, "ungated_control": control, "empty_kernel": launch},
    }


def _show(result: dict[str, Any]) -> None:
    print(f"{result['details']['gate']['call']} on {result['machine']['gpu']}:")
    print(f"{result['baseline_ns']} ns without the hook, {result['hooked_ns']} ns with it and the lease held:")
    print(f"{result['added_ns']} ns added")
    if result["added_instructions"] is not None:
        print(f"{result['added_instructions']} instructions added, by valgrind")


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
