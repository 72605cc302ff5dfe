"""Speed of memory moves in mode `swap`, beside plain pinned copies: `python -m nvshare.bench.memory.swap`.

Method: two programs under the hook, each with `--gib` of allocations of mixed sizes, told by a coordinator that is
played here: it sends targets and takes the bytes and the time that the hook's states give until it is at rest.  A
hand-over is one program's eviction and the other's restoration at the same time, within the capacity: the target of the
latter begins with the room that there is and rises as the other tells what has left; all bytes over the time until both
are done.  The first program's first eviction finds no pinned memory ready, the second one's all of it.  After the
last round both programs check every byte.  The baseline is a program without the hook that copies between pinned memory
and the device, and two such programs, one for each direction.

`--checked ROUNDS` measures nothing: one program with allocations of random sizes, some replaced in each round, is
evicted and restored by random amounts and all its bytes are compared; the seed is printed.

Non-goals: what the real coordinator decides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq

from nvshare.bench.harness.command import parser_for, run_benchmark, track
from nvshare.bench.harness.fixture import BenchError, Fixture, uncoordinated
from nvshare.bench.harness.worker_group import Member, closing
from nvshare.client_hook.launcher import client_environment, find_hook
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.devices import real_card

GIB, MIB = 1 << 30, 1 << 20
BOUND_S = 60.0
EVERYTHING = 1 << 45
WORKER = (sys.executable, "-m", "nvshare.bench.workloads.swap_worker")

M = TypeVar("M", bound=messages.Message)
MEETING_NS = 2 * 10**9
"""After that two programs are ready to copy at the same moment."""
UNIT_SIZES = (1, 5, 37, 200, 500, 1000, 4000, 3_000_000, 20_971_520, 2_097_152, 67_108_864, 150_000_000)
"""A mixture, small and large; what is missing to the wanted sum is one more allocation."""


class Program(Member):
    """nvshare.bench.workloads.swap_worker, and its connection once it has spoken."""

    def __init__(self, stand: Fixture, environment: Mapping[str, str]) -> None:
        super().__init__(stand, WORKER, hooked=False, name="program", extra=environment)
        self.peer = b""
        self.inbox: list[messages.Message] = []
        self.state = messages.State(0, 0, 0, 0, 0, 0)
        """The newest one."""
        self.targets = 0
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
        if isinstance(message, messages.State) and message.gpu == messages.HOST:
            share = messages.Target(messages.HOST, 0, 0, answers=message.asks, total_bytes=message.total_bytes)
            self.send(self._programs[peer], share)
        elif isinstance(message, messages.State):
            self._programs[peer].state = message
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
                idle_release_ns=0, prepare_host_bytes=prepare_bytes,
                prepare_now=prepare_bytes > 0,
            ),
        )  # fmt: skip

    def admit(self, program: Program, sizes: Sequence[int]) -> None:
        """The program allocates, and becomes a client by it."""
        program.do("start")
        program.tell("alloc " + " ".join(map(str, sizes)))
        self.expect(program, messages.Hello, newcomer=program)
        self.send(program, messages.Welcome(len(self._programs)))
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
        self.send(program, messages.Grant(gpu=0, lease_id=lease, waiters=0))
        answer = self._serve(program)
        self.send(program, messages.Revoke(gpu=0, lease_id=lease, drain_deadline_ns=10**10))
        self.expect(program, messages.Release)
        return answer

    def aim(self, program: Program, size: int, *, rises: bool = False) -> None:
        """Sends the next target."""
        program.targets += 1
        self.send(program, messages.Target(0, program.targets, size, rises))

    def move(self, program: Program, size: int, *, may_be_nothing: bool = False) -> tuple[int, int]:
        """(bytes, ns) on the way to a target that must be reached as far as memory can move."""
        before = program.state
        self.aim(program, size)
        while not _rests(program):
            self.expect(program, messages.State)
        return _moved(before, program.state, may_be_nothing=may_be_nothing)

    def hand_over(self, going: Program, coming: Program) -> list[tuple[int, int]]:
        """One goes out while the other comes in, never more than the capacity on the card; (bytes, ns) of both."""
        before = [program.state for program in (going, coming)]
        room = self.capacity_bytes - going.state.resident_bytes
        self.aim(going, 0)
        self.aim(coming, room, rises=True)
        deadline, left = time.monotonic() + BOUND_S, False
        while not (left and _rests(coming)):
            if time.monotonic() > deadline:
                raise BenchError(f"a hand-over did not end within {BOUND_S:.0f} s")
            self._take(1.0)
            now = self.capacity_bytes - going.state.resident_bytes
            if not left and (now > room or _rests(going)):
                room, left = now, _rests(going)
                self.aim(coming, EVERYTHING if left else room, rises=not left)
        return [_moved(was, program.state) for was, program in zip(before, (going, coming), strict=True)]


def _rests(program: Program) -> bool:
    return program.state.target == program.targets and program.state.at_rest


def _moved(before: messages.State, after: messages.State, *, may_be_nothing: bool = False) -> tuple[int, int]:
    out, into = after.moved_out_bytes - before.moved_out_bytes, after.moved_in_bytes - before.moved_in_bytes
    if after.error or not (out or into or may_be_nothing):
        raise BenchError(f"{out} bytes have moved out and {into} in, and it has ended with {after.error}")
    return out + into, after.moving_ns - before.moving_ns


@contextmanager
def scene(simulate: str | None) -> Iterator[tuple[Fixture, dict[str, str]]]:
    """A place, and the environment of programs under the hook there; their coordinator is played here."""
    with uncoordinated(simulate=simulate) as stand:
        hook, options = find_hook(os.environ), {"memory": "swap"}
        yield stand, client_environment(stand.environment(), hook=hook, runtime_dir=stand.directory, options=options)


def rate(moves: Sequence[tuple[int, int]]) -> float:
    """GiB/s of moves that went on at the same time."""
    return sum(size for size, _ in moves) / GIB / (max(elapsed for _, elapsed in moves) / 1e9)


def measure(coordinator: Coordinator, programs: Sequence[Program], sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """All figures of the hook."""
    first, second = programs
    told: dict[str, Any] = {}
    for seed, program in enumerate(programs):
        coordinator.admit(program, sizes)
        coordinator.under_lease(program, f"fill {seed}")
        if program is second:
            _have_ready(coordinator, program, sum(sizes))
        name = "first_evict_gib_s" if program is first else "first_evict_prepared_gib_s"
        told[name] = rate([coordinator.move(program, 0)])
    evicts, restores, handovers = [], [], []
    for _ in range(rounds):
        restores.append(rate([coordinator.move(first, EVERYTHING)]))
        evicts.append(rate([coordinator.move(first, 0)]))
    coordinator.move(first, EVERYTHING)
    for _ in range(rounds):
        for going, coming in ((first, second), (second, first)):
            handovers.append(rate(coordinator.hand_over(going, coming)))
    coordinator.move(first, 0)  # the checks bring in what they need
    wrong = 0
    for program in programs:
        coordinator.move(program, EVERYTHING)
        wrong += coordinator.under_lease(program, "check")
        coordinator.move(program, 0)
    if wrong:
        raise BenchError(f"{wrong} parts of memory are not what was written")
    series = {"evict": evicts, "restore": restores, "handover": handovers}
    return {
        **told,
        **{f"{name}_gib_s": statistics.median(values) for name, values in series.items()},
        "details": {name: [round(value, 2) for value in values] for name, values in series.items()},
    }


def _have_ready(coordinator: Coordinator, program: Program, size: int) -> None:
    """Has host memory made ready, as for a move to another GPU, and waits until the program says that it is."""
    coordinator.settings(program, prepare_bytes=size)
    while program.state.prepared_bytes < size * 31 // 32:
        coordinator.expect(program, messages.State)


def speed(span: Sequence[int], size: int, rounds: int) -> float:
    """GiB/s of copies from the first to the second time of a span."""
    return size * rounds / GIB / ((span[1] - span[0]) / 1e9)


def both_ways(programs: Sequence[Program], size: int, rounds: int) -> float:
    """GiB/s together of one program that copies out and one that copies in, without the hook."""
    begin_ns = time.monotonic_ns() + MEETING_NS
    for out, program in enumerate(programs):
        program.tell(f"stream {out} {size} {rounds} {begin_ns}")
    spans: list[tuple[int, int]] = [tuple(program.result()) for program in programs]
    overlap = min(end for _, end in spans) - max(begin for begin, _ in spans)
    if overlap <= 0:
        raise BenchError("two programs that copy did not do so at the same time")
    return sum(speed(span, size, rounds) for span in spans)


def checked(coordinator: Coordinator, program: Program, rounds: int, seed: int) -> dict[str, Any]:
    """Evictions and restorations of random amounts of memory that changes, compared after each."""
    dice = random.Random(seed)

    def size() -> int:
        return dice.choice((1, 500, 4096, 70_000, 1_900_000, 2 * MIB, 3 * MIB + 1)) + dice.randrange(3) * 512

    held = [size() for _ in range(30)]
    coordinator.admit(program, held)
    coordinator.under_lease(program, f"fill {seed % 1000}")
    wrong = moved = 0
    for turn in track(range(1, rounds + 1), "turn"):
        everything = turn % 3 == 0
        less = 0 if everything else program.state.resident_bytes - dice.randrange(MIB, 64 * MIB)
        moved += coordinator.move(program, max(0, less))[0]
        if not everything:  # what this leaves out, the program finds missing and has brought in
            more = program.state.resident_bytes + dice.randrange(2 * MIB, 64 * MIB)
            moved += coordinator.move(program, more, may_be_nothing=True)[0]
        wrong += coordinator.under_lease(program, "check")
        sizes = " ".join(str(size()) for _ in range(3))
        coordinator.under_lease(program, f"renew {turn} {sizes}")
    return {"rounds": rounds, "mismatches": wrong, "moved_gib": round(moved / GIB, 2), "seed": seed}


def mixture(total_bytes: int) -> list[int]:
    """Sizes of allocations that make up the total."""
    sizes: list[int] = []
    left = total_bytes
    while left > sum(UNIT_SIZES):
        sizes += UNIT_SIZES
        left -= sum(UNIT_SIZES)
    return [*sizes, left]


def run(options: argparse.Namespace, simulate: bool) -> dict[str, Any]:
    """Baseline and measurement."""
    total = int(options.gib * GIB)
    bytearray(2 * total)  # in a virtual machine memory that was never used is the hypervisor's to find
    with scene(f"1x{4 * total + GIB}" if simulate else None) as (stand, hooked):
        size = total // 4 // MIB * MIB
        baselines = [Program(stand, {}) for _ in range(2)]
        with closing(baselines):
            for program in baselines:
                program.do("start")
            copies = {
                name: speed(baselines[0].do(f"stream {out} {size} {4 * options.rounds} 0"), size, 4 * options.rounds)
                for out, name in ((1, "out"), (0, "in"))
            }
            together = both_ways(baselines, size, 8 * options.rounds)
        with Coordinator(stand.directory / "hooks.sock", int(options.capacity_gib * GIB)) as coordinator:
            programs = [Program(stand, hooked) for _ in range(2)]
            with closing(programs):
                told = measure(coordinator, programs, mixture(total), options.rounds)
    return {
        "memcpy_gib_s": {name: round(value, 2) for name, value in copies.items()},
        "memcpy_two_programs_gib_s": round(together, 2),
        **{name: round(value, 2) if isinstance(value, float) else value for name, value in told.items()},
        "simulated": simulate,
        "capacity_gib": options.capacity_gib,
        "moved_gib": options.gib,
    }


def run_checked(options: argparse.Namespace, simulate: bool) -> dict[str, Any]:
    """The mode that compares and measures nothing."""
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    sys.stderr.write(f"nvshare.bench.memory.swap: seed {seed}\n")
    place = scene("1x2GiB" if simulate else None)
    with place as (stand, hooked), Coordinator(stand.directory / "hooks.sock", 256 * MIB) as coordinator:
        program = Program(stand, hooked)
        with closing([program]):
            told = checked(coordinator, program, options.checked, seed)
    return {**told, "simulated": simulate}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = options.simulate or not real_card()
    options.gib = options.gib or (0.25 if simulate else 3.5)
    options.capacity_gib = options.capacity_gib or (0.5 if simulate else 4.0)
    return (run_checked if options.checked else run)(options, simulate)


def _show(result: dict[str, Any]) -> None:
    if "mismatches" in result:
        print(json.dumps(result))
        return
    where = "the simulated GPU" if result["simulated"] else result["machine"]["gpu"]
    print(f"on {where}, GiB/s: plain copies {result['memcpy_gib_s']}; evict {result['evict_gib_s']}, ", end="")
    print(f"restore {result['restore_gib_s']}, hand-over {result['handover_gib_s']}, ", end="")
    print(f"first evict {result['first_evict_gib_s']} ({result['first_evict_prepared_gib_s']} with host memory ready)")


def main() -> int:
    """Command line."""
    parser = parser_for("memory.swap", "Speed of memory mode swap")
    parser.add_argument("--gib", type=float, help="what each program has (default 3.5, simulated 0.25)")
    parser.add_argument("--capacity-gib", type=float, help="what is told to be the capacity (default 4, simulated 0.5)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--checked", type=int, metavar="ROUNDS", help="compare data over so many rounds instead")
    parser.add_argument("--seed", type=int, help="of --checked; default: any, and printed")
    return run_benchmark(parser, _measure, _show, lambda result: "memory differs" if result.get("mismatches") else "")


if __name__ == "__main__":
    sys.exit(main())
