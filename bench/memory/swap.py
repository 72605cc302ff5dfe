"""Speed of memory moves in mode `swap`, beside plain pinned copies: `python -m nvshare.bench.memory.swap`.

Method: two programs under the hook, each with `--gib` of allocations of mixed sizes, told by a coordinator that is
played here: it sends Evict and Restore and takes the time and bytes that the hook's last MoveProgress states.  A
hand-over is one program's eviction and the other's restoration at the same time, within the capacity: the restoration
begins with the room that there is and gets credit as the eviction tells what has left; all bytes over the time until
both are done.  The first program's first eviction finds no pinned memory ready, the second one's all of it.  After the
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvshare.bench.harness.command import parser_for, run_benchmark, track
from nvshare.bench.harness.fixture import BenchError
from nvshare.bench.harness.worker_group import closing
from nvshare.bench.memory.scripted import GIB, MIB, Coordinator, Program, scene
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.devices import real_card

MEETING_NS = 2 * 10**9
"""After that two programs are ready to copy at the same moment."""
UNIT_SIZES = (1, 5, 37, 200, 500, 1000, 4000, 3_000_000, 20_971_520, 2_097_152, 67_108_864, 150_000_000)
"""A mixture, small and large; what is missing to the wanted sum is one more allocation."""


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
        told[name] = rate([coordinator.finished(program, coordinator.order(program, messages.Evict))])
    evicts, restores, handovers = [], [], []
    for _ in range(rounds):
        restores.append(rate([coordinator.finished(first, coordinator.order(first, messages.Restore))]))
        evicts.append(rate([coordinator.finished(first, coordinator.order(first, messages.Evict))]))
    coordinator.finished(first, coordinator.order(first, messages.Restore))
    for _ in range(rounds):
        for going, coming in ((first, second), (second, first)):
            handovers.append(rate(coordinator.hand_over(going, coming, sum(sizes))))
    coordinator.finished(first, coordinator.order(first, messages.Evict))  # the checks bring in what they need
    wrong = 0
    for program in programs:
        coordinator.finished(program, coordinator.order(program, messages.Restore))
        wrong += coordinator.under_lease(program, "check")
        coordinator.finished(program, coordinator.order(program, messages.Evict))
    if wrong:
        raise BenchError(f"{wrong} parts of memory are not what was written")
    series = {"evict": evicts, "restore": restores, "handover": handovers}
    return {
        **told,
        **{f"{name}_gib_s": statistics.median(values) for name, values in series.items()},
        "details": {name: [round(value, 2) for value in values] for name, values in series.items()},
    }


def _have_ready(coordinator: Coordinator, program: Program, size: int) -> None:
    """Has host memory made ready, and waits until the program has grown by nearly so much.

    That is all that can be seen from outside; without enough memory for it this goes on after a bounded time.
    """
    status = Path(f"/proc/{program.pid}/statm")
    pages = os.sysconf("SC_PAGE_SIZE")
    before = int(status.read_text().split()[1]) * pages
    coordinator.settings(program, prepare_bytes=size)
    deadline = time.monotonic() + 20
    while int(status.read_text().split()[1]) * pages < before + size * 31 // 32 and time.monotonic() < deadline:
        time.sleep(0.02)


def both_ways(programs: Sequence[Program], size: int, rounds: int) -> float:
    """GiB/s together of one program that copies out and one that copies in, without the hook."""
    begin_ns = time.monotonic_ns() + MEETING_NS
    for out, program in enumerate(programs):
        program.tell(f"stream {out} {size} {rounds} {begin_ns}")
    spans: list[tuple[int, int]] = [tuple(program.result()) for program in programs]
    overlap = min(end for _, end in spans) - max(begin for begin, _ in spans)
    if overlap <= 0:
        raise BenchError("two programs that copy did not do so at the same time")
    return sum(size * rounds / GIB / ((end - begin) / 1e9) for begin, end in spans)


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
        amount = 1 << 50 if everything else dice.randrange(MIB, 64 * MIB)
        out = coordinator.order(program, messages.Evict, amount)
        moved += coordinator.finished(program, out)[0]
        if not everything:  # what this leaves out, the program finds missing and has brought in
            into = coordinator.order(program, messages.Restore, dice.randrange(2 * MIB, 64 * MIB))
            moved += coordinator.finished(program, into, may_be_nothing=True)[0]
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
            copies = baselines[0].do(f"copies {size} {options.rounds}")
            together = both_ways(baselines, size, 8 * options.rounds)
        with Coordinator(stand.directory / "hooks.sock", int(options.capacity_gib * GIB)) as coordinator:
            programs = [Program(stand, hooked) for _ in range(2)]
            with closing(programs):
                told = measure(coordinator, programs, mixture(total), options.rounds)
    return {
        "memcpy_gib_s": {name: round(statistics.median(values), 2) for name, values in copies.items()},
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
