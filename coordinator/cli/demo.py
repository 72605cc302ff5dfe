"""`nvshare-demo`: three unmodified programs share one GPU, shown live and checked at the end.

It uses a real GPU, else the simulated one, and says which.  It starts the programs (bench/workloads/busy.py) as
`nvshare-run` does.  The exit code is 0 only if no work of two programs overlapped (demo_proof.py), every program had
leases and none failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from nvshare.bench.harness.fixture import percentile
from nvshare.bench.workloads.busy import read_log
from nvshare.client_hook.embedded import Launch, prepare_client
from nvshare.client_hook.launcher import ClientOptions, LaunchError
from nvshare.coordinator.cli.demo_ledger import Ledger
from nvshare.coordinator.cli.demo_proof import violations
from nvshare.coordinator.cli.demo_view import live, summary
from nvshare.coordinator.daemon.control.api import decode_event
from nvshare.coordinator.daemon.control.sockets import EventReader
from nvshare.coordinator.system.devices import real_card
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.system.temporary_coordinator import temporary_coordinator
from nvshare.coordinator.system.version import Versioned, run_command
from nvshare.coordinator.units import parse_quantum
from nvshare.simulated_gpu.trace import overlaps, read_trace

PROGRAMS: dict[str, tuple[str, ...]] = {
    "steady": ("--kernel-us=300", "--burst=16"),
    "copies": ("--kernel-us=150", "--burst=12", "--copy-kib=4096"),
    "bursty": ("--kernel-us=400", "--burst=8", "--ahead=1", "--gap-every=6", "--gap-ms=12"),
}
MAX_SECONDS = 120.0
"""Traces are ring buffers: a longer run could overwrite its beginning."""
_REDRAW_S = 0.1
_GRACE_S = 60.0
"""Extra time for the start and end of the programs."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The demo's runtime directory with a running coordinator, and its kind of GPU."""

    directory: RuntimeDir
    simulate: str | None

    @property
    def where(self) -> str:
        return "simulated GPU (no card is used)" if self.simulate is not None else "real GPU"

    def log(self, name: str) -> Path:
        return self.directory.path / f"{name}.times"

    def output(self, name: str) -> Path:
        return self.directory.path / f"{name}.out"


@contextlib.contextmanager
def set_up(simulate: str | None, policy: str | None, quantum: str) -> Iterator[Setup]:
    """A running coordinator for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="nvshare-demo-") as path:
        made = Setup(RuntimeDir(Path(path)), simulate)
        options = ["--embedded"]  # it ends by itself if the demo is killed
        options += ["--quantum", quantum, "--sharing", "exclusive"]
        options += ["--policy", policy] if policy else []
        options += [f"--simulate={simulate}"] if simulate is not None else []
        with temporary_coordinator(Path(path), options, log=made.output("coordinator")):
            yield made


def start(setup: Setup, name: str, seconds: float) -> subprocess.Popen[bytes]:
    """Starts one program under the hook."""
    launch = Launch(str(setup.directory.path), setup.simulate, ClientOptions(name=name))
    environ = dict(os.environ)
    environ.setdefault("NVSHARE_MEMORY", "device")
    environ = prepare_client(launch, environ)
    command = [sys.executable, "-m", "nvshare.bench.workloads.busy", f"--seconds={seconds}", *PROGRAMS[name]]
    command += [f"--seed={len(name)}", f"--log={setup.log(name)}"]
    with setup.output(name).open("wb") as output:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def run_programs(setup: Setup, seconds: float, console: Console | None) -> tuple[Ledger, dict[str, str]]:
    """Runs the programs to their end.  Returns the record of the events, and the reason of each failed program."""
    ledger = Ledger(list(PROGRAMS))
    reader = EventReader(setup.directory.events_socket)
    terminal = console is not None and console.is_terminal
    view = Live(console=console, refresh_per_second=8) if terminal else None
    running: dict[str, subprocess.Popen[bytes]] = {}
    begun = time.monotonic()
    try:
        with view or contextlib.nullcontext():
            running.update({name: start(setup, name, seconds) for name in PROGRAMS})
            shown = 0.0
            while any(process.poll() is None for process in running.values()):
                if time.monotonic() > begun + seconds + _GRACE_S:
                    break
                for frame in reader.frames(int(_REDRAW_S * 1000)):
                    ledger.take(decode_event(frame))
                    if time.monotonic() - shown > _REDRAW_S:
                        break
                shown = time.monotonic()
                if view is not None:
                    view.update(live(ledger, setup.where, begun + seconds - shown))
            for frame in reader.frames(200):
                ledger.take(decode_event(frame))
        failures = {name: _failure(setup, name, process) for name, process in running.items()}
    finally:
        reader.close()
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    return ledger, {name: text for name, text in failures.items() if text}


def _failure(setup: Setup, name: str, process: subprocess.Popen[bytes]) -> str:
    status = process.poll()
    if status == 0:
        return ""
    said = setup.output(name).read_text(errors="replace").strip()
    return f"{'did not end in time' if status is None else f'ended with {status}'}: {said[-500:]}"


def count_overlaps(setup: Setup) -> tuple[int, int]:
    """Overlaps between the work of two programs, and the number of programs whose work was traced."""
    if setup.simulate is not None:
        trace = read_trace(setup.directory.simulated_gpu)
        return len(overlaps(trace)), len({busy.process_id for busy in trace})
    logs = {name: read_log(setup.log(name)) for name in PROGRAMS if setup.log(name).exists()}
    return violations(logs), sum(bool(times) for times in logs.values())


def result_of(setup: Setup, ledger: Ledger, overlapping: int) -> dict[str, Any]:
    """The figures of `--json`."""
    costs = ledger.handover_ns
    p50, p99 = (percentile(costs, share) if costs else None for share in (0.50, 0.99))
    return {
        "simulated": setup.simulate is not None,
        "gpus": max(1, ledger.gpus),
        "clients": [
            {
                "name": record.name,
                "leases": len(record.holds),
                "gpu_seconds": round(record.held_ns / 1e9, 4),
                "max_wait_ms": round(record.max_wait_ns / 1e6, 3),
            }
            for record in ledger.clients.values()
        ],
        "handovers": ledger.handovers,
        "violations": overlapping,
        "handover_us": {
            "p50": None if p50 is None else round(p50 / 1e3, 1),
            "p99": None if p99 is None else round(p99 / 1e3, 1),
        },
    }


def verdict_of(result: dict[str, Any], failures: dict[str, str], traced: int) -> tuple[bool, str]:
    """Whether the demo succeeded, and one sentence."""
    faults = [f"{name} {text}" for name, text in failures.items()]
    if traced < len(PROGRAMS):
        faults.append(f"only {traced} of {len(PROGRAMS)} programs left a trace of work, so overlaps may be missed")
    if result["violations"]:
        faults.append(f"work of two programs overlapped {result['violations']} times")
    faults += [f"{client['name']} never had a lease" for client in result["clients"] if not client["leases"]]
    if faults:
        return False, "FAILED: " + "; ".join(faults)
    how = "the simulated GPU's trace" if result["simulated"] else "the GPU's own clock"
    return True, f"No overlap: by {how}, no two programs ever used the GPU at the same time."


def _quantum(text: str) -> str:
    try:
        parse_quantum(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def demo(
    seconds: Annotated[float, typer.Option(min=0.5, max=MAX_SECONDS, help="Run time of the programs.")] = 6.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the result, as one JSON object.")] = False,
    policy: Annotated[str | None, typer.Option(help="Scheduling policy.")] = None,
    quantum: Annotated[str, typer.Option(callback=_quantum, help="Length of a turn: 50ms, or auto.")] = "50ms",
    simulate: Annotated[bool, typer.Option("--simulate", help="Use the simulated GPU even beside a real one.")] = False,
) -> None:
    """Let three programs take turns on one GPU, and prove that their work never overlaps."""
    console = Console()
    errors = Console(stderr=True)
    try:
        with set_up(None if real_card() and not simulate else "1x16GiB", policy, quantum) as setup:
            if not as_json:
                console.print(f"Three programs on one [bold]{setup.where}[/bold], in turns of {quantum}.")
            ledger, failures = run_programs(setup, seconds, None if as_json else console)
            overlapping, traced = count_overlaps(setup)
            result = result_of(setup, ledger, overlapping)
            fine, verdict = verdict_of(result, failures, traced)
    except LaunchError as error:
        errors.print(f"nvshare-demo: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(result))
    else:
        console.print(summary(result, setup.where, verdict))
        if ledger.lost:
            console.print(f"{ledger.lost} events were lost, so the figures are too low.")
    if not fine and as_json:
        errors.print(verdict, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if fine else 1)


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, _terminated)  # ends the coordinator and the programs too
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=Versioned)(demo)
    run_command(app, sys.argv[1:], "nvshare-demo")


if __name__ == "__main__":
    main()
