"""Mixes under ways of sharing: rates alone first, then each way with its own programs.

The programs of a way are started once, warmed up, told when to run, and replaced when they fail.

Programs that are not in the mix that is measured wait for their input; they submit nothing.

Invariants: every wait has a limit; a program that died, hangs or answers nonsense is a BenchError with the end of its
standard error, and the next mix that needs it gets a new one; nothing outlives the block.

Non-goals: which mixes and ways there are (mixes.py), the arithmetic (figures.py).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture, coordinator, uncoordinated
from nvshare.bench.harness.worker_group import Member
from nvshare.bench.pairs.figures import compare, describe, rounded
from nvshare.bench.pairs.mixes import WAYS, Job, Mix, Way, needed, without_variables
from nvshare.coordinator.system.mps.daemon import ControlDaemon, DaemonError

READY_S = 120.0
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
    answer_s: float = 30.0
    """After the end of the window: a step that was under way, in its turn."""


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

    def run(self, mix: Mix) -> tuple[list[dict[str, Any]], Any]:
        """The answers of the mix's programs, and what the coordinator explained in the middle of the window."""
        return self._window(self._take(mix), self.plan.seconds, explains=self.way.coordinator is not None)

    def run_alone(self, job: Job, number: int) -> dict[str, Any]:
        """The answer of one program while all others wait."""
        member = self._take(Mix(job.workload, (job,) * (number + 1)))[number]
        return self._window([member], min(ALONE_S, self.plan.seconds), explains=False)[0][0]

    def _window(
        self, members: Sequence[Member], seconds: float, *, explains: bool
    ) -> tuple[list[dict[str, Any]], Any]:
        begin = time.monotonic() + (self.plan.settle_s if self.way.learns else UNLEARNED_LEAD_S)
        end = begin + seconds
        try:
            for member in members:
                member.tell(f"window {begin:.6f} {end:.6f}")
            told = None
            if explains:
                time.sleep(max(0.0, begin + seconds / 2 - time.monotonic()))
                told = self.stand.control("explain")
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
        told = _object(member, READY_S)
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
        if programs.daemon is not None and not _clients(programs.daemon):
            raise BenchError("no program is a client of MPS")
    except DaemonError as error:
        raise BenchError(str(error)) from None
    if programs.way.own_mps:
        found = programs.stand.control("status")["mps"]
        if not found["programs"]:
            raise BenchError(f"no program is a client of MPS: {found['reason'] or found['state']}")


def _clients(daemon: ControlDaemon) -> list[str]:
    """Process ids.  Raises DaemonError."""
    servers = daemon.command("get_server_list").split()
    return [pid for server in servers for pid in daemon.command(f"get_client_list {server}").split()]


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
        daemon.quit(wait=True)
        daemon.forget()


def measure_all(mixes: Sequence[Mix], ways: Sequence[Way], plan: Plan) -> dict[str, Any]:
    """`alone` by workload, `ways` with what each said or why it was left out, `pairs` by mix and way."""
    result: dict[str, Any] = {"alone": {}, "ways": {}, "pairs": {one.name: {} for one in mixes}, "versions": {}}
    plain = without_variables(mixes)
    with sharing(WAYS["native"], plan) as programs:
        programs.start(needed(plain))
        result["alone"] = alone(programs, plain)
        result["versions"] = programs.versions
        if any(way.name == "native" for way in ways):
            result["ways"]["native"] = _run_way(programs, plain, result)
    for way in (way for way in ways if way.name != "native"):
        try:
            with sharing(way, plan) as programs:
                own = plain if way.coordinator is None else mixes
                programs.start(needed(own))
                check_clients(programs)
                result["ways"][way.name] = _run_way(programs, own, result)
        except (BenchError, subprocess.TimeoutExpired) as error:
            plan.tell(f"{way.name}: {error}")
            result["ways"][way.name] = {"skipped": str(error)}
    for cases in result["pairs"].values():
        compare(cases, ways)
    return result


def alone(programs: Programs, mixes: Sequence[Mix]) -> dict[str, dict[str, Any]]:
    """Each program by itself without the hook: the mean of a workload's programs, and what each had."""
    found: dict[str, dict[str, Any]] = {}
    for job, count in needed(mixes).items():
        try:
            answers = [programs.run_alone(job, number) for number in range(count)]
        except BenchError as error:
            programs.plan.tell(f"alone: {error}")
            found[job.workload] = {"failed": str(error)}
            continue
        rates = [float(answer["rate"]) for answer in answers]
        found[job.workload] = {"rate": mean(rates), "rates": [round(rate, 2) for rate in rates]}
        if "latency_ms" in answers[0]:
            found[job.workload]["latency_ms"] = rounded(answers[0]["latency_ms"])
        programs.plan.tell(f"alone {job.workload}: {found[job.workload]}")
    return found


def _run_way(programs: Programs, mixes: Sequence[Mix], result: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in the figures of one way; its record."""
    name = programs.way.name
    for one in mixes:
        result["pairs"][one.name][name] = case = _run_mix(programs, one, result["alone"])
        programs.plan.tell(f"{name} {one.name}: {case}")
    return {}


def _run_mix(programs: Programs, one: Mix, before: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    for job in one.jobs:
        if not before[job.workload].get("rate"):
            return {"failed": f"{job.workload} alone: {before[job.workload].get('failed', 'no step')}"}
    if time.monotonic() > programs.plan.deadline:
        return {"failed": "no time left"}
    try:
        answers, said = programs.run(one)
    except (BenchError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)}
    case = describe(one, answers, before)
    return case | ({"explain": said} if said is not None else {})
