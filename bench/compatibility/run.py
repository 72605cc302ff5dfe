"""Frameworks under the hook, unchanged and at full speed: `python -m nvshare.bench.compatibility --json`.

For each case (cases/catalog.py), in `device` mode and, where it is small, in `managed` mode: the program
without the hook, alone under it, and two at a time under it with a quantum of 20 ms.  Their digests are compared with
the one without the hook; where bytes differ, the figures within the case's tolerance, which the row then says.  What
the hook costs is told by processes without the hook and under it that run their steps in turns: `cost`.
Start-up (`--case start-up`) compares pairs of processes (startup.py), after everything else.

One JSON object a line, as they come: first the machine, then rows, of which a later one replaces an earlier one of the
same case and mode.  `--markdown FILE` writes all as a page, also from earlier runs (`--from LINES`).  A case that fails
is a row; exit code 1 when a row differs or failed.

Non-goals: what the cases do, how a page looks (page.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nvshare.bench.compatibility import page
from nvshare.bench.compatibility.cases.catalog import FIRST, MODES, PROGRAMS, THEN, Case, Group
from nvshare.bench.compatibility.rows import IMPORT_PAIRS, Row, Run, WorkerGroup, emit
from nvshare.bench.compatibility.startup import PAIRS_MIN, import_rows
from nvshare.bench.harness.fixture import PROGRAMS as C_PROGRAMS
from nvshare.bench.harness.fixture import (
    BenchError,
    Fixture,
    compile_program,
    coordinator,
    fixture,
    machine,
    uncoordinated,
)
from nvshare.bench.harness.worker_group import Member, OutOfTime, closing, reserve_core
from nvshare.coordinator.system.devices import real_card

CASES_DIRECTORY = Path(__file__).with_name("cases")
READY_TIMEOUT_S = 90.0
FINE = frozenset({"ok", "skipped", "unrepeatable"})


class RivalError(BenchError):
    """The rival of mode `beyond` has failed or lost data."""


def attempt(run: Run, stand: Fixture, group: Group, command: Sequence[str], rows: Sequence[Row]) -> None:
    """One worker group works through the rows until all are closed or one breaks it."""
    mode = rows[0].mode

    def member(kind: str, *, hooked: bool) -> Member:
        return Member(
            stand,
            command,
            hooked=hooked,
            name=f"{group.name}-{kind}",
            options=MODES[mode] if hooked else (),
            extra=run.environment(group),
            deadline=run.deadline,
        )

    with ExitStack() as stack:
        workers = WorkerGroup(
            stand,
            [member(f"plain-{number}", hooked=False) for number in range(run.processes)],
            [member(f"hooked-{number}", hooked=True) for number in range(run.processes)],
            member("second", hooked=True),
        )
        everybody = [*workers.plain, *workers.hooked, workers.second]
        stack.enter_context(closing(everybody))
        try:
            versions = workers.plain[0].answer(READY_TIMEOUT_S).get("versions", {})
        except OutOfTime:
            raise
        except BenchError as error:
            for row in rows:
                row.close("skipped", f"does not start without the hook either: {error}")
                emit(row.as_json())
            return
        for one in everybody[1:]:
            one.answer(READY_TIMEOUT_S)
        for row in rows:
            row.versions = row.versions | versions
            if row.verdicts.alone is None and not row.finished(workers.before):
                return
        if not any(row.open and row.timed for row in rows):  # what they hold is not theirs to keep
            for one in workers.plain:
                one.close()
        for row in rows:
            if row.open and row.verdicts.alone is None and not row.finished(lambda row: workers.alone(run, row)):
                return
        for one in (*workers.plain[1:], *workers.hooked[1:]):
            one.close()  # with two at a time there are no more than two
        for row in rows:
            if row.open and not row.finished(workers.two):
                return


def run_rows(run: Run, stand: Fixture, group: Group, command: Sequence[str], rows: Sequence[Row]) -> None:
    """All rows, with a fresh worker group after each failure."""
    while left := [row for row in rows if row.open]:
        try:
            attempt(run, stand, group, command, left)
        except OutOfTime:
            raise
        except (BenchError, subprocess.TimeoutExpired) as error:
            at_work = [row for row in left if row.at_work]
            for row in at_work or left:  # nobody at work: it does not even start under the hook
                row.at_work = False
                row.close("failed", str(error))
                emit(row.as_json())


def missing(run: Run, group: Group) -> str:
    """Why a group cannot run here, or nothing."""
    absent = [name for name in group.modules if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    program = run.programs.get(group.build)
    return program if isinstance(program, str) else ""


def command_of(run: Run, group: Group) -> list[str]:
    """Command of a group's program."""
    if group.build:
        return [str(run.programs[group.build])]
    return [sys.executable, "-m", "nvshare.bench.compatibility.cases.host", group.module or group.modules[0]]


def run_group(run: Run, group: Group, mode: str, cases: Sequence[Case]) -> list[Row]:
    """Its cases in one mode."""
    rows = [Row(group.name, case, mode) for case in cases]
    if why := missing(run, group):
        for row in rows:
            row.close("skipped", why)
    elif run.left_s() < 5:
        for row in rows:
            row.close("skipped", "no time left")
    if not rows[0].open:
        for row in rows:
            emit(row.as_json())
        return rows
    try:
        with place(run, mode, group) as stand:
            run_rows(run, stand, group, command_of(run, group), rows)
    except BenchError as error:
        for row in rows:
            if row.open or isinstance(error, RivalError):
                row.close("skipped" if isinstance(error, OutOfTime) else "failed", str(error))
                emit(row.as_json())
    return rows


@contextmanager
def place(run: Run, mode: str, group: Group | None = None) -> Iterator[Fixture]:
    """The coordinator of a group, and in mode `beyond` the rival.  Programs of gigabytes have the default settings."""
    if mode != "beyond":
        # The turns of a program with idle neighbours: nobody else wants them.
        more = ["--policy", "auto", *(["--capacity", run.capacity] if run.capacity and mode == "swap" else [])]
        if group in PROGRAMS:
            with uncoordinated(simulate=run.simulate) as stand, coordinator(stand, more):
                yield stand
            return
        with fixture(simulate=run.simulate, quantum="20ms", more=more) as stand:
            yield stand
        return
    with uncoordinated(simulate=run.simulate) as stand, coordinator(stand, ["--capacity", str(2 * run.size_bytes)]):
        size_mib = (7 * run.size_bytes // 6) >> 20
        command = [sys.executable, "-m", "nvshare.bench.workloads.resident", "--mib", str(size_mib)]
        rival = Member(
            stand, [*command, "--steps", str(1 << 40)], hooked=True, name="rival", options=MODES[mode],
            deadline=run.deadline,
        )  # fmt: skip
        with closing([rival]):
            rival.tell("begin")
            yield stand
            os.kill(rival.pid, signal.SIGTERM)
            try:
                lost = rival.answer(READY_TIMEOUT_S)["mismatches"]
            except OutOfTime:
                raise
            except BenchError as error:
                raise RivalError(str(error)) from None
            if lost:
                raise RivalError(f"the rival found {lost} pages with other values than it had written")


def build_programs(scratch: Path) -> dict[str, Path | str]:
    """Compiled programs; where a compiler is missing, the reason."""
    programs: dict[str, Path | str] = {}
    try:
        programs["replay"] = compile_program(C_PROGRAMS / "replay.c", scratch)
    except BenchError as error:
        programs["replay"] = str(error)
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        programs["runtime"] = "no nvcc"
        return programs
    target = scratch / "runtime_program"
    source = CASES_DIRECTORY / "runtime_program.cu"
    command = [nvcc, "-cudart", "static", "-O2", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    programs["runtime"] = target if done.returncode == 0 else f"nvcc: {done.stderr.strip()[-300:]}"
    return programs


def chosen(group: Group, mode: str, wanted: Sequence[str]) -> list[Case]:
    """The cases of a group that run in a mode."""
    kind = "programs" if group in PROGRAMS else ""
    return [
        case for case in group.cases
        if mode in case.modes and (not wanted or not {kind, group.name, case.row, case.name}.isdisjoint(wanted))
    ]  # fmt: skip


def measure(run: Run, modes: Sequence[str], wanted: Sequence[str]) -> bool:
    """Everything; whether no row differs or failed."""

    def cases(groups: Sequence[Group]) -> bool:
        fine = True
        for mode in modes:
            for group in groups:
                if picked := chosen(group, mode, wanted):
                    fine &= all(row.result in FINE for row in run_group(run, group, mode, picked))
        return fine

    good = cases(FIRST)
    good &= cases(THEN)
    good &= cases(PROGRAMS)
    if not wanted or "start-up" in wanted:
        with fixture(simulate=run.simulate) as stand:
            for told in import_rows(stand, ("cupy", "torch"), pairs=run.import_pairs, deadline=run.deadline):
                emit(told)
                good &= told["result"] != "failed"
    return good


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nvshare.bench.compatibility", description="What works under the hook"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line (there is no other form)")
    parser.add_argument("--simulate", action="store_true", help="on the simulated GPU although there is a card")
    parser.add_argument("--case", action="append", default=[], help="only this case or group; may be repeated; "
                        "programs: all of gigabytes")
    parser.add_argument(
        "--size-mib", type=int, help="of each program of gigabytes (default 6144; on simulated GPUs 64)"
    )
    parser.add_argument("--capacity", help="of each card in mode swap, such as 24GiB (default: the card's)")
    parser.add_argument("--mode", action="append", choices=sorted(MODES), help="default: device, then managed")
    parser.add_argument("--seconds", type=float, default=2.0, help="the processes of a case are compared (default 2)")
    parser.add_argument("--processes", type=int, default=1, help="compared, without the hook and with it (default 1)")
    parser.add_argument(
        "--import-pairs", type=int, default=IMPORT_PAIRS,
        help=f"starts without and with the hook of the case start-up, as far as time allows (default {IMPORT_PAIRS})",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for everything (default 200)")
    parser.add_argument("--markdown", type=Path, help="write the page there at the end")
    parser.add_argument("--from", dest="lines", type=Path, help="measure nothing: make the page from these lines")
    options = parser.parse_args()
    if options.import_pairs < PAIRS_MIN:
        parser.error(f"--import-pairs: fewer than {PAIRS_MIN} give no interval")
    return options


def write_page(target: Path, lines: Path) -> None:
    """The page of a run that left its lines in a file."""
    told = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the last line of a run that was stopped may be half
            told.append(json.loads(line))
    target.write_text(page.page(told), encoding="utf-8")


def main() -> int:
    """Command line."""
    options = parse()
    if options.lines is not None:
        if options.markdown is None:
            sys.stderr.write("nvshare.bench.compatibility: --from needs --markdown\n")
            return 2
        write_page(options.markdown, options.lines)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a time limit leaves no process behind
    deadline = time.monotonic() + options.budget
    simulate = "2x8GiB" if options.simulate or not real_card() else None
    os.environ.pop("NVSHARE_MEMORY_LIMIT", None)
    with tempfile.TemporaryDirectory(prefix="nvshare-matrix-") as scratch:
        emit({"machine": machine(), "simulated": simulate is not None, "python": sys.version.split()[0]})
        programs = build_programs(Path(scratch))
        core, place = reserve_core(), Path(scratch)
        size_bytes = (options.size_mib or (6144 if simulate is None else 64)) << 20
        run = Run(
            simulate, options.seconds, core, options.processes, deadline, place, programs, options.import_pairs,
            size_bytes, options.capacity,
        )  # fmt: skip
        good = measure(run, options.mode or ["device", "managed"], options.case)
    return 0 if good else 1
