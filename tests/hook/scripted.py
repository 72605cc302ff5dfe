"""A coordinator that does what a test tells it, and a CUDA program under the hook that does so too.

Invariants: every wait is bounded and ends in a clear failure; nothing outlives the test.

Non-goals: what the real coordinator would decide.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from nvshare.coordinator.protocol import messages
from tests.waiting import BOUND_S as BOUND_S

NEVER_NS = 10**12
"""A drain's deadline that no test reaches."""
LOOK_S = 0.005
"""How often a coordinator is looked after while the test waits for a program."""

SETTINGS = messages.GpuSettings(
    gpu=0, memory_limit_bytes=0, capacity_bytes=16 << 30, reserve=False, pacing_budget_ns=0, idle_release_ns=0
)

M = TypeVar("M", bound=messages.Message)


class ScriptedCoordinator:
    """A ROUTER for hooks on `path`."""

    listening: ClassVar[list[ScriptedCoordinator]] = []
    """Listening coordinators of this test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._context = zmq.Context()
        self.peer = b""
        self.received: list[messages.Message] = []
        self._unread: deque[tuple[bytes, messages.Message]] = deque()
        self.unasked = False
        """The client of the last AttachGpu has not asked for the lease of GPU 0."""
        self._states: dict[int, messages.State] = {}
        self._targets: dict[int, messages.Target] = {}
        self.has_host_budget = False
        """The test answers questions about host memory; else each is granted as soon as it is read."""
        try:
            self._bind()
        except zmq.ZMQError:
            self._context.destroy(linger=0)  # else it waits for its sockets, for ever, when it is collected
            raise

    def _bind(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(f"ipc://{self.path}")
        self.listening.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._silence()
        self._context.destroy(linger=0)

    def _silence(self) -> None:
        """Nobody listens."""
        self._unread.clear()
        if self in self.listening:
            self.listening.remove(self)

    def stop(self) -> None:
        """As if the coordinator died."""
        self._silence()
        self._socket.disable_monitor()
        self._socket.close(linger=0)

    def disconnected(self) -> None:
        """Waits until a client's connection ends."""
        assert self._monitor.poll(int(BOUND_S * 1000)), "no connection ended"
        recv_monitor_message(self._monitor)

    def restart(self) -> None:
        """As if it came back, knowing nothing."""
        self.path.unlink(missing_ok=True)
        self._bind()

    def send(self, message: messages.Message) -> None:
        """To the peer that spoke last."""
        self.send_bytes(messages.encode(message))

    def send_bytes(self, frame: bytes) -> None:
        """Anything at all."""
        self._socket.send_multipart([self.peer, frame])

    def look(self) -> None:
        """Reads what has come."""
        while self._socket.poll(0):
            peer, frame = self._socket.recv_multipart()
            message = messages.decode(frame, messages.TO_COORDINATOR)
            assert isinstance(message, messages.Message)
            if isinstance(message, messages.State) and message.gpu == messages.HOST and not self.has_host_budget:
                granted = messages.Target(messages.HOST, 0, 0, answers=message.asks, total_bytes=message.total_bytes)
                self._socket.send_multipart([peer, messages.encode(granted)])
            else:
                self._unread.append((peer, message))

    def receive(self, timeout_s: float = BOUND_S) -> messages.Message | None:
        """The next message; None when the time is over."""
        deadline = time.monotonic() + timeout_s
        self.look()
        while not self._unread and (left := deadline - time.monotonic()) > 0:
            self._socket.poll(int(left * 1000) + 1)
            self.look()
        if not self._unread:
            return None
        self.peer, message = self._unread.popleft()
        self.received.append(message)
        match message:
            case messages.Hello():
                self._begin(messages.State(messages.HOST, 0, 0, 0, 0, 0))
            case messages.AttachGpu():
                if message.gpu == 0:
                    self.unasked = message.lease_id == 0 and not message.wanted
                figures = message.allocated_bytes, message.resident_bytes, message.pinned_bytes
                self._begin(messages.State(message.gpu, 0, *figures, 0))
            case messages.State():
                self._states[message.gpu] = message
            case messages.Request(gpu=0):
                self.unasked = False
        return message

    def _begin(self, state: messages.State) -> None:
        self._states[state.gpu] = state
        self._targets[state.gpu] = messages.Target(state.gpu, 0, 0)

    def expect(self, kind: type[M]) -> M:
        """The next message of this kind; others before it stay in `received`."""
        deadline = time.monotonic() + BOUND_S
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, kind):
                return message
        pytest.fail(f"no {kind.__name__} came; heard {self.received}")

    def nothing(self, kind: type[messages.Message]) -> None:
        """Asserts that no message of this kind has come."""
        while self.receive(0.0) is not None:
            pass
        assert not [m for m in self.received if isinstance(m, kind)]

    def welcome(self, **settings: Any) -> messages.AttachGpu:
        """Hello, AttachGpu and their answers."""
        self.expect(messages.Hello)
        self.send(messages.Welcome(1))
        attach = self.expect(messages.AttachGpu)
        self.settings(**settings)
        return attach

    def settings(self, *, limit: int = 0, **more: Any) -> None:
        """GpuSettings for GPU 0: these, and otherwise what lets a program do all that it wants."""
        self.send(dataclasses.replace(SETTINGS, memory_limit_bytes=limit, **more))

    def asked(self) -> None:
        """Until the client that was welcomed has asked for the lease: with its AttachGpu if a thread waits by then."""
        if self.unasked:
            self.expect(messages.Request)

    def grant(self, lease_id: int, waiters: int = 0, gpu: int = 0) -> None:
        """For a long time."""
        self.send(messages.Grant(gpu=gpu, lease_id=lease_id, waiters=waiters))

    def state(self, gpu: int = 0) -> messages.State:
        """The newest one that was read; before the first, what AttachGpu says."""
        return self._states[gpu]

    def _set_target(self, gpu: int, **changes: Any) -> None:
        self._targets[gpu] = dataclasses.replace(self._targets[gpu], **changes)
        self.send(self._targets[gpu])

    def target(self, size: int, gpu: int = 0, *, rises: bool = False) -> None:
        """The next Target of this connection."""
        self._set_target(gpu, number=self._targets[gpu].number + 1, bytes=size, rises=rises)

    def has_question(self, gpu: int = 0) -> bool:
        """The newest State that was read asks for memory, and has no answer."""
        return self.state(gpu).asks != self._targets[gpu].answers

    def has_pins_question(self, gpu: int = 0) -> bool:
        """Likewise for immovable memory."""
        return self.state(gpu).asks_pins != self._targets[gpu].answers_pins

    def question(self, gpu: int = 0) -> int:
        """Waits for a question about memory; the total that it asks for."""
        while not self.has_question(gpu):
            self.expect(messages.State)
        return self.state(gpu).total_bytes

    def pins_question(self, gpu: int = 0) -> int:
        """Waits for a question about immovable memory; the total that it asks for."""
        while not self.has_pins_question(gpu):
            self.expect(messages.State)
        return self.state(gpu).pins_bytes

    def answer(self, total: int, gpu: int = 0, *, by_limit: bool = False) -> None:
        """Answers the question about memory."""
        self._set_target(gpu, answers=self.state(gpu).asks, total_bytes=total, by_limit=by_limit)

    def answer_pins(self, total: int, gpu: int = 0) -> None:
        """Answers the question about immovable memory."""
        self._set_target(gpu, answers_pins=self.state(gpu).asks_pins, pins_bytes=total)

    def rests(self, gpu: int = 0) -> messages.State:
        """Waits until the client is at rest with the newest target."""
        while (state := self.state(gpu)).target != self._targets[gpu].number or not state.at_rest:
            self.expect(messages.State)
        return state

    def move(self, size: int, gpu: int = 0) -> tuple[int, int]:
        """(bytes moved, CUresult) on the way to a target."""
        before = self.state(gpu)
        self.target(size, gpu)
        after = self.rests(gpu)
        out, into = after.moved_out_bytes - before.moved_out_bytes, after.moved_in_bytes - before.moved_in_bytes
        assert out == 0 or into == 0
        return out + into, after.error

    def evict(self, size: int, gpu: int = 0) -> tuple[int, int]:
        """(bytes moved, CUresult) on the way to a target that is so much below what is there."""
        return self.move(max(0, self.state(gpu).resident_bytes - size), gpu)

    def restore(self, size: int, gpu: int = 0) -> tuple[int, int]:
        """(bytes moved, CUresult) on the way to a target that is so much above what is there."""
        return self.move(self.state(gpu).resident_bytes + size, gpu)

    def revoke(self, lease_id: int, deadline_ns: int = NEVER_NS, gpu: int = 0) -> messages.Release:
        """Takes the lease back and waits for its release."""
        self.send(messages.Revoke(gpu=gpu, lease_id=lease_id, drain_deadline_ns=deadline_ns))
        release = self.expect(messages.Release)
        assert (release.gpu, release.lease_id) == (gpu, lease_id)
        return release


class ScriptedClient:
    """A program that says "ready" and answers lines, as tests/hook/coord/programs/agent_client.c does."""

    def __init__(
        self,
        program: Path | Sequence[str],
        environment: Mapping[str, str],
        *,
        greets: bool = True,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        pipe = subprocess.PIPE
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            [program] if isinstance(program, Path) else program,
            env=dict(environment), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, preexec_fn=preexec_fn,
        )  # fmt: skip
        self._pending = b""
        assert not greets or self.answer() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(BOUND_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def tell(self, command: str) -> None:
        """One command, without waiting."""
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), f"{command}\n".encode())

    def answer(self, timeout_s: float = BOUND_S) -> str:
        """The next line; empty when the time is over or the program ended."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.process.stdout], [], [], min(left, LOOK_S))
            if ready:
                if not (part := os.read(self.process.stdout.fileno(), 4096)):
                    return ""
                self._pending += part
            elif left == 0.0:
                return ""
            for coordinator in ScriptedCoordinator.listening:
                coordinator.look()
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    def do(self, command: str) -> str:
        """One command and its answer."""
        self.tell(command)
        return self.answer()

    def error_line(self) -> str:
        """The next line on stderr; waits for it."""
        assert self.process.stderr is not None
        ready, _, _ = select.select([self.process.stderr], [], [], BOUND_S)
        return os.read(self.process.stderr.fileno(), 4096).decode() if ready else ""

    def finish(self) -> tuple[int, str]:
        """Has no more commands for it; what `ended` tells."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Waits for the end: exit code and what it wrote to stderr."""
        assert self.process.stderr is not None
        code = self.process.wait(BOUND_S)
        return code, self.process.stderr.read().decode()


class JsonClient(ScriptedClient):
    """A program that answers each line with one line of JSON."""

    def ask(self, *words: object) -> Any:
        """One call's result."""
        self.tell(" ".join(map(str, words)))
        return self.result()

    def result(self) -> Any:
        """Result of a call that was only told."""
        answer = self.answer()
        assert answer, f"the program ended: {self.ended()}"
        return json.loads(answer)
