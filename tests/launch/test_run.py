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

from nvshare.coordinator.cli import run
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.launch.conftest import finish, launch, run_command, runtime_directory
from tests.launch.conftest import module_runtime as runtime
from tests.waiting import BOUND_S

__all__ = ["runtime"]  # fixture

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_commands_end_is_ours(nvshare_run: Run) -> None:
    """Broken: scripts and batch systems take a failed or killed job for a good one."""
    for status in (0, 7, 255):
        assert nvshare_run("--", "sh", "-c", f"exit {status}").returncode == status
    assert nvshare_run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    for command, status in (("no-such-command", 127), ("/etc/passwd", 126), ("/etc", 126)):
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


@pytest.mark.sanitizer
def test_a_sanitized_program_starts(nvshare_run: Run, tmp_path: Path) -> None:
    """Broken: AddressSanitizer refuses to start, since it does not come first in the list of libraries."""
    source, program = tmp_path / "seven.c", tmp_path / "seven"
    source.write_text("int main(void) { return 7; }\n", encoding="utf-8")
    subprocess.run([os.environ.get("CC", "cc"), "-fsanitize=address", source, "-o", program], check=True)
    done = nvshare_run("--", str(program))
    assert (done.returncode, done.stderr) == (7, "")


def test_standard_input_goes_to_the_command(nvshare_run: Run) -> None:
    """Else `generate | nvshare-run -- train` would lose its data."""
    text = "line\n" * 10_000
    assert nvshare_run("--", "cat", data=text).stdout == text


def test_the_command_has_the_environment_of_a_client(nvshare_run: Run, runtime: RuntimeDir) -> None:
    """Else the hook would be inert, or set up as nobody asked."""
    options = "--memory device --priority 5 --name job --gpu-memory-limit 1.5GiB --weight 7 --gang pair"
    done = nvshare_run(*options.split(), "--", "env")
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


def test_a_start_without_standard_descriptors(environ: dict[str, str], tmp_path: Path) -> None:
    """Else a service manager or a cron job that closes them would get a coordinator with the wrong files."""
    seen = tmp_path / "seen"
    program = f"import os; open({str(seen)!r}, 'w').write(str(sorted(os.listdir('/proc/self/fd'), key=int)[:2]))"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *run_command("--", sys.executable, "-c", program)]
    with runtime_directory() as runtime:
        environ["NVSHARE_RUNTIME_DIR"] = str(runtime.path)
        assert subprocess.run(command, env=environ, check=False).returncode == 0
        pid, log = runtime.coordinator_pid(), runtime.path / "coordinator.log"
        assert [Path(f"/proc/{pid}/fd/{number}").readlink() for number in range(3)] == [Path("/dev/null"), log, log]
        assert runtime.answers()
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
        ready, _, _ = select.select([terminal], [], [], BOUND_S)
        assert ready, f"only {seen!r} came"
        try:
            seen += os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            raise AssertionError(f"only {seen!r} came") from None
    return seen


def test_simulated_cards_that_make_no_sense_are_refused(nvshare_run: Run) -> None:
    """Else a typing mistake would give other cards than were asked for."""
    for spec in ("0x8GiB", "2x1MBB"):
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


@pytest.mark.parametrize(
    ("argv", "ours", "command"),
    [
        (["--", "python", "x.py", "--name", "a"], [], ["python", "x.py", "--name", "a"]),
        (["python", "x.py", "--priority", "3"], [], ["python", "x.py", "--priority", "3"]),
        (["--name", "job", "python"], ["--name", "job"], ["python"]),
        (["--name=job", "--simulate", "python", "-c", "1"], ["--name=job", "--simulate"], ["python", "-c", "1"]),
        (["--simulate=2x8GiB", "--", "--odd"], ["--simulate=2x8GiB"], ["--odd"]),
        (["--", "--", "x"], [], ["--", "x"]),
        (["--simulate", "--memory", "device", "env"], ["--simulate", "--memory", "device"], ["env"]),
        ([], [], []),
    ],
)
def test_the_command_is_told_from_our_options(argv: list[str], ours: list[str], command: list[str]) -> None:
    """Else an option of the command would be taken for ours, or `--simulate` would swallow the command."""
    assert run.split_command(argv) == (ours, command)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "no command"),
        (["--priority", "high", "--", "true"], "whole number"),
        (["--priority", "99999999999", "--", "true"], "from -2147483648 to 2147483647"),
        (["--weight", "0", "--", "true"], "from 1 to 10000"),
        (["--weight", "1e3", "--", "true"], "from 1 to 10000"),
        (["--class", "urgent", "--", "true"], "write interactive, batch, best-effort"),
        (["--share-request", "1.2", "--", "true"], "from 0% to 100%"),
        (["--share-limit", "0", "--", "true"], "from 0.1% to 100%"),
        (["--deadline", "soon", "--", "true"], "write 90s, 30m or 2h"),
        (["--gang", "x" * 254, "--", "true"], "1 to 253 bytes"),
        (["--gpu-memory-limit", "many", "--", "true"], "a size such as 4GiB"),
        (["--memory", "fast", "--", "true"], "write auto, swap, managed, device"),
        (["--name", "x" * 64, "--", "true"], "1 to 63 bytes"),
        (["--", ""], "no command"),
        (["--nmae", "x", "--", "true"], "--nmae"),
        (["--simulate", "2x8GiB", "--", "true"], "--simulate=2x8GiB"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a typing mistake would run the command with something else than was asked for."""
    with pytest.raises(SystemExit) as ended:
        run.main(argv)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
