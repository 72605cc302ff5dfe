"""A node of one's own for each test: coordinator, simulated GPUs, programs under the hook; all real processes.

Invariants: everything that a test starts is gone after it; programs are started by `nvshare-run`, as a user would.

Non-goals: anything that stands in for a part of the product.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.environment import simulated_environment
from nvshare.simulated_gpu.trace import Busy, read_trace, trace_length
from tests.conftest import ROOT, Built
from tests.daemon.processes import TURNS, ctl, serving
from tests.hook.scripted import JsonClient
from tests.waiting import eventually

SETTINGS = TURNS | {"NVSHARE_DRAIN_DEADLINE": "10min", "NVSHARE_RECOVERY": "10min"}
"""Exclusive turns, unless a test says otherwise; a busy machine's pauses are no hang."""
TOLD = [sys.executable, "-S", str(ROOT / "tests" / "hook" / "memory" / "programs" / "memory_program.py")]
"""A program that does what it is told, a line at a time."""
METER = [
    sys.executable,
    "-c",
    """
import sys, pynvml
pynvml.nvmlInit()
for card in sys.stdin:
    print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(int(card))).used, flush=True)
""",
]
"""Says how much memory of a card is used, whenever it is asked."""
CLIENT_VARIABLES = ("LD_PRELOAD", "NVSHARE_ENABLE", "NVSHARE_SOCKET", "NVSHARE_MEMORY", "NVSHARE_SIM_STATE")


class Told(JsonClient):
    """Such a program, which uses the GPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._pending = b""
        assert self.answer() == "ready"
        assert self.ask("start") == 0

    def filled(self, size: int, seed: int) -> int:
        """The address of memory that holds a pattern."""
        result, pointer = self.ask("alloc", size)
        assert result == 0
        assert self.ask("write", pointer, size, seed) == 0
        return int(pointer)


@dataclass
class Node:
    """One runtime directory and what runs in it."""

    directory: Path
    simulate: str
    coordinator: subprocess.Popen[bytes] | None = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    meter: subprocess.Popen[str] | None = None

    @property
    def state(self) -> Path:
        """The shared state of the simulated GPUs."""
        return self.directory / "simulated_gpu"

    def environment(self) -> dict[str, str]:
        """As a user's shell has it."""
        return {k: v for k, v in os.environ.items() if k not in CLIENT_VARIABLES} | {
            "NVSHARE_RUNTIME_DIR": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def start_coordinator(self, *options: str, variables: dict[str, str] | None = None) -> None:
        """Returns when it serves, in exclusive turns by default.  `variables` are for settings without an option."""
        command = [sys.executable, "-m", "nvshare.coordinator.daemon.main", f"--simulate={self.simulate}", *options]
        environment = self.environment() | SETTINGS | (variables or {})
        self.coordinator = serving(command, environment, self.directory / "coordinator.log")

    def kill_coordinator(self) -> None:
        """SIGKILL: it has no chance to say goodbye."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()
        self.coordinator = None

    def log(self, who: str = "coordinator") -> str:
        """Log of the coordinators, or of somebody else."""
        log = self.directory / f"{who}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def run(
        self, command: Sequence[str], *options: str, variables: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A program under the hook; `options` are nvshare-run's."""
        line = [sys.executable, "-m", "nvshare.coordinator.cli.run", f"--simulate={self.simulate}", *options, "--"]
        return self._start([*line, *command], self.environment() | (variables or {}))

    def told(self, *options: str, **variables: str) -> Told:
        """A program under the hook that does what it is told."""
        return Told(self.run(TOLD, *options, variables=variables))

    def run_plain(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """The same program on the same GPUs without the hook."""
        return self._start(command, simulated_environment(self.state, self.simulate, self.environment()))

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment, cwd=self.directory, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self.started.append(process)
        return process

    def control(self, *words: str) -> Any:
        """One nvshare-ctl command that must succeed; its JSON."""
        done = ctl(self.directory, *words, "--json")
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
        return json.loads(done.stdout) if done.stdout.strip() else None

    def follow_events(self) -> None:
        """Gathers `nvshare-ctl events` in `events` from some moment after this call."""
        command = [sys.executable, "-m", "nvshare.coordinator.cli.ctl", "events", "--json"]
        process = self._start(command, self.environment())
        assert process.stdout is not None
        stream = process.stdout

        def gather() -> None:
            for line in stream:
                if line.strip():
                    self.events.append(json.loads(line))

        threading.Thread(target=gather, daemon=True).start()

    def charged_bytes(self, card: int = 0) -> int:
        """Used memory of a card, by its NVML."""
        if self.meter is None:
            self.meter = self.run_plain(METER)
        assert self.meter.stdin is not None
        assert self.meter.stdout is not None
        self.meter.stdin.write(f"{card}\n")
        self.meter.stdin.flush()
        return int(self.meter.stdout.readline())

    def trace(self) -> list[Busy]:
        """Work that ran on the GPUs so far."""
        return list(read_trace(self.state)) if self.state.exists() else []

    def await_work(self, process_id: int, after_ns: int = 0) -> None:
        """Until this process has done work on a GPU that began after a time."""
        seen = 0

        def worked() -> bool:
            nonlocal seen
            if not self.state.exists():
                return False
            since, seen = seen, max(0, trace_length(self.state) - 64)  # the last may be in the middle of being written
            new = read_trace(self.state, since)
            return any(busy.process_id == process_id and busy.start_ns > after_ns for busy in new)

        eventually(worked, f"work of process {process_id} on the GPU\n{self.log()}")

    def await_handovers(self, count: int) -> None:
        """Until the lease of the first GPU has gone from one program to another so many times."""
        eventually(lambda: self.control("status")["gpus"][0]["handovers"] >= count, f"{count} hand-overs\n{self.log()}")

    def end_programs(self) -> None:
        """Kills what runs under the coordinator or beside it."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.started.clear()
        self.meter = None

    def close(self) -> None:
        """Ends everything."""
        self.end_programs()
        if self.coordinator is not None:
            self.coordinator.terminate()
            try:
                self.coordinator.wait(10)
            except subprocess.TimeoutExpired:
                self.coordinator.kill()
                self.coordinator.wait()
        stop_embedded(self.directory)


def stop_embedded(directory: Path) -> None:
    """Ends a coordinator that a client has started, which is nobody's child."""
    embedded = RuntimeDir(directory).coordinator_pid()
    if embedded is not None:
        watch = os.pidfd_open(embedded)
        os.kill(embedded, signal.SIGTERM)
        select.select([watch], [], [], 20)
        os.close(watch)


def stop(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Has a saturating program that has begun to work end before its time, in order; what it tells.

    Tests start such programs for longer than they take, and end them when they have seen what they came for.
    """
    process.send_signal(signal.SIGTERM)
    return finish(process)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a program that must succeed; its last line as JSON."""
    out, errors = process.communicate()
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{errors}"
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1]) if out.strip() else {}
    return found


def until_evicted(node: Node, attempt: Callable[[], object]) -> dict[str, Any]:
    """Repeats what two programs do until each has moved the other away; the GPU's figures.

    On a busy machine one program may be through before the other begins.
    """
    for _ in range(20):
        attempt()
        gpu: dict[str, Any] = node.control("status")["gpus"][0]
        if gpu["evict_orders"] > 1 and gpu["evicted_bytes"] > 0:
            return gpu
    pytest.fail(f"they never met: {gpu}")


@contextlib.contextmanager
def new_node(simulate: str = "1x4GiB") -> Iterator[Node]:
    """A node that leaves nothing.  The path is short: sockets must fit into it."""
    made = Node(Path(tempfile.mkdtemp(prefix="nvs-")), simulate)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(made.directory, ignore_errors=True)


@pytest.fixture
def node(built: Built, request: pytest.FixtureRequest) -> Iterator[Node]:
    """One simulated GPU, or what the test's parameter says."""
    with new_node(getattr(request, "param", "1x4GiB")) as made:
        yield made
