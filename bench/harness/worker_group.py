"""Programs that work on request: one line on standard input, one JSON object on standard output.

A program says when it is ready, and ends with its input.  Other lines on its output are skipped: frameworks talk.

Invariants: every wait has a limit; a program that dies or is silent is a BenchError that quotes its last words.

Non-goals: which programs there are, what they are asked.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture

QUOTE_CHARACTERS = 1000


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
        own_group: bool = False,
    ) -> None:
        self.name = name
        self._own_group = own_group
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = stand.start(
            command, hooked=hooked, name=name, options=options, extra=extra, stdin=subprocess.PIPE,
            errors=self._errors.fileno(), own_group=own_group,
        )  # fmt: skip
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
            raise self.failure("has ended") from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next JSON object.  Raises BenchError."""
        end = time.monotonic() + timeout_s
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

    def has_spoken(self) -> bool:
        """Whether it has written something, or ended."""
        assert self._process.stdout is not None
        return bool(self._pending or select.select([self._process.stdout], [], [], 0)[0])

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
            raise self.failure(f"silent for {timeout_s:.0f} s")
        if chunk := os.read(descriptor, 1 << 16):
            return chunk
        raise self.failure(f"ended with exit code {self._process.wait()}")

    def failure(self, what: str) -> BenchError:
        """An error that names the program and quotes its last words."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = " | ".join(lines[-8:])[-QUOTE_CHARACTERS:]
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
