"""nvshare-run leaves no trace on the command: exit code, signals, terminal, descriptors, children are its own."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.launch.conftest import WAIT_S, finish, launch, run_command

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("status", [0, 7, 255])
def test_the_commands_exit_code_is_ours(nvshare_run: Run, status: int) -> None:
    """Else scripts and batch systems would take a failed job for a good one."""
    assert nvshare_run("--", "sh", "-c", f"exit {status}").returncode == status


def test_a_death_by_signal_is_seen_as_one(nvshare_run: Run) -> None:
    """Else a killed job would look as if it had ended by itself."""
    assert nvshare_run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


@pytest.mark.parametrize(("command", "status"), [("no-such-command", 127), ("/etc/passwd", 126), ("/etc", 126)])
def test_what_cannot_be_executed_has_a_shells_exit_code(nvshare_run: Run, command: str, status: int) -> None:
    """Else a caller could not tell a missing program from a failed one."""
    done = nvshare_run("--", command)
    assert done.returncode == status
    assert done.stderr.startswith(f"nvshare-run: {command}: ")
    assert "Traceback" not in done.stderr


def test_a_script_without_an_interpreter_line_runs(nvshare_run: Run, tmp_path: Path) -> None:
    """Else what runs from a shell would not run under nvshare-run."""
    script = tmp_path / "job"
    script.write_text('echo "$1"; exit 3\n')
    script.chmod(0o755)
    done = nvshare_run("--", str(script), "word")
    assert (done.returncode, done.stdout) == (3, "word\n")


def test_standard_input_goes_to_the_command(nvshare_run: Run) -> None:
    """Else `generate | nvshare-run -- train` would lose its data."""
    text = "line\n" * 10_000
    assert nvshare_run("--", "cat", data=text).stdout == text


def test_the_command_has_the_environment_of_a_client(nvshare_run: Run, runtime: RuntimeDir) -> None:
    """Else the hook would be inert, or set up as nobody asked."""
    done = nvshare_run(
        "--memory",
        "device",
        "--priority",
        "5",
        "--name",
        "job",
        "--gpu-memory-limit",
        "1.5GiB",
        "--weight",
        "7",
        "--gang",
        "pair",
        "--",
        "env",
    )
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert variables["LD_PRELOAD"].endswith("libnvshare_hook.so")
    assert variables["NVSHARE_SOCKET"] == str(runtime.hooks_socket)
    assert variables["NVSHARE_SIM_STATE"] == str(runtime.simulated_gpu)
    assert variables["NVSHARE_MEMORY"] == "device"
    assert variables["NVSHARE_PRIORITY"] == "5"
    assert variables["NVSHARE_NAME"] == "job"
    assert (variables["NVSHARE_WEIGHT"], variables["NVSHARE_GANG"]) == ("7", "pair")
    assert variables["NVSHARE_MEMORY_LIMIT"] == str(3 << 29)


_STATE = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "pid": os.getpid(),
    "group": os.getpgrp(),
    "session": os.getsid(0),
    "ignored": status["SigIgn"].strip(),
    "blocked": status["SigBlk"].strip(),
    "directory": os.getcwd(),
    "descriptors": [d for d in sorted(map(int, os.listdir("/proc/self/fd"))) if d < 100],
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
}))
"""


def test_the_command_is_the_process_that_was_started(environ: dict[str, str]) -> None:
    """Else job control, signals or a wait for all children would meet something that is not the command's."""
    plain = launch([sys.executable, "-c", _STATE], environ)
    hooked = launch(run_command("--", sys.executable, "-c", _STATE), environ)
    expected, seen = (json.loads(finish(process)[1]) for process in (plain, hooked))
    assert seen.pop("pid") == hooked.pid
    expected.pop("pid")
    assert seen == expected


def test_a_start_without_standard_descriptors(environ: dict[str, str], runtime: RuntimeDir, tmp_path: Path) -> None:
    """Else a service manager or a cron job that closes them would get a coordinator with the wrong files."""
    seen = tmp_path / "seen"
    program = f"import os; open({str(seen)!r}, 'w').write(str(sorted(os.listdir('/proc/self/fd'), key=int)[:2]))"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *run_command("--", sys.executable, "-c", program)]
    assert subprocess.run(command, env=environ, timeout=WAIT_S, check=False).returncode == 0
    assert runtime.answers()
    pid = runtime.coordinator_pid()
    assert [Path(f"/proc/{pid}/fd/{number}").readlink() for number in range(3)] == [
        Path("/dev/null"),
        runtime.path / "coordinator.log",
        runtime.path / "coordinator.log",
    ]
    assert seen.exists()


def test_the_terminal_is_the_commands(environ: dict[str, str]) -> None:
    """Else shells and debuggers would not work, or Ctrl-C would not reach the command."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('interrupted', flush=True), sys.exit(5)))\n"
        "print('terminal', os.isatty(0), os.isatty(1), os.tcgetpgrp(0) == os.getpgrp(), flush=True)\n"
        "signal.pause()\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        command = run_command("--", sys.executable, "-c", program)
        os.execve(command[0], command, environ)
    seen = _read_until(terminal, "terminal True True True")
    os.write(terminal, b"\x03")
    seen += _read_until(terminal, "interrupted")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 5, seen


def _read_until(terminal: int, text: str) -> str:
    seen = ""
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], WAIT_S)
        assert ready, f"only {seen!r} came"
        try:
            seen += os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            raise AssertionError(f"only {seen!r} came") from None
    return seen


def test_a_memory_mode_that_does_not_exist_is_refused(nvshare_run: Run) -> None:
    """Else the program would run in a mode that nobody asked for."""
    done = nvshare_run("--memory", "fast", "--", "true")
    assert done.returncode == 2
    assert "--memory" in done.stderr
    assert "fast" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("spec", ["0x8GiB", "2x", "many", "2x1MBB"])
def test_simulated_cards_that_make_no_sense_are_refused(nvshare_run: Run, spec: str) -> None:
    """Else a typing mistake would give other cards than were asked for."""
    done = nvshare_run(f"--simulate={spec}", "--", "true", simulate=False)
    assert done.returncode in (1, 2)
    assert spec in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_that_cannot_be_used_is_named_with_the_remedy(nvshare_run: Run, tmp_path: Path) -> None:
    """Else the user would see a traceback from inside a socket."""
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / ("long" * 40)):
        done = nvshare_run("--runtime-dir", str(directory), "--", "true")
        assert done.returncode == 1
        assert re.search(r"--runtime-dir", done.stderr)
        assert "Traceback" not in done.stderr
