"""The node that nvshare.bench.chaos disturbs: a coordinator that can be killed, jobs under the hook, and two witnesses.

The witnesses are the coordinator's event stream, which names clients that are gone, and the trace of the simulated
GPUs, which shows kernels of two processes at the same time.

Invariants: all processes are real and end with the node; jobs are started by `nvshare-run`, as a user starts them.

Non-goals: what is disturbed and when (chaos.py).
"""

from __future__ import annotations

import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture
from nvshare.bench.harness.worker_group import Member
from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import EventReader, NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.system.temporary_coordinator import end, start_coordinator
from nvshare.simulated_gpu.trace import Busy, read_trace, trace_length

START_S = 60.0
MAX_CLIENTS = 64
"""Connections of the coordinator, few enough to run out."""
LATE_NS = 10_000_000_000
"""A record of the trace is written when its work ends: at most this long after the work began (a stopped process)."""
WORK = ("kernel", "graph")


@dataclass(slots=True)
class Job:
    """One program under the hook that fills and checks its memory in every step."""

    name: str
    memory: str
    member: Member
    started: float
    asked: bool = False
    """Chaos has asked it to end."""


@dataclass(slots=True)
class Trace:
    """Reads the trace of the simulated GPUs piece by piece and looks for overlaps of two processes."""

    state: Path
    double_holds: list[str] = field(default_factory=list)
    kernels: int = 0
    last_work: dict[int, int] = field(default_factory=dict)
    """Process -> when its newest kernel began."""
    _since: int = 0
    _pending: list[Busy] = field(default_factory=list)
    _busy_until: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    def read(self, *, all_of_it: bool = False) -> None:
        """Takes in what was written since the last call; judges what can get no earlier neighbours any more."""
        following = trace_length(self.state)
        fresh = [busy for busy in read_trace(self.state, self._since) if busy.kind in WORK]
        self._since = following
        for busy in fresh:
            self.last_work[busy.process_id] = max(self.last_work.get(busy.process_id, 0), busy.start_ns)
        self._pending = sorted([*self._pending, *fresh], key=lambda busy: busy.start_ns)
        until = time.monotonic_ns() - (0 if all_of_it else LATE_NS)
        ripe = [busy for busy in self._pending if busy.start_ns <= until]
        del self._pending[: len(ripe)]
        self.judge(ripe)

    def judge(self, ripe: Iterable[Busy]) -> None:
        """Work in the order of its starts: notes the overlaps of two processes on a GPU."""
        for busy in ripe:
            self.kernels += 1
            ends = self._busy_until[busy.gpu]
            for process_id, end_ns in ends.items():
                if process_id != busy.process_id and end_ns > busy.start_ns and busy.end_ns > busy.start_ns:
                    over_ns = min(end_ns, busy.end_ns) - busy.start_ns
                    self.double_holds.append(f"{process_id} and {busy.process_id}: {over_ns} ns at {busy.start_ns}")
            ends[busy.process_id] = max(ends.get(busy.process_id, 0), busy.end_ns)


class Node:
    """One runtime directory on one simulated GPU."""

    def __init__(self, directory: Path, simulate: str, quantum: str) -> None:
        self.runtime = RuntimeDir(directory)
        self.stand = Fixture(directory, simulate)
        self.jobs: list[Job] = []
        self.trace = Trace(directory / "simulated_gpu")
        self.gone_ns: dict[str, int] = {}
        self._quantum = quantum
        self._log = directory / "coordinator.log"
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._witness = threading.Thread(target=self._follow, daemon=True)

    # The coordinator

    @property
    def coordinator(self) -> subprocess.Popen[bytes]:
        assert self._coordinator is not None
        return self._coordinator

    def start_coordinator(self) -> None:
        """Returns when it serves.  Raises BenchError with its words."""
        options = [f"--simulate={self.stand.simulate}", "--sharing=exclusive", "--policy=round_robin"]
        options += ["--quantum", self._quantum, f"--max-clients={MAX_CLIENTS}"]
        try:
            self._coordinator = start_coordinator(self.runtime.path, options, log=self._log)
        except LaunchError as error:
            raise BenchError(str(error)) from None
        if not self._witness.is_alive():
            self._witness.start()

    def words(self) -> str:
        """The end of the coordinators' log."""
        return self._log.read_text(errors="replace")[-2000:]

    def limit_coordinator(self, what: int, value: int) -> None:
        """Sets the soft limit of a resource (RLIMIT_...) of the running coordinator; -1 puts the hard limit back."""
        pid = self.coordinator.pid
        hard = resource.prlimit(pid, what)[1]
        resource.prlimit(pid, what, (hard if value < 0 else value, hard))

    def status(self) -> dict[str, Any]:
        """Status from nvshare-ctl; empty when the coordinator does not answer."""
        try:
            found: dict[str, Any] = call(self.runtime, api.Status())
        except (ControlError, NoCoordinatorError):
            return {}
        return found

    def moving(self) -> bool:
        """Whether memory moves for a hand-over now."""
        found = self.status()
        return bool(found) and bool(found["gpus"][0]["moving"])

    def served(self) -> set[str]:
        """The names of the clients that have a GPU of this coordinator."""
        return {client["name"] for client in self.status().get("clients", ()) if client["seats"]}

    # Jobs

    def start_job(self, name: str, memory: str, mib: int) -> None:
        """Under the hook; returns when nvshare-run has become the program."""
        command = [sys.executable, "-m", "nvshare.bench.workloads.resident", f"--mib={mib}", "--steps=1000000000"]
        options = [f"--memory={memory}"]
        member = Member(self.stand, [*command, "--step-ms=2"], hooked=True, name=name, options=options)
        with suppress(BenchError):
            member.tell("go")
        self.jobs.append(Job(name, memory, member, time.monotonic()))
        give_up_at = time.monotonic() + START_S
        while member.alive and not _has_become(member.pid):
            if time.monotonic() > give_up_at:
                raise member.failure("does not start")
            select.select([], [], [], 0.005)

    def close(self) -> None:
        """Ends everything."""
        self._ended.set()
        for job in self.jobs:
            job.member.kill()
        if self._coordinator is not None:
            with suppress(ProcessLookupError):
                self._coordinator.send_signal(signal.SIGCONT)
            end(self._coordinator)
        if self._witness.is_alive():
            self._witness.join()

    def _follow(self) -> None:
        while not self._ended.is_set():
            reader = EventReader(self.runtime.events_socket)
            for frame in reader.frames(500):
                event = api.decode_event(frame)
                if event["kind"] == "gone":
                    self.gone_ns[event["name"]] = event["at_ns"]
                if self._ended.is_set():
                    break
            reader.close()


def _has_become(pid: int) -> bool:
    """Whether nvshare-run has become its program; the line is empty for a moment in each exec."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return line != b"" and b"nvshare.coordinator.cli.run" not in line
    return False
