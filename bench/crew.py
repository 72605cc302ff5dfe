"""Programs that compute and run on request, without the hook and under it, and how the two are compared.

The protocol is one line on a program's standard input, one JSON object on its standard output:

    (start)           -> {"ready": true, "versions": {...}}    CUDA has not been touched yet
    check NAME        -> {"digest": ..., "values": [...], "tolerance": ...} or {"skipped": why} or {"error": why}
    time NAME STEPS   -> {"ns": ...}    so many steps, the last one done on the GPU

A program ends with its input.  Other lines on its output are skipped: frameworks talk.

Invariants: every wait has a limit, and none goes past the deadline of the whole run; a program that dies or is silent
is a BenchError that quotes its last words.

May not go here: which programs there are, what a verdict means.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bench.rig import BenchError, Rig

QUOTE_CHARACTERS = 300


class OutOfTime(BenchError):  # noqa: N818 - it is no failure of anything
    """The time for everything is used up."""


class Member:
    """One running program."""

    def __init__(
        self,
        stand: Rig,
        command: Sequence[str],
        *,
        hooked: bool,
        name: str,
        options: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> None:
        self.name = name
        self._deadline = deadline
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = stand.start(
            command, hooked=hooked, name=name, options=options, extra=extra,
            stdin=subprocess.PIPE, errors=self._errors.fileno(),
        )
        self._pending = b""

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

    def close(self, timeout_s: float = 10.0) -> int:
        """Ends the program; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            self._process.kill()  # it has ended, or will not read any more
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        return self._process.returncode

    def kill(self) -> None:
        """Ends a program that cannot be trusted to end by itself."""
        self._process.kill()
        self.close()

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


def steps_for(member: Member, name: str, seconds: float, timeout_s: float) -> int:
    """How many steps take about so long; also warms up."""
    member.ask(f"time {name} 3", timeout_s)  # compiles, fills pools and caches
    steps = 1
    while True:
        taken_s = int(member.ask(f"time {name} {steps}", timeout_s)["ns"]) / 1e9
        if taken_s >= seconds / 4:
            return max(1, round(steps * seconds / taken_s))
        steps = max(steps + 1, round(steps * min(10.0, seconds / max(taken_s, 1e-6))))


def slowdown(
    plain: Member, hooked: Member, name: str, *, seconds: float, pairs: int, timeout_s: float = 60.0
) -> dict[str, Any]:
    """The same number of steps without the hook and under it, in turns, the order swapped each time.

    `slowdown` is the median over the pairs of hooked time / plain time - 1; `share` the hooked share of the speed.
    """
    steps = steps_for(plain, name, seconds, timeout_s)
    hooked.ask(f"time {name} {max(3, steps // 4)}", timeout_s)
    taken: dict[str, list[int]] = {"plain": [], "hooked": []}
    for pair in range(pairs):
        order = (("plain", plain), ("hooked", hooked))
        for kind, member in order if pair % 2 == 0 else reversed(order):
            taken[kind].append(int(member.ask(f"time {name} {steps}", timeout_s)["ns"]))
    ratios = [with_hook / without for without, with_hook in zip(taken["plain"], taken["hooked"], strict=True)]
    return {
        "steps": steps,
        "pairs": pairs,
        "plain_steps_per_s": round(steps / statistics.median(taken["plain"]) * 1e9, 2),
        "hooked_steps_per_s": round(steps / statistics.median(taken["hooked"]) * 1e9, 2),
        "slowdown": round(statistics.median(ratios) - 1, 5),
        "slowdown_min": round(min(ratios) - 1, 5),
        "slowdown_max": round(max(ratios) - 1, 5),
        "share": round(1 / statistics.median(ratios), 5),
        "share_of_quietest": round(min(taken["plain"]) / min(taken["hooked"]), 5),
    }
