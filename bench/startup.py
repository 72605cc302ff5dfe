"""Cost of the hook before a program computes: `python -m nvshare.bench.startup --json`.

1. `idle`: programs that never use CUDA (a C program that returns at once, `python -c pass`), started with and without
   the hook in turns; `added_ms` is the median of the paired differences.  And that such a process has no thread and no
   socket more than without (`threads`, `sockets`, as the kernel lists them).
2. `fork`: fork, `_exit` and `waitpid` in a Python process that has used CuPy and touched 256 MiB, with the hook and
   without it in turns; `ratio` is that of the medians.  `null` where CuPy is not installed.
3. `crowd`: so many processes that initialise CUDA at the same moment on the simulated GPU under one coordinator:
   seconds until the last one has been granted the GPU and seen one kernel end; the same without the hook beside it.

And, for the compatibility matrix (`import_rows`), frameworks until they are imported, until they know their GPUs, to
their first result from one, and to their end: by the clock, and by the time of processors, which other programs disturb
less.

The programs are started with the hook's environment as `nvshare-run` makes it, but not through `nvshare-run`, whose own
start is not the hook's.

Non-goals: what costs later.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvshare.bench.harness.command import add_figures, parser_for, run_benchmark
from nvshare.bench.harness.fixture import PROGRAMS, BenchError, Fixture, compile_program, fixture, spread
from nvshare.bench.harness.progress import track
from nvshare.client_hook.launcher import ClientOptions, client_environment, find_hook

NOTHING = "int main(void)\n{\n    return 0;\n}\n"

LOOK = """
import json, os
here = "/proc/self/fd/"
names = [os.readlink(here + fd) for fd in os.listdir(here) if os.path.islink(here + fd)]
print(json.dumps({"threads": len(os.listdir("/proc/self/task")),
                  "sockets": sum(name.startswith("socket:") for name in names),
                  "hooked": "libnvshare_hook" in open("/proc/self/maps").read()}))
"""

FORKS = """
import os, statistics, sys, time
import cupy, numpy
cupy.zeros(1).get()
touched = numpy.ones(1 << 25)
taken = []
for _ in range(int(sys.argv[1])):
    begin = time.monotonic_ns()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    taken.append(time.monotonic_ns() - begin)
print(statistics.median(taken))
"""
FORKS_EACH = 40

FIRST_USE = {
    "torch": ("torch.cuda.is_available()", "torch.zeros(1, device='cuda').add_(1).cpu()"),
    "cupy": ("cupy.cuda.runtime.getDeviceCount()", "cupy.zeros(1).get()"),
    "jax": ("jax.devices()", "jax.numpy.zeros(1).block_until_ready()"),
}
"""Code that makes a framework look for GPUs, and code that gives a first result."""

STAGES = (
    "to the import's end", "from there until it knows its GPUs", "from there to the first result",
    "from there to the end",
)  # fmt: skip
PAIRS_MIN = 6
"""The fewest whose extremes enclose the median with a probability of 95 %."""

Stages = list[tuple[float, float]]
"""Milliseconds of the clock and of processors of one start, in each of STAGES and in all of them."""


def hooked_environment(stand: Fixture, name: str = "") -> dict[str, str]:
    """Environment of a client of that coordinator."""
    options = ClientOptions(memory="device", name=name or None)
    return client_environment(
        stand.environment(), hook=find_hook(os.environ), runtime_dir=stand.directory, options=options
    )


def start_ms(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Milliseconds from before the start to after the end."""
    begin = time.monotonic_ns()
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    taken = time.monotonic_ns() - begin
    if done.returncode != 0:
        raise BenchError(f"{command[0]}: exit code {done.returncode}")
    return taken / 1e6


def added(command: Sequence[str], plain: Mapping[str, str], hooked: Mapping[str, str], runs: int) -> dict[str, Any]:
    """Paired runs, their order swapped each time."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in track(range(-1, runs), "pair"):
        for under_hook in (False, True) if number % 2 == 0 else (True, False):
            value = start_ms(command, hooked if under_hook else plain)
            if number >= 0:  # the first pair warms the caches
                taken[under_hook].append(value)
    differences = [after - before for before, after in zip(taken[False], taken[True], strict=True)]
    return {
        "added_ms": round(statistics.median(differences), 3),
        "plain_ms": spread([round(value, 3) for value in taken[False]]),
        "hooked_ms": spread([round(value, 3) for value in taken[True]]),
    }


def idle(stand: Fixture, scratch: Path, runs: int) -> dict[str, Any]:
    """Programs that never use CUDA."""
    source = scratch / "nothing.c"
    source.write_text(NOTHING, encoding="utf-8")
    plain, hooked = stand.environment(), hooked_environment(stand)
    python = [sys.executable, "-S", "-c", "pass"]
    looks = {}
    for name, environment in (("plain", plain), ("hooked", hooked)):
        told = subprocess.run(
            [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=False
        )
        if told.returncode != 0:
            raise BenchError(f"python: {told.stderr.strip()}")
        looks[name] = json.loads(told.stdout)
    if not looks["hooked"]["hooked"]:
        raise BenchError("the hook was not loaded into the process that was to be looked at")
    return {
        "c": added([str(compile_program(source, scratch))], plain, hooked, runs),
        "python": added(python, plain, hooked, max(1, runs // 5)),
        "threads": looks["hooked"]["threads"],
        "sockets": looks["hooked"]["sockets"],
        "without_the_hook": looks["plain"],
    }


def forks(stand: Fixture, pairs: int) -> dict[str, Any] | None:
    """Medians of each process's median, in milliseconds."""
    if importlib.util.find_spec("cupy") is None:
        return None
    sides = {"plain": stand.environment(), "hooked": hooked_environment(stand, "forks")}
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for number in track(range(pairs), "pair"):
        for side in sorted(sides, reverse=number % 2 == 0):
            command = [sys.executable, "-c", FORKS, str(FORKS_EACH)]
            done = subprocess.run(command, env=sides[side], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise BenchError(f"python: {done.stderr.strip()[-300:]}")
            taken[side].append(float(done.stdout) / 1e6)
    median = {side: statistics.median(values) for side, values in taken.items()}
    ratio = round(median["hooked"] / median["plain"], 3)
    return {f"{side}_ms": spread([round(value, 3) for value in taken[side]]) for side in sides} | {"ratio": ratio}


def crowd(program: Path, environment: Mapping[str, str], processes: int, limit_s: float) -> dict[str, Any]:
    """Seconds from the common beginning to each one's first finished kernel."""
    waiting, release = os.pipe()
    group: list[subprocess.Popen[str]] = []
    try:
        for number in range(processes):
            own = {**environment, "NVSHARE_NAME": f"crowd-{number}"}
            group.append(subprocess.Popen([str(program)], env=own, stdin=waiting, stdout=subprocess.PIPE, text=True))
        for process in group:
            assert process.stdout is not None
            if process.stdout.readline() != "waiting\n":
                raise BenchError(f"a process ended before it began: exit code {process.wait()}")
        begin = time.monotonic_ns()
        os.close(release)
        release = -1
        end = time.monotonic() + limit_s
        stamps: list[float] = []
        for process in group:
            try:
                out, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BenchError(f"after {limit_s:.0f} s {len(stamps)} of {processes} processes are ready") from None
            if process.returncode != 0:
                raise BenchError(f"a process failed: exit code {process.returncode}")
            stamps.append((int(out) - begin) / 1e9)
    finally:
        os.close(waiting)
        if release >= 0:
            os.close(release)
        for process in group:
            if process.poll() is None:
                process.kill()
                process.wait()
    return {
        "processes": processes,
        "all_ready_s": round(max(stamps), 3),
        "median_ready_s": round(statistics.median(stamps), 3),
    }


def import_rows(stand: Fixture, modules: Sequence[str], *, pairs: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of the compatibility matrix: a start of the interpreter, in STAGES."""
    plain, hooked = stand.environment(), hooked_environment(stand, "start-up")
    for module in modules:
        row: dict[str, Any] = {"case": f"start-up, {module}", "group": "start-up", "mode": "device", "result": "ok"}
        if importlib.util.find_spec(module) is None:
            yield row | {"result": "skipped", "reason": f"{module} not installed"}
            continue
        try:
            told = imports(module, plain, hooked, pairs=pairs, deadline=deadline)
        except BenchError as error:
            yield row | {"result": "failed", "reason": str(error)}
            continue
        if told["pairs"] < PAIRS_MIN:
            why = f"no time left: {told['pairs']} pairs, and fewer than {PAIRS_MIN} say nothing"
            yield row | {"result": "skipped", "reason": why}
            continue
        yield row | {"startup": told}


def one_start(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Stages:
    """Times of one start's stages, its threads included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic_ns()
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    ended, after = time.monotonic_ns(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise BenchError(done.stderr.strip()[-300:] or f"exit code {done.returncode}")
    used_s = sum(getattr(after, which) - getattr(before, which) for which in ("ru_utime", "ru_stime"))
    told = [int(word) for word in done.stdout.split()[-2 * (len(STAGES) - 1) :]]
    moments = [(begin, 0.0), *zip(told[0::2], told[1::2], strict=True), (ended, used_s * 1e9)]
    stages = [*itertools.pairwise(moments), (moments[0], moments[-1])]
    return [((end[0] - start[0]) / 1e6, (end[1] - start[1]) / 1e6) for start, end in stages]


def imports(
    module: str, plain: Mapping[str, str], hooked: Mapping[str, str], *, pairs: int, deadline: float
) -> dict[str, Any]:
    """Starts without and with the hook in turns, as many pairs as there is time for."""
    moment = "moments += [time.monotonic_ns(), time.process_time_ns()]"
    steps = "".join(f"{step}\n{moment}\n" for step in (f"import {module}", *FIRST_USE[module]))
    code = f"import time\nmoments = []\n{steps}print(*moments)"
    command = [sys.executable, "-c", code]
    taken: dict[bool, list[Stages]] = {False: [], True: []}
    with suppress(subprocess.TimeoutExpired):  # no time left
        for number in track(range(-1, pairs), "pair"):
            if time.monotonic() >= deadline:
                break
            pair: dict[bool, Stages] = {}
            for under_hook in (False, True) if number % 2 == 0 else (True, False):
                environment = hooked if under_hook else plain
                pair[under_hook] = one_start(command, environment, max(0.1, deadline - time.monotonic()))
            for under_hook in pair if number >= 0 else ():  # the first pair warms the caches
                taken[under_hook].append(pair[under_hook])
    found: dict[str, Any] = {"pairs": len(taken[False])}
    if found["pairs"] < PAIRS_MIN:
        return found
    for at, stage in enumerate((*STAGES, "all")):
        found[stage] = {}
        for kind, what in enumerate(("wall", "cpu")):
            before, after = ([stages[at][kind] for stages in taken[side]] for side in (False, True))
            found[stage] |= paired(what, before, after)
    return found


def paired(what: str, before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Medians, and between what the median of all possible differences lies in at least 95 of 100 cases.

    By ranks: that the true median is below the k-th smallest of n differences is as likely as fewer than k heads in n
    throws of a coin, whatever their distribution.  With fewer than PAIRS_MIN not even the extremes are good enough.

    `quickest`: the quickest after, less the quickest before.  What disturbs a start only ever makes it slower, so where
    starts differ by more than is asked for this tells more, though nothing of how sure it is.
    """
    added = sorted(b - a for a, b in zip(before, after, strict=True))
    beyond, total = 0, 2 ** len(added)
    outside = -1
    while 2 * (beyond + math.comb(len(added), outside + 1)) <= 0.05 * total:
        outside += 1
        beyond += math.comb(len(added), outside)
    found = {
        f"plain_{what}_ms": statistics.median(before), f"added_{what}_ms": statistics.median(added),
        f"added_{what}_ms_min": added[outside], f"added_{what}_ms_max": added[-1 - outside],
        f"quickest_{what}_ms": min(after) - min(before),
    }  # fmt: skip
    return {name: round(value, 1) for name, value in found.items()}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place, fixture(simulate="1x8GiB") as stand:
        scratch = Path(place)
        result: dict[str, Any] = {"idle": idle(stand, scratch, options.runs), "fork": forks(stand, options.forks)}
        program = compile_program(PROGRAMS / "ready.c", scratch)
        plain = crowd(program, stand.environment(), options.processes, options.limit)
        result["crowd"] = crowd(program, hooked_environment(stand), options.processes, options.limit)
        result["crowd"]["without_the_hook"] = plain
    result |= {"added_ms": result["idle"]["c"]["added_ms"], "simulated": True}
    return result | {name: result["crowd"][name] for name in ("processes", "all_ready_s")}


def _show(result: dict[str, Any]) -> None:
    print(f"{result['added_ms']} ms added to a program that never uses CUDA")
    if result["fork"] is not None:
        print(f"a fork of a process that has used CuPy takes {result['fork']['ratio']} times as long")
    print(f"{result['processes']} processes ready after {result['all_ready_s']} s")


def main() -> int:
    """Command line."""
    parser = parser_for("startup", "What the hook costs at start-up", simulate=False)
    add_figures(
        parser,
        runs=(200, "pairs of starts of the C program"),
        forks=(10, "pairs of processes that fork"),
        processes=(200, "that begin at once"),
        limit=(90.0, "seconds that they may take"),
    )
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
