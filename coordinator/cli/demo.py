"""`nvshare-demo`: three unmodified programs take turns on one GPU, and their work is checked at the end.

It uses a real GPU, else the simulated one, and says which.  It starts the programs (bench/workloads/busy.py) as
`nvshare-run` does.  The exit code is 0 only if no work of two programs overlapped (demo_proof.py), every program had
leases and none failed.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
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
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from nvshare.bench.workloads.busy import read_log
from nvshare.client_hook.embedded import Launch, prepare_client
from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.cli.demo_proof import violations
from nvshare.coordinator.cli.trace.recording import Recording, record
from nvshare.coordinator.daemon.control.api import decode_event
from nvshare.coordinator.daemon.control.sockets import EventReader
from nvshare.coordinator.system.devices import real_card
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.system.temporary_coordinator import temporary_coordinator
from nvshare.coordinator.system.version import VersionOption, run_command
from nvshare.coordinator.units import parse_quantum
from nvshare.simulated_gpu.trace import overlaps, read_trace

PROGRAMS: dict[str, tuple[str, ...]] = {
    "steady": ("--kernel-us=300", "--burst=16"),
    "copies": ("--kernel-us=150", "--burst=12", "--copy-kib=4096"),
    "bursty": ("--kernel-us=400", "--burst=8", "--ahead=1", "--gap-every=6", "--gap-ms=12"),
}
MAX_SECONDS = 120.0
"""Traces are ring buffers: a longer run could overwrite its beginning."""
_POLL_MS = 100
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
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
    launch = Launch(str(setup.directory.path), setup.simulate, {"name": name})
    environ = dict(os.environ)
    environ.setdefault("NVSHARE_MEMORY", "device")
    environ = prepare_client(launch, environ)
    command = [sys.executable, "-m", "nvshare.bench.workloads.busy", f"--seconds={seconds}", *PROGRAMS[name]]
    command += [f"--seed={len(name)}", f"--log={setup.log(name)}"]
    with setup.output(name).open("wb") as output:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """SIGTERM and Ctrl-C wait for the end of the block, so that no program starts of which nobody knows."""
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in came:
        signal.raise_signal(number)


def run_programs(setup: Setup, seconds: float) -> tuple[Recording, dict[str, str]]:
    """Runs the programs to their end.  Returns what happened, and the reason of each failed program."""
    events: list[dict[str, Any]] = []
    reader = EventReader(setup.directory.events_socket)
    running: dict[str, subprocess.Popen[bytes]] = {}
    end = time.monotonic() + seconds + _GRACE_S
    try:
        with _signals_later():
            running.update({name: start(setup, name, seconds) for name in PROGRAMS})
        while any(process.poll() is None for process in running.values()) and time.monotonic() < end:
            for frame in reader.frames(_POLL_MS):
                events.append(decode_event(frame))
                if time.monotonic() > end:
                    break
        events += [decode_event(frame) for frame in reader.frames(2 * _POLL_MS)]
        failures = {name: _failure(setup, name, process) for name, process in running.items()}
    finally:
        reader.close()
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    return record(events), {name: text for name, text in failures.items() if text}


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


def result_of(simulated: bool, found: Recording, overlapping: int) -> dict[str, Any]:
    """The figures of `--json`."""
    return {
        "simulated": simulated,
        "gpus": max(1, len({span.uuid for span in found.leases})),
        "clients": [_figures(found, name) for name in PROGRAMS],
        "handovers": sum(before.client != after.client for before, after in pairwise(found.leases)),
        "violations": overlapping,
    }


def _figures(found: Recording, name: str) -> dict[str, Any]:
    held, waited = (
        [(span.end_ns or 0) - span.start_ns for span in spans if found.names.get(span.client, "").startswith(name)]
        for spans in (found.leases, found.waits)
    )
    return {
        "name": name,
        "leases": len(held),
        "gpu_seconds": round(sum(held) / 1e9, 4),
        "max_wait_ms": round(max(waited, default=0) / 1e6, 3),
    }


def summary(result: dict[str, Any], where: str) -> Table:
    """The table at the end."""
    table = Table(title=where)
    table.add_column("client")
    for title in ("leases", "GPU seconds", "longest wait"):
        table.add_column(title, justify="right")
    for client in result["clients"]:
        wait = f"{client['max_wait_ms']:.1f} ms"
        table.add_row(client["name"], str(client["leases"]), f"{client['gpu_seconds']:.2f}", wait)
    return table


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
    version: VersionOption = False,
) -> None:
    """Let three programs take turns on one GPU, and prove that their work never overlaps."""
    console = Console()
    errors = Console(stderr=True)
    try:
        with set_up(None if real_card() and not simulate else "1x16GiB", policy, quantum) as setup:
            if not as_json:
                console.print(f"Three programs on one [bold]{setup.where}[/bold], in turns of {quantum}.")
                console.print(f"Meanwhile: nvshare-ctl --runtime-dir {setup.directory.path} top", soft_wrap=True)
            found, failures = run_programs(setup, seconds)
            overlapping, traced = count_overlaps(setup)
            result = result_of(setup.simulate is not None, found, overlapping)
            fine, verdict = verdict_of(result, failures, traced)
    except LaunchError as error:
        errors.print(f"nvshare-demo: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(result))
    else:
        console.print(summary(result, setup.where))
        console.print(verdict, style="bold", highlight=False, markup=False)
        if found.lost:
            console.print(f"{found.lost} events were lost, so the figures are too low.")
    if not fine and as_json:
        errors.print(verdict, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if fine else 1)


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, _terminated)  # ends the coordinator and the programs too
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    run_command(app, sys.argv[1:], "nvshare-demo")


if __name__ == "__main__":
    main()
