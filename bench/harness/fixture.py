"""A benchmark's fixture: a coordinator of its own, and programs under the hook or beside it.

Invariants: the coordinator lives in a temporary directory and ends with the fixture; programs are started with the
tools that a user has (`nvshare-run`, `nvshare-ctl`), so that what is measured is what is shipped; memory is left
alone (`NVSHARE_MEMORY=device`) unless the caller asks for something else.

Non-goals: what is measured, statistics of one benchmark.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.system.devices import real_card
from nvshare.coordinator.system.temporary_coordinator import temporary_coordinator
from nvshare.simulated_gpu.environment import simulated_environment

START_TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parents[1] / "programs"
"""C programs that benchmarks and tests compile."""


class BenchError(Exception):
    """The benchmark cannot run here.  The text says why."""


def machine() -> dict[str, Any]:
    """The machine of a measurement, for the record beside the figures."""
    facts: dict[str, Any] = {"cores": os.cpu_count(), "cpu": _cpu_name(), "gpu": "simulated"}
    if real_card():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with tempfile.TemporaryFile() as errors:
            told = subprocess.run(query, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        facts["gpu"] = told.stdout.strip() if told.returncode == 0 else "NVIDIA, unnamed"
    return facts


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` in 0..1."""
    ordered = sorted(values)
    return ordered[min(len(ordered), max(1, math.ceil(share * len(ordered)))) - 1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and count of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repetitions": len(values)}


def compile_program(source: Path, into: Path, *flags: str) -> Path:
    """A small C program of this folder, compiled with the system's compiler; with flags also a library."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchError("no C compiler: install one, or name it in CC")
    program = into / source.stem
    done = subprocess.run(
        [compiler, "-std=gnu11", "-O2", *flags, "-o", str(program), str(source), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchError(f"{source.name} does not compile:\n{done.stderr}")
    return program


@dataclass(frozen=True, slots=True)
class Fixture:
    """The place of a coordinator, or of programs without one.  `simulate` None: on the real card."""

    directory: Path
    simulate: str | None

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of a program that is not hooked, on the same GPUs as the hooked ones."""
        own = {k: v for k, v in os.environ.items() if k not in {"LD_PRELOAD", "NVSHARE_ENABLE", "NVSHARE_SOCKET"}}
        own.setdefault("NVSHARE_MEMORY", "device")
        own["NVSHARE_RUNTIME_DIR"] = str(self.directory)
        if self.simulate is not None:
            own = simulated_environment(self.directory / "simulated_gpu", self.simulate, own)
        return own | dict(extra or {})

    def hooked(self, command: Sequence[str], *, name: str = "", options: Sequence[str] = ()) -> list[str]:
        """The same command under the hook; `options` are nvshare-run's."""
        options = ["--runtime-dir", str(self.directory), *options]
        options += ["--name", name] if name else []
        options += [f"--simulate={self.simulate}"] if self.simulate is not None else []
        return [sys.executable, "-m", "nvshare.coordinator.cli.run", *options, "--", *command]

    def start(
        self,
        command: Sequence[str],
        *,
        hooked: bool,
        name: str = "",
        options: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        errors: int | None = None,
        own_group: bool = False,
    ) -> subprocess.Popen[str]:
        """A program whose standard output is read by the caller; its errors go to ours, or to that descriptor.

        `own_group`: it leads a process group, so that what it starts can be ended with it.
        """
        line = self.hooked(command, name=name, options=options) if hooked else list(command)
        environment = self.environment(extra)
        if hooked:  # nvshare-run puts the simulated libraries in front by itself
            environment = {**{k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}, **dict(extra or {})}
            environment.setdefault("NVSHARE_MEMORY", "device")
        return subprocess.Popen(
            line, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True,
            process_group=0 if own_group else None,
        )  # fmt: skip

    def control(self, *words: str) -> Any:
        """One `nvshare-ctl` command; what it says as JSON."""
        done = subprocess.run(
            [sys.executable, "-m", "nvshare.coordinator.cli.ctl", *words, "--json"],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise BenchError(f"nvshare-ctl {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return json.loads(done.stdout) if done.stdout.strip() else None

    @contextmanager
    def events(self) -> Iterator[list[dict[str, Any]]]:
        """Follows `nvshare-ctl events` for the length of the block; the list is filled at its end."""
        log = self.directory / "events.jsonl"
        command = [sys.executable, "-m", "nvshare.coordinator.cli.ctl", "events", "--json"]
        found: list[dict[str, Any]] = []
        with log.open("w", encoding="utf-8") as stream:
            follower = subprocess.Popen(command, env=self.environment(), stdout=stream, stdin=subprocess.DEVNULL)
            try:
                yield found
            finally:
                follower.terminate()
                follower.wait(10)
        found += read_events(log)


def read_events(log: Path) -> list[dict[str, Any]]:
    """Events that `nvshare-ctl events` printed, without a cut line.  Raises BenchError when the follower failed."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    for event in events:
        if "kind" not in event:
            raise BenchError(f"nvshare-ctl events: {event['error']['text']}")
    return events


@contextmanager
def fixture(
    *,
    simulate: str | None,
    quantum: str = "100ms",
    more: Sequence[str] = (),
) -> Iterator[Fixture]:
    """A coordinator for the length of the block; `more` are options of its own."""
    options = ["--quantum", quantum, "--sharing", "exclusive", "--policy", "round_robin", *more]
    with uncoordinated(simulate=simulate) as stand, coordinator(stand, options):
        yield stand


@contextmanager
def uncoordinated(*, simulate: str | None) -> Iterator[Fixture]:
    """A place for programs, without a coordinator."""
    directory = Path(tempfile.mkdtemp(prefix="nvshare-bench-"))
    try:
        yield Fixture(directory, simulate)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def coordinator(stand: Fixture, options: Sequence[str]) -> Iterator[None]:
    """A coordinator with these options, and its defaults for the others."""
    simulated = [f"--simulate={stand.simulate}"] if stand.simulate is not None else []
    log = stand.directory / "coordinator.log"
    with ExitStack() as stack:
        try:
            stack.enter_context(temporary_coordinator(stand.directory, [*options, *simulated], log=log))
        except LaunchError as error:
            raise BenchError(str(error)) from None
        yield
