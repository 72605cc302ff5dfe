"""`python -m bench.swap`: how fast memory mode `swap` moves memory, beside plain pinned copies in the same run.

Method: two programs under the hook, each with `--gib` of allocations of mixed sizes, told by a coordinator that is
played here: it sends Evict and Restore and takes the time and bytes that the hook's last MoveProgress states.  A
hand-over is one program's eviction and the other's restoration at the same time: all bytes over the time until both are
done.  After the last round both programs check every byte.  The baseline is a program without the hook that copies
between pinned memory and the device.

May not go here: what the real coordinator decides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq

from bench.rig import BenchError, machine, real_card
from client_hook.launcher import ClientOptions, client_environment, find_hook
from coordinator import wire
from simulated_gpu.environment import simulated_environment

GIB, MIB = 1 << 30, 1 << 20
BOUND_S = 60.0
WORKER = (sys.executable, "-m", "bench.workloads.swap_worker")
UNIT_SIZES = (1, 5, 37, 200, 500, 1000, 4000, 3_000_000, 20_971_520, 2_097_152, 67_108_864, 150_000_000)
"""A mixture, small and large; what is missing to the wanted sum is one more allocation."""

M = TypeVar("M", bound=wire.Message)


class Program:
    """bench.workloads.swap_worker, and its connection once it has spoken."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            WORKER, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.peer = b""
        self.inbox: list[wire.Message] = []
        self.answer()

    def tell(self, command: str) -> None:
        """One command, without waiting for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What the oldest command came to."""
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
        """Whatever state it is in."""
        self.process.kill()
        self.process.communicate()


class Coordinator:
    """Says what the benchmark wants said, to several programs."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{path}")
        self._capacity = capacity_bytes
        self._programs: dict[bytes, Program] = {}
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, program: Program, message: wire.Message) -> None:
        """To one of them."""
        self._socket.send_multipart([program.peer, wire.encode(message)])

    def expect(self, program: Program, kind: type[M], newcomer: Program | None = None) -> M:
        """Its next message of this kind.  Who speaks for the first time is the newcomer."""
        deadline = time.monotonic() + BOUND_S
        while True:
            for index, message in enumerate(program.inbox):
                if isinstance(message, kind):
                    del program.inbox[index]
                    return message
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(int(left * 1000)):
                raise BenchError(f"no {kind.__name__} came within {BOUND_S:.0f} s")
            peer, frame = self._socket.recv_multipart()
            if peer not in self._programs and newcomer is not None:
                self._programs[peer] = newcomer
                newcomer.peer = peer
            decoded = wire.decode(frame, wire.TO_COORDINATOR)
            if isinstance(decoded, wire.Message) and peer in self._programs:
                self._programs[peer].inbox.append(decoded)

    def admit(self, program: Program, sizes: Sequence[int]) -> None:
        """The program allocates, and becomes a client by it."""
        program.do("start")
        program.tell("alloc " + " ".join(map(str, sizes)))
        self.expect(program, wire.Hello, newcomer=program)
        self.send(program, wire.Welcome(wire.PROTOCOL_VERSION, 1))
        self.expect(program, wire.AttachGpu)
        settings = wire.GpuSettings(
            gpu=0, memory_limit_bytes=0, capacity_bytes=self._capacity, reserve=False, pacing_budget_ns=0,
            idle_release_ns=0, drain_deadline_ns=10**10, sharing=0,
        )  # fmt: skip
        self.send(program, settings)
        program.answer()

    def under_lease(self, program: Program, command: str) -> Any:
        """A command of the program with the lease, which it has not before nor after."""
        self._number += 1
        lease = self._number
        program.inbox.clear()
        program.tell(command)
        self.expect(program, wire.Request)
        self.send(program, wire.Grant(gpu=0, lease_id=lease, quantum_ns=10**9, waiters=0))
        answer = program.answer()
        self.send(program, wire.Revoke(gpu=0, lease_id=lease, drain_deadline_ns=10**10))
        self.expect(program, wire.Release)
        return answer

    def order(self, program: Program, kind: type[wire.Evict] | type[wire.Restore]) -> int:
        """Sends an order for everything; its number."""
        self._number += 1
        self.send(program, kind(gpu=0, order_id=self._number, bytes=1 << 50))
        return self._number

    def finished(self, program: Program, order: int) -> tuple[int, int]:
        """(bytes, ns) of an order that must succeed."""
        while True:
            progress = self.expect(program, wire.MoveProgress)
            if progress.order_id == order and progress.finished:
                if progress.error or not progress.moved_bytes:
                    raise BenchError(f"an order moved {progress.moved_bytes} bytes and ended with {progress.error}")
                return progress.moved_bytes, progress.elapsed_ns


def rate(moves: Sequence[tuple[int, int]]) -> float:
    """GiB/s of moves that went on at the same time."""
    return sum(size for size, _ in moves) / GIB / (max(elapsed for _, elapsed in moves) / 1e9)


def measure(coordinator: Coordinator, programs: Sequence[Program], sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """All figures of the hook."""
    first, second = programs
    for seed, program in enumerate(programs):
        coordinator.admit(program, sizes)
        coordinator.under_lease(program, f"fill {seed}")
        order = coordinator.order(program, wire.Evict)
        firsts = [coordinator.finished(program, order)]
        if program is first:
            told = {"first_evict_gib_s": rate(firsts)}
    evicts, restores, handovers = [], [], []
    for _ in range(rounds):
        restores.append(rate([coordinator.finished(first, coordinator.order(first, wire.Restore))]))
        evicts.append(rate([coordinator.finished(first, coordinator.order(first, wire.Evict))]))
    coordinator.finished(first, coordinator.order(first, wire.Restore))
    for _ in range(rounds):
        for going, coming in ((first, second), (second, first)):
            orders = coordinator.order(going, wire.Evict), coordinator.order(coming, wire.Restore)
            moves = [coordinator.finished(p, o) for p, o in zip((going, coming), orders, strict=True)]
            handovers.append(rate(moves))
    wrong = 0
    for seed, program in enumerate(programs):
        wrong += coordinator.under_lease(program, f"check {seed}")
    if wrong:
        raise BenchError(f"{wrong} parts of memory are not what was written")
    series = {"evict": evicts, "restore": restores, "handover": handovers}
    return {
        **told,
        **{f"{name}_gib_s": statistics.median(values) for name, values in series.items()},
        "details": {name: [round(value, 2) for value in values] for name, values in series.items()},
    }


def mixture(total_bytes: int) -> list[int]:
    """Sizes of allocations that make up the total."""
    sizes: list[int] = []
    left = total_bytes
    while left > sum(UNIT_SIZES):
        sizes += UNIT_SIZES
        left -= sum(UNIT_SIZES)
    return [*sizes, left]


@contextmanager
def started(environment: dict[str, str]) -> Iterator[Program]:
    """A program for the length of the block."""
    program = Program(environment)
    try:
        yield program
    finally:
        program.end()


def run(options: argparse.Namespace, simulate: bool) -> dict[str, Any]:
    """Baseline and measurement."""
    total = int(options.gib * GIB)
    bytearray(2 * total)  # in a virtual machine memory that was never used is the hypervisor's to find
    with tempfile.TemporaryDirectory(prefix="nvs-") as scratch, ExitStack() as stack:
        directory = Path(scratch)
        plain = {k: v for k, v in os.environ.items() if k not in {"LD_PRELOAD", "NVSHARE_ENABLE", "NVSHARE_SOCKET"}}
        if simulate:
            plain = simulated_environment(directory / "simulated_gpu", f"1x{4 * total + GIB}", plain)
        with started(plain) as baseline:
            baseline.do("start")
            copies = baseline.do(f"copies {total // 4 // MIB * MIB} {options.rounds}")
        coordinator = stack.enter_context(Coordinator(directory / "hooks.sock", int(options.capacity_gib * GIB)))
        hooked = client_environment(
            plain, hook=find_hook(os.environ), runtime_dir=directory, options=ClientOptions(memory="swap")
        )
        programs = [stack.enter_context(started(hooked)) for _ in range(2)]
        told = measure(coordinator, programs, mixture(total), options.rounds)
    return {
        "memcpy_gib_s": {name: round(statistics.median(values), 2) for name, values in copies.items()},
        **{name: round(value, 2) if isinstance(value, float) else value for name, value in told.items()},
        "simulated": simulate,
        "capacity_gib": options.capacity_gib,
        "moved_gib": options.gib,
        "machine": machine(),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.swap", description="Speed of memory mode swap")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--simulate", action="store_true", help="on the simulated GPU although there is a card")
    parser.add_argument("--gib", type=float, help="what each program has (default 3.5, simulated 0.25)")
    parser.add_argument("--capacity-gib", type=float, help="what is told to be the capacity (default 4, simulated 0.5)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    options = parser.parse_args()
    simulate = options.simulate or not real_card()
    options.gib = options.gib or (0.25 if simulate else 3.5)
    options.capacity_gib = options.capacity_gib or (0.5 if simulate else 4.0)
    try:
        result = run(options, simulate)
    except BenchError as error:
        sys.stderr.write(f"bench.swap: {error}\n")
        return 1
    if options.json:
        print(json.dumps(result))
        return 0
    where = "the simulated GPU" if simulate else result["machine"]["gpu"]
    print(f"on {where}, GiB/s: plain copies {result['memcpy_gib_s']}; evict {result['evict_gib_s']}, restore ", end="")
    print(f"{result['restore_gib_s']}, hand-over {result['handover_gib_s']}, first evict {result['first_evict_gib_s']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
