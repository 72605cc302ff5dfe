"""The programs of one way of sharing: started once, warmed up, told when to run, replaced when they fail.

Programs that are not in the mix that is measured wait for their input; they submit nothing.

Invariants: every wait has a limit; a program that died, hangs or answers nonsense is a BenchError with the end of its
standard error, and the next mix that needs it gets a new one; nothing outlives the block.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture, coordinator, uncoordinated
from nvshare.bench.harness.worker_group import Member
from nvshare.bench.pairs.mixes import Job, Mix, Way
from nvshare.coordinator.system.mps.daemon import ControlDaemon, DaemonError

READY_S = 120.0
ANSWER_S = 30.0
"""After the end of the window: a step that was under way, in its turn."""
UNLEARNED_LEAD_S = 0.6
"""From the command to the window where no policy has to settle: all programs work by then."""

ALONE_S = 4.0
"""Longest window of a program by itself."""

Command = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of all measurements."""

    command: Command
    """The program of a workload."""
    simulate: str | None
    seconds: float
    settle_s: float
    deadline: float
    """No measurement begins after this time of the monotonic clock."""
    tell: Callable[[str], None] = field(default=lambda line: None)
    ready_s: float = READY_S
    answer_s: float = ANSWER_S


@dataclass(slots=True)
class Programs:
    """The programs of one way.  `variables`: the environment of every program."""

    stand: Fixture
    way: Way
    plan: Plan
    variables: Mapping[str, str]
    daemon: ControlDaemon | None = None
    """The control daemon of MPS that runs for them."""
    versions: dict[str, str] = field(default_factory=dict)
    _running: dict[Job, list[Member]] = field(default_factory=dict)
    _failures: dict[Job, str] = field(default_factory=dict)

    def start(self, wanted: Counter[Job]) -> None:
        """Starts what is missing, all at once.  One that fails is not kept: its mixes say why."""
        self._discard([member for group in self._running.values() for member in group if not member.alive])
        started = [
            (job, self._start(job, number))
            for job, count in wanted.items()
            for number in range(len(self._running.get(job, ())), count)
        ]
        for job, member in started:
            try:
                self._await_ready(member)
            except BenchError as error:
                self.plan.tell(f"{self.way.name}: {error}")
                self._failures[job] = str(error)
                member.kill()
            else:
                self._running.setdefault(job, []).append(member)

    def run(self, mix: Mix, during: Callable[[], Any] | None = None) -> tuple[list[dict[str, Any]], Any]:
        """The answers of the mix's programs, and what `during` gave in the middle of the window."""
        return self._window(self._take(mix), self.plan.seconds, during)

    def run_alone(self, job: Job, number: int) -> dict[str, Any]:
        """The answer of one program while all others wait."""
        member = self._take(Mix(job.workload, (job,) * (number + 1)))[number]
        return self._window([member], min(ALONE_S, self.plan.seconds), None)[0][0]

    def _window(
        self, members: Sequence[Member], seconds: float, during: Callable[[], Any] | None
    ) -> tuple[list[dict[str, Any]], Any]:
        begin = time.monotonic() + (self.plan.settle_s if self.way.learns else UNLEARNED_LEAD_S)
        end = begin + seconds
        try:
            for member in members:
                member.tell(f"window {begin:.6f} {end:.6f}")
            told = None
            if during is not None:
                time.sleep(max(0.0, begin + seconds / 2 - time.monotonic()))
                told = during()
            return [self._answer(member, end) for member in members], told
        except BaseException:
            self._discard(members)
            raise

    def close(self) -> None:
        """Ends all programs: in order, because MPS suffers from clients that are killed."""
        members = [member for group in self._running.values() for member in group]
        self._running.clear()
        for member in members:
            member.end_input()
        for member in members:
            member.close()

    def _start(self, job: Job, number: int) -> Member:
        hooked = self.way.coordinator is not None
        variables = {**self.variables, **(dict(job.variables) if hooked else {})}
        name = f"{job.workload}-{number}"
        command = self.plan.command(job.workload)
        return Member(self.stand, command, hooked=hooked, name=name, extra=variables, own_group=True)

    def _await_ready(self, member: Member) -> None:
        told = _object(member, self.plan.ready_s)
        if not told.get("ready"):
            raise BenchError(f"{member.name}: not ready: {told}")
        self.versions.update(told.get("versions", {}))

    def _take(self, mix: Mix) -> list[Member]:
        wanted = Counter(mix.jobs)
        self.start(wanted)
        taken: list[Member] = []
        given: Counter[Job] = Counter()
        for job in mix.jobs:
            own = self._running.get(job, [])
            if given[job] >= len(own):
                raise BenchError(f"{job.workload} does not start: {self._failures.get(job, '')}")
            taken.append(own[given[job]])
            given[job] += 1
        return taken

    def _discard(self, members: Sequence[Member]) -> None:
        for group in self._running.values():
            group[:] = [member for member in group if member not in members]
        for member in members:
            member.kill()

    def _answer(self, member: Member, end: float) -> dict[str, Any]:
        told = _object(member, max(0.0, end - time.monotonic()) + self.plan.answer_s)
        if not isinstance(told.get("rate"), int | float) or told["rate"] < 0:
            raise BenchError(f"{member.name}: no rate in {told}")
        return told


def _object(member: Member, timeout_s: float) -> dict[str, Any]:
    try:
        return member.answer(timeout_s)
    except ValueError as error:
        raise BenchError(f"{member.name}: its answer is no JSON: {error}") from None


@contextmanager
def sharing(way: Way, plan: Plan) -> Iterator[Programs]:
    """The means of a way, and its programs, for the length of the block.  Raises BenchError if it is not to be had."""
    with uncoordinated(simulate=plan.simulate) as stand, ExitStack() as stack:
        daemon = stack.enter_context(control_daemon(stand.directory / "mps")) if way.daemon else None
        pipe_directory = stand.directory / "no-mps" if daemon is None else daemon.pipe_directory
        variables = {} if way.own_mps else {"CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory)}
        if way.coordinator is not None:
            stack.enter_context(coordinator(stand, way.coordinator))
        programs = Programs(stand, way, plan, variables, daemon)
        stack.callback(programs.close)
        yield programs


def check_clients(programs: Programs) -> None:
    """Raises BenchError if the way is one with MPS and the programs are no clients of its daemon."""
    try:
        if programs.daemon is not None and programs.daemon.clients() == 0:
            raise BenchError("no program is a client of MPS")
    except DaemonError as error:
        raise BenchError(str(error)) from None
    if programs.way.own_mps:
        found = programs.stand.control("status")["mps"]
        if not found["programs"]:
            raise BenchError(f"no program is a client of MPS: {found['reason'] or found['state']}")


@contextmanager
def control_daemon(directory: Path) -> Iterator[ControlDaemon]:
    """MPS with directories of its own, as the coordinator starts it, for the length of the block."""
    daemon = ControlDaemon(directory, os.environ, real_cards=True)
    try:
        daemon.start(os.geteuid())
    except DaemonError as error:
        raise BenchError(str(error)) from None
    try:
        yield daemon
    finally:
        daemon.stop()
