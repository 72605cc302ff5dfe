"""A picture of a real time line: `python -m nvshare.bench.timeline --out timeline.png` (extra `plots`).

Three programs (workloads/busy.py) run under the hook; drawn are, for each, its leases as its gate was open (the
coordinator's events) and the work that really ran: the simulated GPU's trace, or on a card the kernels' own stamps.
A card's clock is not the host's: each program measures the offset (about 20 us), and its stamps are moved by it.

Non-goals: judging the trace (coordinator/cli/demo_proof.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvshare.bench.harness.command import check_plots
from nvshare.bench.harness.fixture import BenchError, Fixture, fixture, machine
from nvshare.bench.workloads.busy import read_log
from nvshare.coordinator.cli.trace import plot
from nvshare.coordinator.cli.trace.plot import Interval
from nvshare.coordinator.cli.trace.recording import record
from nvshare.coordinator.system.devices import real_card
from nvshare.simulated_gpu.trace import read_trace

PROGRAMS = {
    "steady": ["--kernel-us=500", "--burst=400", "--copy-kib=64"],
    "batches": ["--kernel-us=400", "--burst=60", "--copy-kib=1024"],
    "bursty": ["--kernel-us=400", "--burst=30", "--gap-every=1", "--gap-ms=90", "--copy-kib=64"],
}


@dataclass(frozen=True, slots=True)
class Scene:
    """Drawn spans by program, in nanoseconds of one clock."""

    work: dict[str, list[Interval]]
    leases: dict[str, list[Interval]]
    title: str


def leases(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """Leases by the programs' names in their grants."""
    recording = record(event for event in events if event["kind"] != "registered")
    found: dict[str, list[Interval]] = {}
    for span in recording.leases:
        found.setdefault(recording.names[span.client], []).append((span.start_ns, span.end_ns or 0))
    return found


def perform(stand: Fixture, seconds: float, quantum: str) -> Scene:
    """Runs the programs and gathers what happened."""
    stamps = {name: stand.directory / f"{name}.times" for name in PROGRAMS}
    with stand.events() as events:
        busy = [sys.executable, "-m", "nvshare.bench.workloads.busy", f"--seconds={seconds}"]
        running = {
            name: stand.start([*busy, f"--log={stamps[name]}", *how], hooked=True, name=name)
            for name, how in PROGRAMS.items()
        }
        offsets = {}
        for name, process in running.items():
            summary, _ = process.communicate(timeout=seconds + 120)
            if process.returncode != 0:
                raise BenchError(f"{name}: exit code {process.returncode}")
            offsets[name] = int(json.loads(summary)["clock_offset_ns"] or 0)
    held = leases(events)
    if stand.simulate is not None:
        processes = {process.pid: name for name, process in running.items()}
        work: dict[str, list[Interval]] = {name: [] for name in PROGRAMS}
        for piece in read_trace(stand.directory / "simulated_gpu"):
            if piece.process_id in processes:
                work[processes[piece.process_id]].append((piece.start_ns, piece.end_ns))
    else:
        work = {
            name: [(start + offsets[name], end + offsets[name]) for start, end in read_log(path)]
            for name, path in stamps.items()
        }
    return Scene(work, held, f"{machine()['gpu'] if stand.simulate is None else 'simulated GPU'}, quantum {quantum}")


def draw(scene: Scene, *, start_s: float, length_s: float, out: Path) -> None:
    """A row for each program.  The window begins `start_s` after the first lease."""
    origin = min(start for own in scene.leases.values() for start, _ in own) + int(start_s * 1e9)
    rows = [plot.Row(name, scene.work.get(name, ()), scene.leases.get(name, ())) for name in PROGRAMS]
    title = f"{scene.title}: work on the GPU (solid), lease (pale)"
    plot.draw(rows, (origin, origin + int(length_s * 1e9)), title, out)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m nvshare.bench.timeline", description="Draw who worked when")
    parser.add_argument("--out", type=Path, default=Path("timeline.png"))
    parser.add_argument("--simulate", action="store_true", help="on the simulated GPU although there is a card")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long the programs run (default 3)")
    parser.add_argument("--start", type=float, default=1.0, help="where the window begins, in seconds (default 1)")
    parser.add_argument("--length", type=float, default=0.6, help="of the window, in seconds (default 0.6)")
    parser.add_argument("--quantum", default="50ms", help="default 50ms")
    options = parser.parse_args()
    simulate = "1x8GiB" if options.simulate or not real_card() else None
    try:
        check_plots()
        with fixture(simulate=simulate, quantum=options.quantum) as stand:
            scene = perform(stand, options.seconds, options.quantum)
    except BenchError as error:
        sys.stderr.write(f"nvshare.bench.timeline: {error}\n")
        return 1
    draw(scene, start_s=options.start, length_s=options.length, out=options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
