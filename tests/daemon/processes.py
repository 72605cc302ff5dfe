"""Real coordinator processes on made-up GPUs, and scripted clients in place of hooks.

Invariants: every wait has a bound and a condition.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

import typer
import zmq

from nvshare.coordinator.cli.ctl import main
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import EventReader
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.daemon.made_up_gpus import uuid_of
from tests.waiting import BOUND_S

ROOT = Path(__file__).resolve().parents[2]

M = TypeVar("M", bound=messages.Message)


TURNS: Final = {"NVSHARE_POLICY": "round_robin", "NVSHARE_SHARING": "exclusive", "NVSHARE_QUANTUM": "100ms"}


def environment(**more: str) -> dict[str, str]:
    """Without settings of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_") and k != "LD_PRELOAD"}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def serving(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A coordinator that is ready; what it says is appended to the log."""
    ready, report = os.pipe()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--ready-fd", str(report)], env=environment, pass_fds=(report,), stdin=subprocess.DEVNULL,
            stdout=output, stderr=output,
        )  # fmt: skip
    os.close(report)
    with os.fdopen(ready, "rb") as told:
        if not select.select([told], [], [], BOUND_S)[0] or not told.read(1):
            process.kill()
            process.wait()
            raise AssertionError(f"it did not start:\n{log.read_text()}")
    return process


_parser = functools.cache(typer.main.get_command)
"""Of `nvshare-ctl`: typer makes it for each call, which takes longer than the call."""


def ctl(directory: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`nvshare-ctl` with these words, in this process: an interpreter's start would cost more than the command."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, {"NVSHARE_RUNTIME_DIR": str(directory)}),
        mock.patch.object(typer.main, "get_command", _parser),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main([*before, *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


@dataclass
class Running:
    """One coordinator process."""

    process: subprocess.Popen[bytes]
    directory: RuntimeDir
    log: Path

    def ask(self, request: api.Request) -> Any:
        return call(self.directory, request)

    def status(self) -> Any:
        return self.ask(api.Status())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(BOUND_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)


@dataclass
class Coordinators:
    """Starts coordinators; remembers them."""

    base: Path
    program: str = "made_up_gpus.py"
    started: list[Running] = field(default_factory=list)

    def command(self, *words: str, gpus: int = 1, directory: Path | None = None) -> list[str]:
        where = directory or self.base / "run"
        program = str(Path(__file__).parent / self.program)
        return [sys.executable, program, str(gpus), "--runtime-dir", str(where), *words]

    def start(self, *words: str, gpus: int = 1, directory: Path | None = None, **env: str) -> Running:
        """A coordinator that is ready: with turns of 100 ms, without a configuration file."""
        where = directory or self.base / "run"
        log = self.base / f"coordinator-{len(self.started)}.log"
        defaults = {} if "--config" in words else TURNS
        process = serving(self.command(*words, gpus=gpus, directory=where), environment(**defaults | env), log)
        running = Running(process, RuntimeDir(where), log)
        self.started.append(running)
        return running

    def refused(self, *words: str, directory: Path | None = None, **env: str) -> tuple[int, str]:
        """Exit code and message of one that cannot start."""
        done = subprocess.run(
            self.command(*words, directory=directory),
            capture_output=True,
            text=True,
            env=environment(**env),
            check=False,
        )
        return done.returncode, done.stderr


class Hook:
    """A client that a test plays by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, identity: bytes = b"") -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(f"ipc://{path}")
        self.seen: list[messages.Message] = []

    def send(self, message: messages.Message) -> None:
        self.socket.send(messages.encode(message))

    def hello(
        self,
        name: str = "test",
        *,
        priority: int = 0,
        memory_mode: int = int(messages.MemoryMode.MANAGED),
    ) -> Hook:
        said = f"priority={priority}\n"
        self.send(messages.Hello(messages.PROTOCOL_VERSION, name, "pytest", memory_mode, 0, profile=said))
        return self

    def attach(self, gpu: int = 0, *, lease_id: int = 0, wanted: bool = False) -> Hook:
        self.send(messages.AttachGpu(gpu, uuid_of(gpu), lease_id, wanted, 0, 0, 0))
        return self

    def release(self, lease_id: int, *, wanted: bool = False, idle: bool = False) -> None:
        self.send(messages.Release(0, lease_id, int(idle), True, wanted, 1_000, time.monotonic_ns(), 5))

    def next(self, kind: type[M]) -> M:
        """The next message of this kind; those before it are in `seen`."""
        give_up_at = time.monotonic() + BOUND_S
        while True:
            left_ms = max(0, int((give_up_at - time.monotonic()) * 1000))
            assert self.socket.poll(left_ms), f"no {kind.__name__}; seen: {self.seen}"
            message = messages.decode(self.socket.recv(), messages.TO_CLIENT)
            assert isinstance(message, messages.Message)
            self.seen.append(message)
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self.socket.close(0)


class Trace:
    """The event stream from now on."""

    def __init__(self, running: Running) -> None:
        self._reader = EventReader(running.directory.events_socket)
        self._frames = self._reader.frames(int(BOUND_S * 1000))
        self.events: list[dict[str, Any]] = []
        # Subscribing takes a moment; a change of the quantum to what it is harms nobody and comes back as an event.
        quantum = running.status()["gpus"][0]["quantum_ns"]
        give_up_at = time.monotonic() + BOUND_S
        while time.monotonic() < give_up_at:
            running.ask(api.Set(setting="quantum", value=quantum))
            if self._arrived():
                return
        raise AssertionError("no events")

    def _arrived(self) -> bool:
        for frame in self._reader.frames(50):
            event = api.decode_event(frame)
            if event["kind"] == "quantum":
                return True
        return False

    def next(self, kind: str, **values: Any) -> dict[str, Any]:
        """The next event of a kind with these values."""
        for frame in self._frames:
            event = api.decode_event(frame)
            self.events.append(event)
            if event["kind"] == kind and all(event.get(key) == value for key, value in values.items()):
                return event
        raise AssertionError(f"no {kind} {values}; came: {self.events}")

    def close(self) -> None:
        self._reader.close()


class Holder:
    """A client in a process of its own."""

    def __init__(self, running: Running, lease_id: int = 0, gpu: int = 0) -> None:
        program = str(Path(__file__).parent / "holder.py")
        words = [sys.executable, program, str(running.directory.hooks_socket), uuid_of(gpu), str(lease_id)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
        self.lines: list[str] = []
        self._unread = b""

    def next(self, kind: str) -> str:
        """The next line that begins with this word."""
        assert self.process.stdout is not None
        while True:
            while b"\n" not in self._unread:
                readable, _, _ = select.select([self.process.stdout], [], [], BOUND_S)
                assert readable, f"no {kind}; came: {self.lines}"
                piece = os.read(self.process.stdout.fileno(), 4096)
                assert piece, f"it ended; came: {self.lines}"
                self._unread += piece
            line, _, self._unread = self._unread.partition(b"\n")
            self.lines.append(line.decode())
            if self.lines[-1].startswith(kind):
                return self.lines[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)
