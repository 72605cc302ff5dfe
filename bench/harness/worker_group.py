"""Programs that compute and run on request, without the hook and under it, and how the two are compared.

The protocol is one line on a program's standard input, one JSON object on its standard output:

    (start)           -> {"ready": true, "versions": {...}}    CUDA has not been touched yet
    check NAME        -> {"digest": ..., "values": [...], "tolerance": ...} or {"skipped": why} or {"error": why}
    time NAME STEPS   -> {"ns": ...}    so many steps, the last one done on the GPU

A program ends with its input.  Other lines on its output are skipped: frameworks talk.

Invariants: every wait has a limit, and none goes past the deadline of the whole run; a program that dies or is silent
is a BenchError that quotes its last words.

Non-goals: which programs there are, what a verdict means.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture

QUOTE_CHARACTERS = 300


class OutOfTime(BenchError):  # noqa: N818 - it is no failure of anything
    """The time for everything is used up."""


class Member:
    """One running program."""

    def __init__(
        self,
        stand: Fixture,
        command: Sequence[str],
        *,
        hooked: bool,
        name: str,
        options: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        deadline: float | None = None,
        own_group: bool = False,
    ) -> None:
        self.name = name
        self._own_group = own_group
        self._deadline = deadline
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = stand.start(
            command,
            hooked=hooked,
            name=name,
            options=options,
            extra=extra,
            stdin=subprocess.PIPE,
            errors=self._errors.fileno(),
            own_group=own_group,
        )
        self._pending = b""

    @property
    def pid(self) -> int:
        """Process id of the program itself: nvshare-run becomes it."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Sends one request; the answer is fetched with `answer`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next JSON object.  Raises BenchError, and OutOfTime when the whole run has no time left."""
        limit = time.monotonic() + timeout_s
        end = limit if self._deadline is None else min(limit, self._deadline)
        while True:
            line, found, self._pending = self._pending.partition(b"\n")
            if not found:
                self._pending = line + self._more(end, timeout_s)
            elif line.startswith(b"{"):
                told: dict[str, Any] = json.loads(line)
                return told

    def ask(self, line: str, timeout_s: float) -> dict[str, Any]:
        """One request and its answer."""
        self.tell(line)
        return self.answer(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end_input(self) -> None:
        """Lets the program end, without waiting for it; `close` follows."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, timeout_s: float = 10.0) -> int:
        """Ends the program; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            self._end()  # it has ended, or will not read any more
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._end()
            self._process.wait()
        if self._own_group:
            self._end()  # what it started
        self._process.stdout.close()
        self._errors.close()
        return self._process.returncode

    def kill(self) -> None:
        """Ends a program that cannot be trusted to end by itself."""
        self._end()
        self.close()

    def _end(self) -> None:
        if not self._own_group:
            self._process.kill()
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _more(self, end: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise OutOfTime(f"{self.name}: no time left")
            raise self._failure(f"silent for {timeout_s:.0f} s")
        if chunk := os.read(descriptor, 1 << 16):
            return chunk
        raise self._failure(f"ended with exit code {self._process.wait()}")

    def _failure(self, what: str) -> BenchError:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = " | ".join(lines[-3:])[-QUOTE_CHARACTERS:]
        return BenchError(f"{self.name}: {what}" + (f": {last}" if last else ""))


@contextmanager
def closing(members: Sequence[Member]) -> Iterator[None]:
    """Ends them after the block: in order, or at once when it failed."""
    try:
        yield
    except BaseException:
        for member in members:
            member.kill()
        raise
    for member in members:
        member.close()


def nanoseconds(member: Member, line: str, timeout_s: float) -> int:
    """Nanoseconds that a timed request took.  Raises BenchError with the program's own reason."""
    told = member.ask(line, timeout_s)
    if "ns" not in told:
        raise BenchError(f"{member.name}: {line}: {told.get('error') or told.get('skipped') or told}")
    return int(told["ns"])


def steps_for(member: Member, name: str, seconds: float, timeout_s: float) -> int:
    """Number of steps that take about this time; also warms up."""
    nanoseconds(member, f"time {name} 3", timeout_s)  # compiles, fills pools and caches
    steps = 1
    while True:
        taken_s = nanoseconds(member, f"time {name} {steps}", timeout_s) / 1e9
        if taken_s >= seconds / 4:
            return max(1, round(steps * seconds / taken_s))
        steps = max(steps + 1, round(steps * min(10.0, seconds / max(taken_s, 1e-6))))


def reserve_core() -> int | None:
    """Takes a processor from this process and all that it starts from now on, for the programs that are being timed.

    None on a machine with less than four: there everything stays where it is.
    """
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 4:
        return None
    os.sched_setaffinity(0, ours[:-1])
    return ours[-1]


@contextmanager
def pinned(members: Sequence[Member], core: int | None) -> Iterator[None]:
    """Their main threads on that processor for the length of the block."""
    if core is None:
        yield
        return

    def put(processors: set[int]) -> None:
        for member in members:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(member.pid, processors)

    elsewhere = os.sched_getaffinity(0)
    try:
        put({core})
        yield
    finally:
        put(elsewhere)


def quiet(samples: Sequence[float]) -> float:
    """The mean of the quietest quarter: disturbances only ever add, and a single minimum is luck."""
    ordered = sorted(samples)
    best = ordered[: max(1, -(-len(ordered) // 4))]
    return sum(best) / len(best)


def figures(plain: Sequence[Sequence[float]], hooked: Sequence[Sequence[float]]) -> dict[str, Any]:
    """From nanoseconds a step, a list a process: what the hook costs, how sure that is, how much likes differ.

    Each kind is represented by its quickest process.  `slowdown_min` and `slowdown_max` bound 95 % of what the same
    comparison gives when its samples are drawn anew from those measured.  `alike`: the most by which two processes of
    the same kind differ, None with one of each.
    """

    def ratio(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
        return min(map(quiet, other)) / min(map(quiet, one)) - 1

    def again(kind: Sequence[Sequence[float]]) -> list[list[float]]:
        return [chance.choices(samples, k=len(samples)) for samples in kind]

    chance = random.Random(1)
    drawn = sorted(ratio(again(plain), again(hooked)) for _ in range(200))
    middle = ratio(plain, hooked)
    found: dict[str, Any] = {
        "plain_steps_per_s": round(1e9 / min(map(quiet, plain)), 2),
        "hooked_steps_per_s": round(1e9 / min(map(quiet, hooked)), 2),
        "slowdown": round(middle, 5),
        "slowdown_min": round(drawn[4], 5),
        "slowdown_max": round(drawn[-5], 5),
        "share": round(1 / (1 + middle), 5),
        "share_of_medians": round(min(map(statistics.median, plain)) / min(map(statistics.median, hooked)), 5),
        "alike": None,
    }
    if len(plain) > 1:
        spreads = [max(map(quiet, kind)) / min(map(quiet, kind)) - 1 for kind in (plain, hooked)]
        found["alike"] = round(max(spreads), 5)
    return found


def slowdown(
    plain: Sequence[Member],
    hooked: Sequence[Member],
    name: str,
    *,
    seconds: float,
    core: int | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """The same number of steps without the hook and under it, in many short turns on one processor: see figures().

    `seconds`: of measuring, all turns together.  As many of the one as of the other.
    """
    steps = steps_for(plain[0], name, 0.01, timeout_s)
    turns = [member for pair in zip(plain, hooked, strict=True) for member in pair]
    taken: dict[str, list[float]] = {member.name: [] for member in turns}
    with pinned(turns, core):
        for member in turns:  # all at once: whatever is compiled or set up when it is first needed
            member.tell(f"time {name} {max(3, steps)}")
        for member in turns:
            member.answer(timeout_s)
        begin = time.monotonic()
        for member in turns:
            member.ask(f"time {name} {steps}", timeout_s)
        rounds = max(4, round(seconds / max(time.monotonic() - begin, 1e-3)))
        for number in range(rounds):
            for member in turns if number % 2 == 0 else reversed(turns):
                taken[member.name].append(nanoseconds(member, f"time {name} {steps}", timeout_s) / steps)
    told: dict[str, Any] = {"steps": steps, "rounds": rounds, "processes": len(plain), "pinned": core is not None}
    return told | figures([taken[one.name] for one in plain], [taken[one.name] for one in hooked])
