"""Frameworks under the hook, unchanged: `python -m nvshare.bench.compatibility --json`.

Each case (catalog.py) runs in `device` mode and, where it is small, in `managed` mode: without the hook, alone under
it, and two at a time under it with a quantum of 20 ms, each time in a process of its own.  Digests are compared with
the one without the hook; where bytes differ, the figures within the case's tolerance, which the row then says.  With
`--processes N`, N processes without the hook and N under it run the case's steps by themselves, in turns: `cost`.

One JSON object a line, as they come: first the machine, then a row for each case and mode.  `--markdown FILE` with
`--from LINES` writes lines of earlier runs as a page.  A case that fails is a row; exit code 1 when a row differs or
failed.

Non-goals: what the cases do (cases/), how a page looks (page.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from nvshare.bench.compatibility import remote
from nvshare.bench.compatibility.cases import SIZE_VARIABLE
from nvshare.bench.compatibility.catalog import CASES, EVERYWHERE, LARGE, MODES, Case
from nvshare.bench.compatibility.page import page
from nvshare.bench.harness.fixture import BenchError, Fixture, coordinator, fixture, machine, uncoordinated
from nvshare.bench.harness.worker_group import Member, closing
from nvshare.coordinator.system.devices import real_card

READY_S = 90.0
GOOD = frozenset({"identical", "within tolerance"})
FINE = frozenset({"ok", "skipped", "unrepeatable"})

Start = Callable[[str], Member]
"""Starts a case's program under a name: `plain` is without the hook."""


class SkippedError(BenchError):
    """The case cannot run here.  The text says why."""


def verdict(baseline: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """The comparison of a result with the one without the hook."""
    if "digest" not in told:
        return f"failed: {told.get('error') or told.get('skipped') or 'no result'}"
    if told["digest"] == baseline["digest"]:
        return "identical"
    ours, theirs, limit = told.get("values", []), baseline.get("values", []), baseline.get("tolerance", 0.0)
    if (
        limit
        and len(ours) == len(theirs)
        and all(abs(a - b) <= limit * max(abs(a), abs(b), 1.0) for a, b in zip(ours, theirs, strict=True))
    ):
        return "within tolerance"
    return "differs"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between what the median of all possible values lies in at least 95 of 100 cases; the extremes of less than six.

    By ranks: that the true median is below the k-th smallest of n values is as likely as fewer than k heads in n throws
    of a coin, whatever their distribution.
    """
    ordered, outside, beyond = sorted(values), 0, 1
    while 2 * (beyond + math.comb(len(ordered), outside + 1)) <= 0.05 * 2 ** len(ordered):
        outside += 1
        beyond += math.comb(len(ordered), outside)
    return ordered[outside], ordered[-1 - outside]


def compare(stand: Fixture, start: Start, case: Case, row: dict[str, Any]) -> None:
    """Fills in the verdicts.  Raises BenchError, and SkippedError if the case does not run without the hook either."""
    members = [start(name) for name in ("plain", "alone", "first", "second")]
    plain, alone, *pair = members
    with closing(members):
        try:
            plain.answer(READY_S)
            baseline = plain.ask("check", case.limit_s)
        except BenchError as error:
            raise SkippedError(f"does not run without the hook either: {error}") from None
        if "digest" not in baseline:
            raise SkippedError(baseline.get("skipped") or f"fails without the hook too: {baseline.get('error')}")
        plain.close()  # what it holds is not its to keep
        row |= {"tolerance": baseline.get("tolerance", 0.0), "versions": baseline.get("versions", {})}
        row["timed"] = baseline.get("timed", True)
        for member in (alone, *pair):
            member.answer(READY_S)
        row["alone"] = verdict(baseline, alone.ask("check", case.limit_s))
        alone.close()
        if row["alone"].startswith("failed"):
            raise BenchError(f"alone {row['alone']}")
        before = total(stand, "handovers")
        for member in pair:
            member.tell("check")
        row["two"] = [verdict(baseline, member.answer(2 * case.limit_s)) for member in pair]
        row["handovers"] = total(stand, "handovers") - before
        row["moved_gib"] = round(total(stand, "evicted_bytes", "restored_bytes") / 2**30, 1)
    for one in row["two"]:
        if one.startswith("failed"):
            raise BenchError(f"two at a time {one}")
    if GOOD.issuperset((row["alone"], *row["two"])):
        row["result"] = "ok"
        return
    again = start("plain")
    with closing([again]):
        again.answer(READY_S)
        row["repeatable"] = verdict(baseline, again.ask("check", case.limit_s)) in GOOD
    row["result"] = "differs" if row["repeatable"] else "unrepeatable"
    row["reason"] = "" if row["repeatable"] else "the program gives other results each time without the hook, too"


def total(stand: Fixture, *names: str) -> int:
    """The sum of these counters over all GPUs, so far."""
    return sum(gpu.get(name) or 0 for gpu in stand.control("status")["gpus"] for name in names)


def cost(start: Start, case: Case, seconds: float, processes: int) -> dict[str, Any]:
    """Time that the hook adds to a step; processes without it and under it run by themselves, in turns."""
    taken_ns: dict[str, list[float]] = {"plain": [], "hooked": []}
    for number in range(processes):
        for name in list(taken_ns) if number % 2 == 0 else reversed(list(taken_ns)):
            member = start(name)
            with closing([member]):
                member.answer(READY_S)
                told = member.ask(f"time {seconds}", case.limit_s + seconds)
            if "ns" not in told:
                raise BenchError(f"{member.name}: {told.get('error') or told}")
            taken_ns[name].append(told["ns"])
    added = [after / before - 1 for before, after in zip(*taken_ns.values(), strict=True)]
    least, most = interval(added)
    return {
        "processes": processes,
        "plain_steps_per_s": round(1e9 / statistics.median(taken_ns["plain"]), 2),
        "hooked_steps_per_s": round(1e9 / statistics.median(taken_ns["hooked"]), 2),
        "slowdown": round(statistics.median(added), 5),
        "slowdown_min": round(least, 5),
        "slowdown_max": round(most, 5),
    }


def command_of(case: Case, options: argparse.Namespace) -> list[str]:
    """Command of a case's program.  Raises SkippedError."""
    if time.monotonic() > options.deadline:
        raise SkippedError("no time left")
    if absent := [name for name in case.modules if importlib.util.find_spec(name) is None]:
        raise SkippedError(f"{', '.join(absent)} not installed")
    if case.name.startswith("remote."):
        if lacking := remote.missing():
            raise SkippedError(lacking)
        return [sys.executable, "-m", "nvshare.bench.compatibility.remote", case.name.removeprefix("remote.")]
    if case.name != "runtime":
        return [sys.executable, "-m", "nvshare.bench.compatibility.cases", case.name]
    target, source = options.scratch / "runtime_program", Path(__file__).with_name("cases") / "runtime_program.cu"
    if not target.exists():
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if nvcc is None:
            raise SkippedError("no nvcc")
        build = [nvcc, "-cudart", "static", "-O2", "-o", str(target), str(source)]
        done = subprocess.run(build, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SkippedError(f"nvcc: {done.stderr.strip()[-300:]}")
    return [str(target)]


def environment(case: Case, scratch: Path, size_bytes: int) -> dict[str, str]:
    """Environment of a case's programs, hooked or not."""
    own = {SIZE_VARIABLE: str(size_bytes), "NVSHARE_BENCH_MODELS": str(scratch)}
    if "NVSHARE_BENCH_MODELS" in os.environ:
        own["NVSHARE_BENCH_MODELS"] = os.environ["NVSHARE_BENCH_MODELS"]
    caches = ("TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR")
    return {**EVERYWHERE, **{name: str(scratch / name.lower()) for name in caches}, **own, **case.environment}


@contextmanager
def place(simulate: str | None, case: Case, mode: str, size_bytes: int, capacity: str | None) -> Iterator[Fixture]:
    """The coordinator of a row, and its neighbour.  Programs of gigabytes have the default settings."""
    if mode == "beyond":
        card = ["--capacity", str(2 * size_bytes)]
        with uncoordinated(simulate=simulate) as stand, coordinator(stand, card), rival(stand, 7 * size_bytes // 6):
            yield stand
        return
    # The turns of a program with idle neighbours: nobody else wants them.
    more = ["--policy", "auto", *(["--capacity", capacity] if capacity and mode == "swap" else [])]
    if case.modes >= LARGE:
        with uncoordinated(simulate=simulate) as stand, coordinator(stand, more):
            neighbour = training(stand, size_bytes) if mode == "beside" else nullcontext()
            with neighbour:
                yield stand
        return
    with fixture(simulate=simulate, quantum="20ms", more=more) as stand:
        yield stand


@contextmanager
def rival(stand: Fixture, size_bytes: int) -> Iterator[None]:
    """A program that works all the time and compares its own memory.  Raises BenchError if it lost some."""
    command = [sys.executable, "-m", "nvshare.bench.workloads.resident", "--mib", str(size_bytes >> 20)]
    command += ["--steps", str(1 << 40)]
    member = Member(stand, command, hooked=True, name="rival", options=MODES["beyond"])
    with closing([member]):
        member.tell("begin")
        yield
        os.kill(member.pid, signal.SIGTERM)
        if lost := member.answer(READY_S)["mismatches"]:
            raise BenchError(f"the rival found {lost} pages with other values than it had written")


@contextmanager
def training(stand: Fixture, size_bytes: int) -> Iterator[None]:
    """A training that works all the time.  Raises BenchError if it has ended."""
    where = "cuda" if stand.simulate is None else "driver"
    command = [sys.executable, "-m", "nvshare.bench.workloads.day_job", "training", where, str(size_bytes >> 20)]
    member = Member(stand, command, hooked=True, name="training", options=MODES["beside"])
    try:
        member.answer(READY_S)
        member.tell("steps inf")
        yield
        if member.has_spoken():
            raise member.failure("has ended")
    finally:
        member.kill()


def run_case(case: Case, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {
        "case": case.row, "group": case.name.partition(".")[0], "mode": mode, "result": "", "reason": "", "alone": None,
        "two": [], "repeatable": True, "cost": None, "tolerance": 0.0, "handovers": None, "moved_gib": None,
        "versions": {},
    }  # fmt: skip
    size_bytes = options.size_mib << 20
    extra = environment(case, options.scratch, size_bytes)
    try:
        command = command_of(case, options)
        with place(options.gpus, case, mode, size_bytes, options.capacity) as stand:

            def start(name: str) -> Member:
                hooked = name != "plain"
                chosen = MODES[mode] if hooked else ()
                return Member(
                    stand, command, hooked=hooked, name=f"{case.name}-{name}", options=chosen, extra=extra,
                    own_group=True,
                )  # fmt: skip

            compare(stand, start, case, row)
            if options.processes and row.pop("timed") and mode not in {"beside", "beyond"}:
                row["cost"] = cost(start, case, options.seconds, options.processes)
    except SkippedError as why:
        row |= {"result": "skipped", "reason": str(why)}
    except (BenchError, subprocess.TimeoutExpired) as error:
        row |= {"result": "failed", "reason": str(error)}
    row.pop("timed", None)
    return row


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nvshare.bench.compatibility", description="What works under the hook"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line (there is no other form)")
    parser.add_argument("--simulate", action="store_true", help="on the simulated GPU although there is a card")
    parser.add_argument("--case", action="append", default=[], help="only this case or group, such as torch.eager or "
                        "cupy; may be repeated; programs: all of gigabytes")
    parser.add_argument(
        "--size-mib", type=int, help="of each program of gigabytes (default 6144; on simulated GPUs 64)"
    )
    parser.add_argument("--capacity", help="of each card in mode swap, such as 24GiB (default: the card's)")
    parser.add_argument("--mode", action="append", choices=sorted(MODES), help="default: device, then managed")
    parser.add_argument("--processes", type=int, default=0, metavar="N",
                        help="measure the cost with N processes without the hook and N under it (default 0)")
    parser.add_argument("--seconds", type=float, default=2.0, help="that each of them is timed (default 2)")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds; no case begins later (default 200)")
    parser.add_argument("--markdown", type=Path, help="with --from: write the page there")
    parser.add_argument("--from", dest="lines", type=Path, help="measure nothing: make the page from these lines")
    options = parser.parse_args()
    if (options.lines is None) != (options.markdown is None):
        parser.error("--from and --markdown go together")
    return options


def main() -> int:
    """Command line."""
    options = parse()
    if options.lines is not None:
        told = []
        for line in options.lines.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the last line of a run that was stopped may be half
                told.append(json.loads(line))
        options.markdown.write_text(page(told), encoding="utf-8")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a time limit leaves no process behind
    options.deadline = time.monotonic() + options.budget
    options.gpus = "2x8GiB" if options.simulate or not real_card() else None
    options.size_mib = options.size_mib or (6144 if options.gpus is None else 64)
    os.environ.pop("NVSHARE_MEMORY_LIMIT", None)
    about = {"machine": machine(), "simulated": options.gpus is not None, "python": sys.version.split()[0]}
    print(json.dumps(about), flush=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="nvshare-matrix-") as scratch:
        options.scratch = Path(scratch)
        for mode in options.mode or ("device", "managed"):
            for case in CASES:
                if case.chosen(mode, options.case):
                    row = run_case(case, mode, options)
                    print(json.dumps(row), flush=True)
                    good &= row["result"] in FINE
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
