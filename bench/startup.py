"""What the hook costs a program before it computes: `python -m bench.startup --json`.

1. `idle`: programs that never use CUDA (a C program that returns at once, `python -c pass`), started with and without
   the hook in turns; `added_ms` is the median of the paired differences.  And that such a process has no thread and no
   socket more than without (`threads`, `sockets`, as the kernel lists them).
2. `crowd`: so many processes that initialise CUDA at the same moment on the simulated GPU under one coordinator:
   seconds until the last one has been granted the GPU and seen one kernel end; the same without the hook beside it.

The programs are started with the hook's environment as `nvshare-run` makes it, but not through `nvshare-run`, whose own
start is not the hook's.

May not go here: what costs later.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rig import BenchError, Rig, compile_program, machine, rig, spread
from client_hook.launcher import ClientOptions, client_environment, find_hook

NOTHING = "int main(void)\n{\n    return 0;\n}\n"

LOOK = """
import json, os
here = "/proc/self/fd/"
names = [os.readlink(here + fd) for fd in os.listdir(here) if os.path.islink(here + fd)]
print(json.dumps({"threads": len(os.listdir("/proc/self/task")),
                  "sockets": sum(name.startswith("socket:") for name in names),
                  "hooked": "libnvshare_hook" in open("/proc/self/maps").read()}))
"""

FIRST_USE = {
    "torch": "torch.zeros(1, device='cuda').add_(1).cpu()",
    "cupy": "cupy.zeros(1).get()",
    "jax": "jax.numpy.zeros(1).block_until_ready()",
}


def hooked_environment(stand: Rig, name: str = "") -> dict[str, str]:
    """Of a client of that coordinator."""
    options = ClientOptions(memory="device", name=name or None)
    return client_environment(
        stand.environment(), hook=find_hook(os.environ), runtime_dir=stand.directory, options=options
    )


def start_ms(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """From before the start to after the end."""
    begin = time.monotonic_ns()
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    taken = time.monotonic_ns() - begin
    if done.returncode != 0:
        raise BenchError(f"{command[0]}: exit code {done.returncode}")
    return taken / 1e6


def added(command: Sequence[str], plain: Mapping[str, str], hooked: Mapping[str, str], runs: int) -> dict[str, Any]:
    """Paired runs, their order swapped each time."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(-1, runs):
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


def idle(stand: Rig, scratch: Path, runs: int) -> dict[str, Any]:
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


def crowd(program: Path, environment: Mapping[str, str], processes: int, limit_s: float) -> dict[str, Any]:
    """Seconds from the common beginning to each one's first finished kernel."""
    waiting, release = os.pipe()
    crew: list[subprocess.Popen[str]] = []
    try:
        for number in range(processes):
            own = {**environment, "NVSHARE_NAME": f"crowd-{number}"}
            crew.append(
                subprocess.Popen([str(program)], env=own, stdin=waiting, stdout=subprocess.PIPE, text=True)
            )
        for process in crew:
            assert process.stdout is not None
            if process.stdout.readline() != "waiting\n":
                raise BenchError(f"a process ended before it began: exit code {process.wait()}")
        begin = time.monotonic_ns()
        os.close(release)
        release = -1
        end = time.monotonic() + limit_s
        stamps: list[float] = []
        for process in crew:
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
        for process in crew:
            if process.poll() is None:
                process.kill()
                process.wait()
    return {
        "processes": processes,
        "all_ready_s": round(max(stamps), 3),
        "median_ready_s": round(statistics.median(stamps), 3),
    }


def import_rows(stand: Rig, modules: Sequence[str], *, pairs: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of the compatibility matrix: start of the interpreter to the end of the import, and to the first result."""
    plain, hooked = stand.environment(), hooked_environment(stand, "start-up")
    for module in modules:
        row: dict[str, Any] = {"case": f"start-up, {module}", "group": "start-up", "mode": "device", "result": "ok"}
        if importlib.util.find_spec(module) is None:
            yield row | {"result": "skipped", "reason": f"{module} not installed"}
            continue
        try:
            yield row | {"startup": imports(module, plain, hooked, pairs=pairs, deadline=deadline)}
        except (BenchError, subprocess.TimeoutExpired) as error:
            yield row | {"result": "skipped" if time.monotonic() >= deadline else "failed", "reason": str(error)}


def imports(
    module: str, plain: Mapping[str, str], hooked: Mapping[str, str], *, pairs: int, deadline: float
) -> dict[str, Any]:
    """Milliseconds, without and with the hook in turns."""
    code = (
        f"import time, {module}\nimported = time.monotonic_ns()\n{FIRST_USE[module]}\n"
        "print(imported, time.monotonic_ns())"
    )
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(-1, pairs):
        for under_hook in (False, True) if number % 2 == 0 else (True, False):
            if number < 0 and under_hook:
                continue  # one start warms the caches
            begin = time.monotonic_ns()
            done = subprocess.run(
                [sys.executable, "-c", code], env=hooked if under_hook else plain, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=max(1.0, deadline - time.monotonic()), check=False,
            )
            if done.returncode != 0:
                raise BenchError(f"{'hooked' if under_hook else 'plain'}: {done.stderr.strip()[-300:]}")
            if number >= 0:
                imported, used = (int(word) - begin for word in done.stdout.split()[-2:])
                taken[under_hook].append((imported / 1e6, used / 1e6))
    found: dict[str, Any] = {}
    for index, what in enumerate(("import", "first_result")):
        before, after = ([pair[index] for pair in taken[kind]] for kind in (False, True))
        found[what] = {
            "plain_ms": round(statistics.median(before), 1),
            "hooked_ms": round(statistics.median(after), 1),
            "added_ms": round(statistics.median(b - a for a, b in zip(before, after, strict=True)), 1),
            "plain_spread_ms": round(max(before) - min(before), 1),
        }
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description="What the hook costs at start-up")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--runs", type=int, default=200, help="pairs of starts of the C program (default 200)")
    parser.add_argument("--processes", type=int, default=200, help="that begin at once (default 200)")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that they may take (default 90)")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as place, rig(simulate="1x8GiB") as stand:
            scratch = Path(place)
            result: dict[str, Any] = {"idle": idle(stand, scratch, options.runs)}
            program = compile_program(Path(__file__).with_name("ready.c"), scratch)
            plain = crowd(program, stand.environment(), options.processes, options.limit)
            result["crowd"] = crowd(program, hooked_environment(stand), options.processes, options.limit)
            result["crowd"]["without_the_hook"] = plain
    except BenchError as error:
        sys.stderr.write(f"bench.startup: {error}\n")
        return 1
    result |= {"added_ms": result["idle"]["c"]["added_ms"], "simulated": True, "machine": machine()}
    result |= {name: result["crowd"][name] for name in ("processes", "all_ready_s")}
    if options.json:
        print(json.dumps(result))
        return 0
    print(f"{result['added_ms']} ms added to a program that never uses CUDA")
    print(f"{result['processes']} processes ready after {result['all_ready_s']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
