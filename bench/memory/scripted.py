"""Programs in mode `swap`, and a scripted coordinator that orders their memory to move.

Non-goals: what is measured (swap.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq

from nvshare.bench.harness.fixture import BenchError, Fixture, uncoordinated
from nvshare.bench.harness.worker_group import Member
from nvshare.client_hook.launcher import ClientOptions, client_environment, find_hook
from nvshare.coordinator.protocol import messages

GIB, MIB = 1 << 30, 1 << 20
BOUND_S = 60.0
WORKER = (sys.executable, "-m", "nvshare.bench.workloads.swap_worker")

M = TypeVar("M", bound=messages.Message)


class Program(Member):
    """nvshare.bench.workloads.swap_worker, and its connection once it has spoken."""

    def __init__(self, stand: Fixture, environment: Mapping[str, str]) -> None:
        super().__init__(stand, WORKER, hooked=False, name="program", extra=environment)
        self.peer = b""
        self.inbox: list[messages.Message] = []
        self.result()

    def result(self) -> Any:
        """Result of the oldest command."""
        return self.answer(BOUND_S)["result"]

    def do(self, command: str) -> Any:
        """One command and its result."""
        self.tell(command)
        return self.result()


class Coordinator:
    """Says what the benchmark wants said, to several programs."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{path}")
        self.capacity_bytes = capacity_bytes
        self._programs: dict[bytes, Program] = {}
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, program: Program, message: messages.Message) -> None:
        """Sends a message to one program."""
        self._socket.send_multipart([program.peer, messages.encode(message)])

    def expect(self, program: Program, kind: type[M], newcomer: Program | None = None) -> M:
        """Its next message of this kind.  Who speaks for the first time is the newcomer."""
        deadline = time.monotonic() + BOUND_S
        while True:
            for index, message in enumerate(program.inbox):
                if isinstance(message, kind):
                    del program.inbox[index]
                    return message
            left = deadline - time.monotonic()
            if left <= 0:
                raise BenchError(f"no {kind.__name__} came within {BOUND_S:.0f} s")
            if (taken := self._take(left, newcomer)) is not None:
                taken[0].inbox.append(taken[1])

    def _take(self, timeout_s: float, newcomer: Program | None = None) -> tuple[Program, messages.Message] | None:
        """The next message of any program; host memory is granted on the way.  None: nothing that matters."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        peer, frame = self._socket.recv_multipart()
        if peer not in self._programs and newcomer is not None:
            self._programs[peer] = newcomer
            newcomer.peer = peer
        message = messages.decode(frame, messages.TO_COORDINATOR)
        if not isinstance(message, messages.Message) or peer not in self._programs:
            return None
        if isinstance(message, messages.ReserveHost):
            self.send(self._programs[peer], messages.HostReserved(message.sequence, message.bytes))
        return self._programs[peer], message

    def _serve(self, program: Program) -> Any:
        """Result of a command, with the program's questions answered meanwhile."""
        while not program.has_spoken():
            if (taken := self._take(0.01)) is not None:
                taken[0].inbox.append(taken[1])
        return program.result()

    def settings(self, program: Program, prepare_bytes: int = 0) -> None:
        """Nothing that slows, and so much host memory to have ready."""
        self.send(
            program,
            messages.GpuSettings(
                gpu=0, memory_limit_bytes=0, capacity_bytes=self.capacity_bytes, reserve=False, pacing_budget_ns=0,
                idle_release_ns=0, drain_deadline_ns=10**10, sharing=0, prepare_host_bytes=prepare_bytes,
            ),
        )  # fmt: skip

    def admit(self, program: Program, sizes: Sequence[int]) -> None:
        """The program allocates, and becomes a client by it."""
        program.do("start")
        program.tell("alloc " + " ".join(map(str, sizes)))
        self.expect(program, messages.Hello, newcomer=program)
        self.send(program, messages.Welcome(messages.PROTOCOL_VERSION, len(self._programs)))
        self.expect(program, messages.AttachGpu)
        self.settings(program)
        self._serve(program)

    def under_lease(self, program: Program, command: str) -> Any:
        """A command of the program with the lease, which it has not before nor after."""
        self._number += 1
        lease = self._number
        program.inbox.clear()
        program.tell(command)
        self.expect(program, messages.Request)
        self.send(program, messages.Grant(gpu=0, lease_id=lease, quantum_ns=10**9, waiters=0))
        answer = self._serve(program)
        self.send(program, messages.Revoke(gpu=0, lease_id=lease, drain_deadline_ns=10**10))
        self.expect(program, messages.Release)
        return answer

    def order(
        self, program: Program, kind: type[messages.Evict] | type[messages.Restore], size: int = 1 << 50, **more: int
    ) -> int:
        """Sends an order, for everything unless said otherwise; its number."""
        self._number += 1
        self.send(program, kind(gpu=0, order_id=self._number, bytes=size, **more))
        return self._number

    def finished(self, program: Program, order: int, *, may_be_nothing: bool = False) -> tuple[int, int]:
        """(bytes, ns) of an order that must succeed."""
        while True:
            progress = self.expect(program, messages.MoveProgress)
            if progress.order_id == order and progress.finished:
                return _moved(progress, may_be_nothing=may_be_nothing)

    def hand_over(self, going: Program, coming: Program, held_bytes: int) -> list[tuple[int, int]]:
        """One goes out while the other comes in, never more than the capacity on the card; (bytes, ns) of both."""
        room = max(0, self.capacity_bytes - held_bytes)
        out = self.order(going, messages.Evict)
        into = self.order(coming, messages.Restore, credit_bytes=room)
        done: dict[int, tuple[int, int]] = {}
        deadline = time.monotonic() + BOUND_S
        while len(done) < 2:
            if time.monotonic() > deadline:
                raise BenchError(f"a hand-over did not end within {BOUND_S:.0f} s")
            taken = self._take(1.0)
            if taken is None or not isinstance(progress := taken[1], messages.MoveProgress):
                continue
            if progress.order_id == out:
                credit = messages.UNBOUNDED if progress.finished else room + progress.moved_bytes
                self.send(coming, messages.MoveCredit(gpu=0, order_id=into, credit_bytes=credit))
            if progress.finished and progress.order_id in {out, into}:
                done[progress.order_id] = _moved(progress)
        return list(done.values())


def _moved(progress: messages.MoveProgress, *, may_be_nothing: bool = False) -> tuple[int, int]:
    if progress.error or not (progress.moved_bytes or may_be_nothing):
        raise BenchError(f"an order moved {progress.moved_bytes} bytes and ended with {progress.error}")
    return progress.moved_bytes, progress.elapsed_ns


@contextmanager
def scene(simulate: str | None) -> Iterator[tuple[Fixture, dict[str, str]]]:
    """A place, and the environment of programs under the hook there; their coordinator is played here."""
    with uncoordinated(simulate=simulate) as stand:
        hook, options = find_hook(os.environ), ClientOptions(memory="swap")
        yield stand, client_environment(stand.environment(), hook=hook, runtime_dir=stand.directory, options=options)
