"""Disturbs a node of real processes at random moments: `python -m nvshare.bench.chaos --minutes N --json`.

Jobs under the hook fill and check their memory in all memory modes on one simulated GPU that is too small for all of
them.  Meanwhile the coordinator and the jobs are killed and stopped, also while memory moves; the coordinator's files
cannot grow, its connections run out, readers do not read, and a peer floods it.  The coordinator is started again after
each kill, as a service manager does.

JSON: `coordinator_kills`, `client_kills`, `stops`; `app_failures` (jobs that ended by themselves or did no work for a
minute), `double_holds` (kernels of two processes at the same time, by the trace of the simulated GPU),
`data_mismatches` (pages); `recovery_ms`: `client` from SIGKILL to the coordinator's event that the client is gone,
`coordinator` from SIGKILL until a new one, which has to start, serves all programs that the old one served;
`seed` replays the same choices (the moments differ).  Exit code 1 if anything failed.

Non-goals: the core's decisions in virtual time (soak.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from nvshare.bench.harness.command import parser_for, run_benchmark
from nvshare.bench.harness.fixture import BenchError, Fixture, percentile
from nvshare.bench.harness.worker_group import Member
from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import EventReader, NoCoordinatorError
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.system.temporary_coordinator import end, start_coordinator
from nvshare.simulated_gpu.trace import Busy, read_trace, trace_length

CARD = "1x96MiB"
JOBS = (("swap", 40), ("managed", 40), ("swap", 28), ("managed", 28), ("device", 8))
"""Memory mode and MiB of each job; together more than the card has."""
IDLE_S = 60.0
"""A job that is not stopped and does no work for so long has failed."""
END_S = 120.0
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


def pause(seconds: float) -> None:
    """Lets the node work."""
    select.select([], [], [], seconds)


@dataclass(slots=True)
class Chaos:
    """One run: what was done to the node and what came of it."""

    node: Node
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    mismatches: int = 0
    kills: list[tuple[str, int]] = field(default_factory=list)
    """(name, when) of each job that was killed while the coordinator served."""
    recoveries_ms: list[float] = field(default_factory=list)
    _started: int = 0

    def run(self, seconds: float, most: int | None = None) -> None:
        """Disturbs the node for so long, at most `most` times, then ends the jobs in order."""
        ways: dict[Callable[[], None], int] = {
            self.kill_coordinator: 30, self.stop_coordinator: 5, self.kill_job: 50, self.end_job: 12, self.stop_job: 12,
            self.files_cannot_grow: 3, self.crowd: 3, self.slow_reader: 3, self.flood: 3,
        }  # fmt: skip
        self.node.start_coordinator()
        for memory, mib in JOBS:
            self._start(memory, mib)
        end = time.monotonic() + seconds
        rounds = itertools.count() if most is None else range(most)
        for _ in itertools.takewhile(lambda _: time.monotonic() < end, rounds):
            pause(self.chance.uniform(0.02, 0.3))
            self.chance.choices(list(ways), list(ways.values()))[0]()
            self._look()
        for job in list(self.node.jobs):
            self._end(job)
        self.node.trace.read(all_of_it=True)

    # What is done to the coordinator

    def kill_coordinator(self) -> None:
        """SIGKILL, every second time while memory moves; a new one is started at once."""
        served = self.node.served()
        if self.chance.random() < 0.5:
            give_up_at = time.monotonic() + 0.5
            while not (moving := self.node.moving()) and time.monotonic() < give_up_at:
                pause(0.002)
            self.done["coordinator_kills_while_memory_moves"] += moving
        self.done["coordinator_kills"] += 1
        killed = time.monotonic()
        self.node.coordinator.kill()
        self.node.coordinator.wait()
        self.node.start_coordinator()
        while not served <= self.node.served():
            if time.monotonic() > killed + IDLE_S:
                self.failures.append(f"not served after a restart: {sorted(served - self.node.served())}")
                break
            pause(0.002)
        self.recoveries_ms.append((time.monotonic() - killed) * 1e3)

    def stop_coordinator(self) -> None:
        """SIGSTOP for a moment."""
        self.done["coordinator_stops"] += 1
        self.node.coordinator.send_signal(signal.SIGSTOP)
        pause(self.chance.uniform(0.05, 1.5))
        self.node.coordinator.send_signal(signal.SIGCONT)

    def files_cannot_grow(self) -> None:
        """Limits the size of files, as a full disk does."""
        self.done["files_that_cannot_grow"] += 1
        self.node.limit_coordinator(resource.RLIMIT_FSIZE, 0)
        pause(self.chance.uniform(0.1, 1.0))
        self.node.limit_coordinator(resource.RLIMIT_FSIZE, -1)

    def crowd(self) -> None:
        """More connections than the coordinator takes; each stays silent."""
        self.done["crowds"] += 1
        with ExitStack() as stack:
            for _ in range(4 * MAX_CLIENTS):
                peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                with suppress(BlockingIOError, ConnectionError):
                    peer.connect(str(self.node.runtime.hooks_socket))
            pause(self.chance.uniform(0.1, 1.0))

    def slow_reader(self) -> None:
        """A client that asks much and reads nothing, and a subscriber that does not read."""
        self.done["slow_readers"] += 1
        with self._peer() as peer, zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.setsockopt(zmq.RCVHWM, 1)
            subscriber.connect(f"ipc://{self.node.runtime.events_socket}")
            self._hello(peer)
            for _ in range(2000):
                with suppress(zmq.Again):
                    peer.send(messages.encode(messages.Request(0)), zmq.NOBLOCK)
            pause(self.chance.uniform(0.1, 1.0))

    def flood(self) -> None:
        """Random bytes and true messages as fast as they go."""
        self.done["floods"] += 1
        end = time.monotonic() + self.chance.uniform(0.1, 0.5)
        while time.monotonic() < end:
            with self._peer() as peer:
                self._hello(peer)
                for _ in range(500):
                    bytes_ = self.chance.randbytes(self.chance.randrange(64))
                    with suppress(zmq.Again):
                        peer.send(self.chance.choice([bytes_, messages.encode(messages.Request(0))]), zmq.NOBLOCK)

    # What is done to the jobs

    def kill_job(self) -> None:
        """SIGKILL; another one takes its place."""
        job = self._any()
        self.done["client_kills"] += 1
        self.kills.append((job.name, time.monotonic_ns()))
        job.member.kill()
        self.node.jobs.remove(job)
        self._start_like(job)

    def end_job(self) -> None:
        """SIGTERM: it compares its memory and ends."""
        job = self._any()
        self.done["client_ends"] += 1
        self._end(job)
        self._start_like(job)

    def stop_job(self) -> None:
        """SIGSTOP for a moment."""
        job = self._any()
        self.done["client_stops"] += 1
        with suppress(ProcessLookupError):
            os.kill(job.member.pid, signal.SIGSTOP)
            pause(self.chance.uniform(0.05, 2.0))
            os.kill(job.member.pid, signal.SIGCONT)

    def _any(self) -> Job:
        return self.chance.choice(self.node.jobs)

    def _start_like(self, job: Job) -> None:
        mib = next(size for memory, size in JOBS if memory == job.memory)
        self._start(job.memory, mib)

    def _start(self, memory: str, mib: int) -> None:
        self._started += 1
        self.node.start_job(f"job-{self._started}", memory, mib)

    def _end(self, job: Job) -> None:
        job.asked = True
        with suppress(ProcessLookupError):
            os.kill(job.member.pid, signal.SIGTERM)
        self._settle(job)

    # What came of it

    def _look(self) -> None:
        """A coordinator and jobs that ended by themselves, and jobs that do not work."""
        if self.node.coordinator.poll() is not None:
            self.failures.append(f"the coordinator ended by itself: {self.node.words()}")
            self.node.start_coordinator()
        self.node.trace.read()
        now_ns = time.monotonic_ns()
        for job in list(self.node.jobs):
            if not job.member.alive:
                self._settle(job)
                self._start_like(job)
                continue
            worked_ns = self.node.trace.last_work.get(job.member.pid, int(job.started * 1e9))
            if now_ns - max(worked_ns, int(job.started * 1e9)) > IDLE_S * 1e9:
                self.failures.append(str(job.member.failure(f"{job.memory}: no work for {IDLE_S:.0f} s")))
                job.member.kill()
                self.node.jobs.remove(job)
                self._start_like(job)

    def _settle(self, job: Job) -> None:
        told, words = {}, ""
        try:
            told = job.member.answer(END_S)
        except BenchError as error:
            words = str(error)
        code = job.member.close()
        self.node.jobs.remove(job)
        self.mismatches += told.get("mismatches", 0)
        early = job.asked and not told and code == -signal.SIGTERM  # before the program had begun
        if code != 0 and not early and not told.get("mismatches"):
            self.failures.append(f"{job.name} ({job.memory}): exit code {code}: {words}")

    def result(self) -> dict[str, Any]:
        """The JSON object."""
        client = [(self.node.gone_ns[name] - at) / 1e6 for name, at in self.kills if name in self.node.gone_ns]
        return {
            "coordinator_kills": self.done["coordinator_kills"],
            "client_kills": self.done["client_kills"],
            "stops": self.done["coordinator_stops"] + self.done["client_stops"],
            "app_failures": len(self.failures),
            "double_holds": len(self.node.trace.double_holds),
            "data_mismatches": self.mismatches,
            "recovery_ms": {"client": _percentiles(client), "coordinator": _percentiles(self.recoveries_ms)},
            "details": {
                "disturbances": dict(sorted(self.done.items())),
                "programs": self._started,
                "kernels": self.node.trace.kernels,
                "failures": self.failures[:20],
                "overlaps": self.node.trace.double_holds[:20],
            },
        }

    # Peers

    def _peer(self) -> zmq.Socket[bytes]:
        peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDHWM, 1000)
        peer.connect(f"ipc://{self.node.runtime.hooks_socket}")
        return peer

    def _hello(self, peer: zmq.Socket[bytes]) -> None:
        hello = messages.Hello(messages.PROTOCOL_VERSION, "peer", "chaos", 0, 0)
        with suppress(zmq.Again):
            peer.send(messages.encode(hello), zmq.NOBLOCK)


def _percentiles(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    worst = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}
    return {**{name: round(value, 1) for name, value in worst.items()}, "samples": len(values)}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    sys.stderr.write(f"nvshare.bench.chaos: seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="nvs-chaos-", ignore_cleanup_errors=True) as directory:
        node = Node(Path(directory), CARD, options.quantum)
        try:
            chaos = Chaos(node, random.Random(seed))
            chaos.run(options.minutes * 60, options.disturbances)
        finally:
            node.close()
    return {**chaos.result(), "seed": seed, "minutes": options.minutes, "simulated": True}


def _fault(result: dict[str, Any]) -> str:
    bad = {name: result[name] for name in ("app_failures", "double_holds", "data_mismatches") if result[name]}
    return str(bad) if bad else ""


def main() -> int:
    """Command line."""
    parser = parser_for("chaos", "Kills, stops and floods a node", simulate=False)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument("--disturbances", type=int, metavar="N", help="end after so many (default: by time alone)")
    parser.add_argument("--seed", type=int, help="of the choices (default: a new one, which is printed)")
    parser.add_argument("--quantum", default="20ms", help="default 20ms")
    return run_benchmark(parser, _measure, lambda result: print(json.dumps(result, indent=2)), _fault)


if __name__ == "__main__":
    sys.exit(main())
