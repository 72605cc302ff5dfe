"""Programs in mode `swap`, and a scripted coordinator that orders their memory to move.

Non-goals: what is measured (swap.py).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq

from nvshare.bench.harness.fixture import BenchError
from nvshare.client_hook.launcher import ClientOptions, client_environment, find_hook
from nvshare.coordinator.protocol import messages
from nvshare.simulated_gpu.environment import simulated_environment

GIB, MIB = 1 << 30, 1 << 20
BOUND_S = 60.0
WORKER = (sys.executable, "-m", "nvshare.bench.workloads.swap_worker")

M = TypeVar("M", bound=messages.Message)


class Program:
    """nvshare.bench.workloads.swap_worker, and its connection once it has spoken."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            WORKER, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.peer = b""
        self.inbox: list[messages.Message] = []
        self.answer()

    def tell(self, command: str) -> None:
        """One command, without waiting for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Result of the oldest command."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchError(f"a program ended with exit code {self.process.wait()}")
        return json.loads(line)

    def do(self, command: str) -> Any:
        """One command and its answer."""
        self.tell(command)
        return self.answer()

    def end(self) -> None:
        """Ends the program in any state."""
        self.process.kill()
        self.process.communicate()


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
        assert program.process.stdout is not None
        while not select.select([program.process.stdout], [], [], 0)[0]:
            if (taken := self._take(0.01)) is not None:
                taken[0].inbox.append(taken[1])
        return program.answer()

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
def started(environment: dict[str, str]) -> Iterator[Program]:
    """A program for the length of the block."""
    program = Program(environment)
    try:
        yield program
    finally:
        program.end()


@contextmanager
def scene(
    options: argparse.Namespace, simulate: bool, total: int
) -> Iterator[tuple[dict[str, str], dict[str, str], Path]]:
    """Environments of programs beside the hook and under it, and where its socket is."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as scratch:
        directory = Path(scratch)
        plain = {k: v for k, v in os.environ.items() if k not in {"LD_PRELOAD", "NVSHARE_ENABLE", "NVSHARE_SOCKET"}}
        if simulate:
            plain = simulated_environment(directory / "simulated_gpu", f"1x{4 * total + GIB}", plain)
        options_of_client = ClientOptions(memory="swap")
        hooked = client_environment(plain, hook=find_hook(os.environ), runtime_dir=directory, options=options_of_client)
        yield plain, hooked, directory / "hooks.sock"
