"""What memory in chunks costs while it stays on the card: `python -m nvshare.bench.memory.resident --json`.

One program (resident_loop.c) under `--memory swap`, alone: two sets of buffers through the hook, two by the driver's
own cuMemAlloc, and the same kernels over either in short turns: swap, plain, plain, swap, in the next block the other
way round (in_process.py).  Everything passes the gate; only the memory differs.

JSON: `kernels` by name (copy, triad, gather: random words of a whole buffer, matmul: bf16 by cuBLAS, where that is
installed): `slowdown` of swap against plain with the ends of its 95 % interval, `share`, and `alike_plain`,
`alike_swap`: by how much two sets of the same kind differ, which where they lie on the card decides.  `same`: both
computed the same.
`piece_bytes`: what the driver has for one allocation in either kind: chunks, and whole buffers.

On the simulated GPU kernels take a fixed time: the figures there say nothing about a card.

Non-goals: what allocating costs (bench/alloc.py), what moving costs (bench/swap.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from nvshare.bench.harness.command import parser_for, run_benchmark, simulated
from nvshare.bench.harness.fixture import PROGRAMS, BenchError, compile_program, fixture, machine
from nvshare.bench.harness.in_process import WAYS, Block, best_way, in_turns, interval, repeats
from nvshare.bench.harness.worker_group import Member, closing, nanoseconds, pinned, reserve_core, steps_for

KERNELS: Final = ("copy", "triad", "gather", "matmul")
SETS: Final = ("swap-0", "plain-0", "plain-1", "swap-1")
TURN_S: Final = 0.01
TIMEOUT_S: Final = 60.0
SOURCE = PROGRAMS / "resident_loop.c"


def cublas_places() -> Iterator[Path]:
    """Where cuBLAS may be: in NVIDIA's wheels, in a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(place).glob("*/lib/libcublas.so.*"))
    for place in ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"):
        yield from sorted(Path(place).glob("libcublas.so.*"))


def alike(ratio: float) -> float:
    """By how much the slower one of two is slower."""
    return round(max(ratio, 1 / ratio) - 1, 5)


def one_kernel(member: Member, kernel: str, *, seconds: float, core: int | None) -> dict[str, Any]:
    """Its figures."""
    digests = {member.ask(f"check {kernel}:{one}", TIMEOUT_S).get("digest") for one in SETS}
    steps = steps_for(member, f"{kernel}:{SETS[0]}", TURN_S, TIMEOUT_S)

    def turn(place: int) -> float:
        return nanoseconds(member, f"time {kernel}:{SETS[place]} {steps}", TIMEOUT_S) / steps

    with pinned([member], core):
        for place in range(len(SETS)):
            turn(place)
        blocks = in_turns(turn, seconds)
    plain_sets = repeats(blocks)
    swap_sets = repeats([Block(block.direct, block.hooked) for block in blocks])
    way = WAYS[best_way([plain_sets])]
    slowdown = interval("slowdown", [blocks], way)
    return {
        **slowdown,
        "share": round(1 / (1 + slowdown["slowdown"]), 5),
        "by_way": {name: round(one(blocks) - 1, 5) for name, one in WAYS.items()},
        "alike_plain": alike(way(plain_sets)), "alike_swap": alike(way(swap_sets)),
        "plain_ns": round(sum(sum(block.direct) for block in blocks) / (2 * len(blocks))),
        "same": len(digests) == 1 and None not in digests, "steps": steps, "blocks": len(blocks),
    }  # fmt: skip


def measure(*, simulate: str | None, size_bytes: int, seconds: float) -> dict[str, Any]:
    """The whole benchmark on one coordinator.  Raises BenchError."""
    core = reserve_core()
    cublas = next(cublas_places(), None) if simulate is None else None
    with tempfile.TemporaryDirectory() as scratch, fixture(simulate=simulate) as stand:
        program = compile_program(SOURCE, Path(scratch))
        command = [str(program), str(size_bytes), *([str(cublas)] if cublas is not None else [])]
        member = Member(stand, command, hooked=True, name="resident", options=("--memory=swap",))
        with closing([member]):
            member.answer(TIMEOUT_S)
            about = member.ask("about", TIMEOUT_S)
            if not about["swap_piece_bytes"] < size_bytes <= about["plain_piece_bytes"]:
                raise BenchError(f"both kinds of memory are in pieces of the same size (larger buffers?): {about}")
            wanted = KERNELS if cublas is not None else KERNELS[:-1]
            kernels = {name: one_kernel(member, name, seconds=seconds, core=core) for name in wanted}
    return {
        "kernels": kernels,
        "worst_slowdown": max(one["slowdown"] for one in kernels.values()),
        "buffer_bytes": size_bytes,
        "piece_bytes": {"swap": about["swap_piece_bytes"], "plain": about["plain_piece_bytes"]},
        "matrix": about["matrix"],
        "without": {} if cublas is not None else {"matmul": "cuBLAS is not installed here, or the GPU is simulated"},
        "pinned": core is not None,
        "simulated": simulate is not None,
        "machine": machine(),
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = simulated(options, "1x16GiB")
    size_mib = options.mib or (128 if simulate is not None else 1024)
    return measure(simulate=simulate, size_bytes=size_mib << 20, seconds=options.seconds)


def _show(result: dict[str, Any]) -> None:
    for name, one in result["kernels"].items():
        low, middle, high = (f"{100 * one[key]:+.2f} %" for key in ("slowdown_min", "slowdown", "slowdown_max"))
        print(f"{name}: {middle} ({low} to {high}); two plain sets differ by {100 * one['alike_plain']:.2f} %")


def _fault(result: dict[str, Any]) -> str:
    return "" if all(one["same"] for one in result["kernels"].values()) else "the sets did not compute the same"


def main() -> int:
    """Command line."""
    parser = parser_for("memory.resident", "Cost of memory in chunks that stays")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring each kernel (default 5)")
    parser.add_argument("--mib", type=int, help="size of a buffer, a power of two; there are 12 (default 1024)")
    return run_benchmark(parser, _measure, _show, _fault)


if __name__ == "__main__":
    sys.exit(main())
