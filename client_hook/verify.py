"""`nvshare-run --verify`: runs a command with the bypass detector, and reports GPU work that bypassed the gate.

The driver loads libnvshare_verify.so (CUDA_INJECTION64_PATH) when a process initialises CUDA.  The library compares
CUPTI's records with the hook's, and writes a report of each process into a temporary directory.

Invariants: exit code and signals are the command's own, except `ESCAPED`.  The table goes to standard error, because
standard output belongs to the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvshare.client_hook.launcher import LaunchError, find_hook

ESCAPED = 3
"""Exit code of a successful command whose work bypassed the gate, or could not be checked."""

LIBRARY = "libnvshare_verify.so"
_CUPTI = ("libcupti.so.13", "libcupti.so.12")
_SIMULATED_CUPTI = "libnvshare_cupti.so"
_REMEDY = (
    "--verify needs NVIDIA's CUPTI, which is not found: run `pip install nvidia-cuda-cupti` (for a driver of CUDA 13; "
    "nvidia-cuda-cupti-cu12 before that), install the CUDA toolkit, "
    "or set NVSHARE_CUPTI_LIBRARY to the path of libcupti.so"
)
_FORWARDED = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH, signal.SIGCONT,
)  # fmt: skip
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Escape:
    """Work that bypassed the gate.  `symbol`: a kernel, or empty."""

    function: str
    symbol: str
    calls: int
    ran: int


@dataclass(frozen=True, slots=True)
class Report:
    """GPU work of one process.  `problem` is the reason why the check is incomplete."""

    process_id: int
    program: str
    hooked: bool
    kernels: int
    kernels_gated: int
    copies: int
    copies_gated: int
    escapes: tuple[Escape, ...]
    problem: str | None

    @property
    def clean(self) -> bool:
        """Whether all work passed the gate."""
        return self.problem is None and not self.escapes


def find_cupti(environ: Mapping[str, str]) -> Path:
    """Path of CUPTI: from NVSHARE_CUPTI_LIBRARY, the simulation, a wheel, a toolkit or the system.

    Raises LaunchError with the remedy.
    """
    named = environ.get("NVSHARE_CUPTI_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise LaunchError(f"NVSHARE_CUPTI_LIBRARY names {named}, which does not exist; unset it or correct it")
        return Path(named).absolute()
    if "NVSHARE_SIM_STATE" in environ:
        from nvshare.simulated_gpu import library_directory

        return library_directory() / _SIMULATED_CUPTI
    for directory in _cupti_directories(environ):
        for name in _CUPTI:
            if (directory / name).is_file():
                return directory / name
    raise LaunchError(_REMEDY)


def _cupti_directories(environ: Mapping[str, str]) -> Iterator[Path]:
    for entry in sys.path:
        yield from (Path(entry) / "nvidia" / part / "lib" for part in ("cu13", "cuda_cupti"))
    yield from (Path(entry) for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry)
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    for home in (*homes, "/usr/local/cuda"):
        yield from (Path(home) / part for part in ("extras/CUPTI/lib64", "lib64"))
    machine = os.uname().machine
    yield from (Path(part) for part in (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib"))


def find_library(environ: Mapping[str, str]) -> Path:
    """Path of the detector, beside the hook.  Raises LaunchError."""
    path = find_hook(environ).with_name(LIBRARY)
    if not path.is_file():
        raise LaunchError(f"{path} is missing; reinstall the package (pip install .)")
    return path


def run_verified(environ: Mapping[str, str], become: Callable[[dict[str, str]], int], output: str) -> int:
    """Runs the command in a child, waits and prints the table.  Returns the exit code, or dies by the command's signal.

    `become` replaces the child by the command, or returns an exit code.  `output` is a file for the reports as JSON, or
    empty.  Raises LaunchError before the start.
    """
    if output:
        _check_writable(output)
    directory = Path(tempfile.mkdtemp(prefix="nvshare-verify-"))
    watched = dict(environ) | {
        "CUDA_INJECTION64_PATH": str(find_library(environ)),
        "NVSHARE_CUPTI_LIBRARY": str(find_cupti(environ)),
        "NVSHARE_VERIFY_REPORT": str(directory),
    }
    try:
        status = _run_child(watched, become)
        reports = read_reports(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print_table(reports)
    if output:
        Path(output).write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n", encoding="utf-8")
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _die_by(-code)
    return ESCAPED if code == 0 and not all(report.clean for report in reports) else code


def _check_writable(output: str) -> None:
    try:
        Path(output).write_text("[]\n", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"--verify={output}: {error.strerror}") from None


def _run_child(environ: dict[str, str], become: Callable[[dict[str, str]], int]) -> int:
    """Runs the child and returns its wait status.

    The child is in our process group, so the terminal's signals reach it directly; other signals are forwarded.
    """
    signals = (*_FROM_TERMINAL, *_FORWARDED)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            os._exit(become(environ))
        finally:
            os._exit(126)
    for number in _FROM_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: _forward(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status
        if os.WSTOPSIG(status) != signal.SIGSTOP:  # SIGSTOP was sent to the child alone
            os.kill(os.getpid(), signal.SIGSTOP)  # job control: stop too; SIGCONT is forwarded


def _forward(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _die_by(number: int) -> None:
    """Dies by the command's signal, without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stderr.flush()
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def read_reports(directory: Path) -> list[Report]:
    """Reports of all processes that initialised CUDA, in that order."""
    found = sorted(directory.glob("*.json"), key=lambda path: int(path.stem.split("-")[-1]))
    return [_report(json.loads(path.read_text(encoding="ascii"))) for path in found]


def _report(told: dict[str, Any]) -> Report:
    problem = told["error"]
    if problem is None and not told["complete"]:
        problem = "it ended without a report (killed, or replaced by exec): its work is unknown"
    elif problem is None and not told["matched"]:
        problem = f"this CUPTI (API {told['cupti']}) is newer than the detector, which cannot match kernels with calls"
    elif problem is None and told["hooked"] and told["gated_calls"] and not told["active"]:
        problem = "its hook is disabled (NVSHARE_DISABLE) or failed to start, so its gate was open"
    elif problem is None and told["lost_records"]:
        problem = f"CUPTI lost {told['lost_records']} records"
    transfers = (told["copies"], told["memsets"])
    return Report(
        process_id=told["pid"],
        program=told["program"],
        hooked=told["hooked"],
        kernels=told["kernels"]["ran"],
        kernels_gated=told["kernels"]["gated"],
        copies=sum(work["ran"] - work["own"] for work in transfers),
        copies_gated=sum(work["gated"] for work in transfers),
        escapes=tuple(Escape(**one) for one in told["escaped"]),
        problem=problem,
    )


def print_table(reports: list[Report]) -> None:
    """Prints the reports to standard error."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not reports:
        console.print("nvshare-run --verify: no process of this command used CUDA")
        return
    table = Table("process", "program", "kernels run", "passed the gate", "copies", "passed", "escaped")
    for report in reports:
        escaped = sum(max(one.calls, one.ran) for one in report.escapes)
        table.add_row(
            str(report.process_id),
            report.program.rpartition("/")[2],
            str(report.kernels),
            str(report.kernels_gated),
            str(report.copies),
            str(report.copies_gated),
            str(escaped) if report.problem is None else f"{escaped}?",
        )
    console.print(table)
    for report in reports:
        _print_findings(console.print, report)


def _print_findings(say: Callable[..., None], report: Report) -> None:
    process = f"process {report.process_id}"
    if not report.hooked:
        say(f"{process}: without the hook; a static or setuid program, or a changed LD_PRELOAD", markup=False)
    if report.problem is not None:
        say(f"{process}: {report.problem}", markup=False)
    for one in report.escapes:
        kernel = f", kernel {one.symbol}" if one.symbol else ""
        say(f"{process}: escaped: {one.function}{kernel} ({one.calls} calls, {one.ran} ran)", markup=False)
