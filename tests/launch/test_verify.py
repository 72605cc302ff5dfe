"""nvshare-run --verify: what escaped the gate is named, what passed is not accused, and the command is left as it is.

Each claim stands beside its negative control: programs/verify_program.c really goes around the hook.  On the simulated
GPU with its double of CUPTI; the same on a card in tests/gpu/test_verify_card.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.launch.conftest import command_lines, finish, launch, run_command, runtime_directory
from tests.waiting import eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SHORT_S = 0.3
"""For what would be wrong to happen."""


@pytest.fixture(scope="module")
def runtime() -> Iterator[RuntimeDir]:
    """One coordinator for all tests: the first program starts it."""
    with runtime_directory() as made:
        yield made


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """programs/verify_program.c"""
    out = tmp_path_factory.mktemp("verify") / "verify_program"
    return compile_c(out, Path(__file__).parent / "programs" / "verify_program.c", built.sim_dir / "libcuda.so.1")


@pytest.fixture
def verified(nvshare_run: Run, program: Path, tmp_path: Path) -> Callable[[str], tuple[int, list[dict[str, Any]], str]]:
    """Exit code, reports and standard error of the program in one of its modes."""

    def run(mode: str) -> tuple[int, list[dict[str, Any]], str]:
        output = tmp_path / "report.json"
        done = nvshare_run(f"--verify={output}", "--", str(program), mode)
        return done.returncode, json.loads(output.read_text(encoding="utf-8")), done.stderr

    return run


Verified = Callable[[str], tuple[int, list[dict[str, Any]], str]]


def escapes(report: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """(function, kernel) -> (calls, pieces of work)"""
    return {(one["function"], one["symbol"]): (one["calls"], one["ran"]) for one in report["escapes"]}


def test_what_passes_the_gate_is_not_accused(verified: Verified) -> None:
    """A detector that cries wolf is turned off: launches, copies, memsets and graphs that pass are counted in."""
    code, [report], errors = verified("gated")
    assert (code, report["escapes"], report["problem"]) == (0, [], None)
    assert (report["kernels"], report["kernels_gated"]) == (106, 106)
    assert (report["copies"], report["copies_gated"]) == (2, 2)
    assert "106" in errors


def test_what_goes_around_the_hook_is_named(verified: Verified) -> None:
    """A bypass that is not seen makes every other claim about exclusivity worthless."""
    code, [report], errors = verified("raw")
    assert code == 3
    assert (report["kernels"], report["kernels_gated"]) == (112, 106)
    assert (report["copies"], report["copies_gated"]) == (4, 2)
    assert escapes(report) == {
        ("cuLaunchKernel", ""): (3, 0),
        ("cuLaunchKernel", "nvs_busy"): (0, 3),
        ("cuMemcpyHtoD_v2", ""): (2, 2),
        ("cuGraphLaunch", ""): (1, 0),
        ("cuGraphLaunch", "nvs_busy"): (0, 3),
    }
    assert "escaped: cuLaunchKernel, kernel nvs_busy" in errors


def test_threads_are_told_apart(verified: Verified) -> None:
    """One thread inside the gate must not vouch for another that is not."""
    code, [report], _ = verified("threads")
    assert code == 3
    assert (report["kernels"], report["kernels_gated"]) == (204, 200)
    assert escapes(report)["cuLaunchKernel", "nvs_busy"] == (0, 4)


def test_each_process_reports(verified: Verified) -> None:
    """Work of a child process would go unseen."""
    code, reports, _ = verified("two")
    assert code == 0
    assert [report["kernels_gated"] for report in reports] == [106, 106]
    assert len({report["process_id"] for report in reports}) == 2


def test_a_program_without_the_hook_escapes(nvshare_run: Run, program: Path, tmp_path: Path) -> None:
    """A program that loses the preload runs ungated, and nothing else would say so."""
    output = tmp_path / "report.json"
    done = nvshare_run(f"--verify={output}", "--", "env", "-u", "LD_PRELOAD", str(program), "gated")
    [report] = json.loads(output.read_text(encoding="utf-8"))
    assert done.returncode == 3
    assert report["hooked"] is False
    assert (report["kernels"], report["kernels_gated"]) == (106, 0)
    assert "without the hook" in done.stderr


def test_a_gate_that_stands_open_is_no_gate(nvshare_run: Run, program: Path, tmp_path: Path) -> None:
    """With the hook switched off everything passes, and shares with nobody."""
    output = tmp_path / "report.json"
    done = nvshare_run(f"--verify={output}", "--", str(program), "gated", NVSHARE_DISABLE="1")
    [report] = json.loads(output.read_text(encoding="utf-8"))
    assert done.returncode == 3
    assert "NVSHARE_DISABLE" in report["problem"]


def test_a_process_that_ends_by_quick_exit_is_counted(verified: Verified) -> None:
    """Python's worker processes end by _exit, which runs no handler: a verified training run could never be clean."""
    code, [report], _ = verified("quick")
    assert (code, report["problem"], report["escapes"]) == (0, None, [])
    assert (report["kernels"], report["kernels_gated"]) == (1, 1)


def test_a_process_that_ends_without_a_word_is_not_taken_for_clean(verified: Verified) -> None:
    """A death by a signal lets nobody speak: silence is no proof."""
    code, [report], errors = verified("killed")
    assert code == -signal.SIGTERM, "a scheduler sees the death by a signal"
    assert "ended without a report" in report["problem"]
    assert "ended without a report" in errors


def test_the_commands_own_failure_comes_first(verified: Verified) -> None:
    """A job's exit code means something to scripts; the detector's must not hide it."""
    code, [report], _ = verified("raw-fails")
    assert code == 7
    assert escapes(report)["cuLaunchKernel", ""] == (1, 0)


def test_a_program_without_cuda(verified: Verified) -> None:
    """Nothing ran, so nothing escaped; but the user must learn that nothing was checked."""
    code, reports, errors = verified("nothing")
    assert (code, reports) == (0, [])
    assert "no process of this command used CUDA" in errors


def test_signals_reach_the_command(environ: dict[str, str]) -> None:
    """A scheduler that ends a job politely must reach the job, not our wrapper."""
    script = "trap 'echo told; exit 5' USR1; echo ready; while :; do read -r line; done"
    with subprocess.Popen(
        run_command("--verify", "--", "bash", "-c", script),
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "told\n"
        assert process.wait() == 5


def state(process_id: int) -> str:
    """One letter, as ps has it."""
    return Path(f"/proc/{process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_a_command_that_is_stopped_and_continued_ends(environ: dict[str, str]) -> None:
    """Broken: a debugger stops the command alone and continues it alone, and the report never comes."""
    script = "kill -STOP $$; echo over"
    process = launch(run_command("--verify", "--", "sh", "-c", script), environ)
    (command,) = eventually(
        lambda: [pid for pid, words in command_lines().items() if words[:3] == [b"sh", b"-c", script.encode()]],
        "the command",
    )
    eventually(lambda: state(command) == "T", "it to be stopped")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SHORT_S)
    os.kill(command, signal.SIGCONT)
    assert finish(process)[:2] == (0, "over\n")


def test_without_cupti_the_remedy_is_named(nvshare_run: Run, tmp_path: Path) -> None:
    """The user would run unverified and believe otherwise."""
    done = nvshare_run("--verify", "--", "true", NVSHARE_CUPTI_LIBRARY=str(tmp_path / "libcupti.so.13"))
    assert done.returncode == 1
    assert "NVSHARE_CUPTI_LIBRARY" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cupti_that_cannot_be_used_is_reported(nvshare_run: Run, program: Path, tmp_path: Path) -> None:
    """A library that does not load must not pass for a clean run."""
    broken = tmp_path / "libcupti.so.13"
    broken.write_bytes(b"not a library")
    done = nvshare_run("--verify", "--", str(program), "gated", NVSHARE_CUPTI_LIBRARY=str(broken))
    assert done.returncode == 3
    assert "pip install nvidia-cuda-cupti" in done.stderr


def test_a_report_that_cannot_be_written_stops_before_the_start(nvshare_run: Run, tmp_path: Path) -> None:
    """An hour's run must not end in a missing file."""
    done = nvshare_run(f"--verify={tmp_path}", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (1, "")
    assert str(tmp_path) in done.stderr
