"""Duration of a hand-over of the GPU: `python -m nvshare.bench.handover --json`.

Programs that saturate the GPU (saturate.c) under a small quantum.  One sample is the time from the coordinator's
`revoked` event to the moment when the next holder's first call has come back from the driver (the program's own stamp),
less the time that the first one's drain took (as its release says): what the hand-over costs beyond the drain.
All clocks are CLOCK_MONOTONIC of one machine.

JSON: `handover_us` (`p50`, `p99`), `handovers` (samples); `details`: its parts (revoke to release without the drain,
release to grant, grant to open gate), drains, and how many hand-overs gave no sample and why.

Non-goals: hand-overs that move memory.
"""

from __future__ import annotations

import argparse
import bisect
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
)

SOURCE = PROGRAMS / "saturate.c"


@dataclass(slots=True)
class Samples:
    """Nanoseconds of each hand-over that could be measured, and why the others could not."""

    first_call_ns: list[int] = field(default_factory=list)
    release_ns: list[int] = field(default_factory=list)
    grant_ns: list[int] = field(default_factory=list)
    open_ns: list[int] = field(default_factory=list)
    drain_ns: list[int] = field(default_factory=list)
    without: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Turn:
    """One lease that followed a revoked one of another client."""

    name: str
    lease: int
    revoked_ns: int
    released_ns: int
    drain_ns: int
    granted_ns: int


def turns(events: Iterable[Mapping[str, Any]]) -> tuple[list[Turn], dict[int, int]]:
    """Hand-overs in the event stream, and by lease when its gate opened."""
    revoked: dict[int, int] = {}
    before: tuple[int, int, int, int] | None = None
    opened: dict[int, int] = {}
    found: list[Turn] = []
    for event in events:
        if event["kind"] == "revoked":
            revoked[event["lease"]] = event["at_ns"]
        elif event["kind"] == "released":
            opened[event["lease"]] = event["opened_at_ns"]
            at_ns = revoked.pop(event["lease"], None)
            before = None
            if at_ns is not None and event["drained"] and event["at_ns"] - at_ns >= event["drain_ns"]:
                before = (event["client"], at_ns, event["at_ns"], event["drain_ns"])
        elif event["kind"] == "granted":
            if before is not None and before[0] != event["client"]:
                found.append(Turn(event["name"], event["lease"], *before[1:], event["at_ns"]))
            before = None
    return found, opened


def evaluate(events: Sequence[Mapping[str, Any]], stamps: Mapping[str, Sequence[tuple[int, int]]]) -> Samples:
    """Join the coordinator's events with the programs' stamps (called_ns, returned_ns of launches that blocked)."""
    samples = Samples()
    found, opened = turns(events)
    returns = {name: [returned for _, returned in own] for name, own in stamps.items()}
    for turn in found:
        own = stamps.get(turn.name, ())
        index = bisect.bisect_left(returns.get(turn.name, []), turn.granted_ns)
        if index >= len(own):
            samples.without["program ended before its turn"] += 1
            continue
        called_ns, returned_ns = own[index]
        if called_ns > turn.revoked_ns:
            samples.without["next program was not waiting yet"] += 1
            continue
        samples.first_call_ns.append(returned_ns - turn.revoked_ns - turn.drain_ns)
        samples.drain_ns.append(turn.drain_ns)
        samples.release_ns.append(turn.released_ns - turn.revoked_ns - turn.drain_ns)
        samples.grant_ns.append(turn.granted_ns - turn.released_ns)
        if turn.lease in opened:
            samples.open_ns.append(opened[turn.lease] - turn.granted_ns)
    return samples


def run_programs(stand: Fixture, program: Path, options: argparse.Namespace) -> Samples:
    """Starts the programs, follows the events until they have ended, joins both."""
    names = [f"saturate-{number}" for number in range(options.programs)]
    command = [str(program), str(options.seconds), str(options.kernel_us * 1000), str(options.depth)]
    with stand.events() as events:
        running = {name: stand.start(command, hooked=True, name=name) for name in names}
        stamps = {name: _finish(name, process, options.seconds) for name, process in running.items()}
    return evaluate(events, stamps)


def _finish(name: str, process: subprocess.Popen[str], seconds: float) -> list[tuple[int, int]]:
    out, _ = process.communicate(timeout=seconds + 120)
    if process.returncode != 0:
        raise BenchError(f"{name}: exit code {process.returncode}")
    return [(called, returned) for called, returned in json.loads(out)["blocked"]]


def in_us(values: Sequence[int]) -> dict[str, float] | None:
    """Percentiles in microseconds."""
    if not values:
        return None
    return {f"p{round(share * 100)}": round(percentile(values, share) / 1e3, 1) for share in (0.5, 0.9, 0.99)}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = simulated(options, "1x1GiB")
    with tempfile.TemporaryDirectory() as scratch, fixture(simulate=simulate, quantum=options.quantum) as stand:
        samples = run_programs(stand, compile_program(SOURCE, Path(scratch)), options)
    figures = in_us(samples.first_call_ns)
    if figures is None:
        raise BenchError(f"no hand-over was measured ({dict(samples.without)})")
    return {
        "handover_us": {"p50": figures["p50"], "p99": figures["p99"]},
        "handovers": len(samples.first_call_ns),
        "simulated": simulate is not None,
        "details": {
            "first_call_us": figures,
            "revoke_to_release_us": in_us(samples.release_ns),
            "release_to_grant_us": in_us(samples.grant_ns),
            "grant_to_open_us": in_us(samples.open_ns),
            "drain_us": in_us(samples.drain_ns),
            "without_sample": dict(samples.without),
            "programs": options.programs,
            "quantum": options.quantum,
            "kernel_us": options.kernel_us,
            "depth": options.depth,
        },
    }


def _show(result: dict[str, Any]) -> None:
    figures = result["handover_us"]
    print(f"{result['handovers']} hand-overs on {result['machine']['gpu']}, beyond the drain:")
    print(f"{figures['p50']} us p50, {figures['p99']} us p99")


def main() -> int:
    """Command line."""
    parser = parser_for("handover", "Time from revoke to the next call")
    add_figures(
        parser,
        seconds=(10.0, "how long the programs run"),
        programs=(2, "how many take turns"),
        quantum=("20ms", "length of a turn"),
        kernel_us=(200, "length of one kernel"),
        depth=(4, "kernels in flight"),
    )
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
