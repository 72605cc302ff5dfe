"""Programs join the coordinator's MPS at their start: nvshare-run, a coordinator, a double of the daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.cli.views.sentences import mps_line
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system.mps import obstacles
from nvshare.coordinator.system.mps.daemon import ControlDaemon
from nvshare.coordinator.system.mps.service import Mps
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests import fake_mps
from tests.daemon.processes import Running, Trace
from tests.launch.conftest import run_command, runtime_directory, wait_for_end
from tests.waiting import eventually

SYSTEM_PYTHON = "/usr/bin/python3"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
JOINED = ("NVSHARE_MPS", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


def end_coordinator(runtime: RuntimeDir, number: int) -> None:
    """Sends a signal, and waits for the coordinator's end."""
    pid = runtime.coordinator_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            signal.pidfd_send_signal(descriptor, number)
            wait_for_end(descriptor)


@pytest.fixture
def binaries(tmp_path: Path) -> Path:
    """The folder of the double, first in PATH."""
    fake_mps.install(tmp_path / "bin")
    return tmp_path / "bin"


@pytest.fixture
def runtime(binaries: Path) -> Iterator[RuntimeDir]:
    """Its coordinator ends as an operator ends it, and so does its daemon."""
    with runtime_directory() as made:
        yield made
        (binaries / "clients").unlink(missing_ok=True)
        (binaries / "mode").unlink(missing_ok=True)
        end_coordinator(made, signal.SIGTERM)
        eventually(lambda: not obstacles.answers(made.mps / "pipe"), "the end of the MPS daemon")


@pytest.fixture
def environ(environ: dict[str, str], binaries: Path) -> dict[str, str]:
    """MPS is allowed."""
    return environ | {"NVSHARE_MPS": "same_user", "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def held(environ: dict[str, str]) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a program that lives until it is killed."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = run_command("--", "sh", "-c", "echo up; read line")
        process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        made.append(process)
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


def variables(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    lines = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in lines if name in JOINED}


def status(runtime: RuntimeDir) -> dict[str, Any]:
    found: dict[str, Any] = call(runtime, api.Status())["mps"]
    return found


def daemon_pid(runtime: RuntimeDir) -> int:
    return int((runtime.mps / "pipe" / "nvidia-cuda-mps-control.pid").read_text())


def test_a_program_joins_with_the_values_of_its_class(nvshare_run: Run, runtime: RuntimeDir) -> None:
    """Broken: programs run beside each other in time slices only, or best-effort work takes the whole card."""
    joined = variables(nvshare_run("--", "env"))
    pipe = str(runtime.mps / "pipe")
    assert joined == dict(zip(JOINED, ("1", pipe, "0", "100"), strict=True))
    lower = variables(nvshare_run("--", "env", NVSHARE_CLASS="best-effort"))
    assert lower == dict(zip(JOINED, ("1", pipe, "1", "90"), strict=True))
    inner = ["env", "NVSHARE_CLASS=batch", *run_command("--", "env")]
    assert variables(nvshare_run("--", *inner, NVSHARE_CLASS="best-effort")) == joined


def test_the_notebook_opt_in_joins_too(environ: dict[str, str], runtime: RuntimeDir) -> None:
    """Broken: a notebook runs outside MPS where its user's other programs are clients."""
    code = "from nvshare.client_hook.autoload import start; start(); import os; print(os.environ.get('NVSHARE_MPS'))"
    environ |= {"NVSHARE_ENABLE": "1", "NVSHARE_SIMULATE": "1x8GiB"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_program_stays_out_where_it_must(nvshare_run: Run, binaries: Path) -> None:
    """Broken: a debugger hangs on an MPS client, --no-mps does nothing, or a user's own daemon is not used."""
    assert variables(nvshare_run("--no-mps", "--", "env")) == {"NVSHARE_MPS": "0"}
    assert variables(nvshare_run("--", *run_command("--no-mps", "--", "env"))) == {"NVSHARE_MPS": "0"}
    tool = binaries / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nexec env\n")
    tool.chmod(0o755)
    done = nvshare_run("--", "compute-sanitizer")
    assert variables(done) == {"NVSHARE_MPS": "0"}
    assert done.stderr == "nvshare: without MPS: compute-sanitizer needs a program with a context of its own\n"
    done = nvshare_run("--", "env", CUDA_MPS_PIPE_DIRECTORY="/elsewhere")
    assert variables(done)["CUDA_MPS_PIPE_DIRECTORY"] == "/elsewhere"
    assert "unset it to join" in done.stderr


def test_a_refusal_names_its_reason_and_the_program_runs(nvshare_run: Run, runtime: RuntimeDir, binaries: Path) -> None:
    """Broken: a machine without MPS runs nothing, or nobody learns what is missing."""
    (binaries / "mode").write_text("refuse")
    done = nvshare_run("--", "env")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in variables(done)
    assert "without MPS: nvidia-cuda-mps-control -d failed: An instance" in done.stderr
    assert mps_line(status(runtime)).startswith("MPS: refused, programs run without it: nvidia-cuda-mps-control -d")
    assert "MPS is not available" in (runtime.path / "coordinator.log").read_text()


def test_a_missing_binary_is_reported_at_the_start(nvshare_run: Run, runtime: RuntimeDir, binaries: Path) -> None:
    """Broken: the operator learns only from a user that MPS was never there."""
    (binaries / "nvidia-cuda-mps-control").unlink()
    done = nvshare_run("--", "true")
    assert "nvidia-cuda-mps-control is not in PATH; install it" in done.stderr
    log = (runtime.path / "coordinator.log").read_text()
    assert "a fault of one ends the others" in log
    assert log.count("nvidia-cuda-mps-control is not in PATH") == 1


def test_programs_are_counted_and_a_dead_daemon_is_said(
    held: Callable[[], subprocess.Popen[bytes]], nvshare_run: Run, runtime: RuntimeDir
) -> None:
    """Broken: nobody learns that MPS is gone, or programs are sent to a daemon that is."""
    first, _ = held(), held()
    assert (status(runtime)["state"], status(runtime)["programs"]) == ("ready", 2)
    assert "ready for user" in mps_line(status(runtime))
    first.kill()
    first.wait()
    eventually(lambda: status(runtime)["programs"] == 1, "the end of the first program")
    trace = Trace(Running(first, runtime, runtime.path / "coordinator.log"))
    os.kill(daemon_pid(runtime), signal.SIGKILL)
    assert "died; 1 programs may fail; restart the coordinator" in trace.next("mps", state="refused")["text"]
    trace.close()
    assert "MPS daemon died" in (runtime.path / "coordinator.log").read_text()
    done = nvshare_run("--", "env")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in variables(done)
    assert "without MPS: the MPS daemon died" in done.stderr


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_programs_outlive_the_coordinator(
    held: Callable[[], subprocess.Popen[bytes]], nvshare_run: Run, runtime: RuntimeDir, binaries: Path, end: int
) -> None:
    """Broken: a crash or a restart of the coordinator ends the MPS clients, or leaves a daemon for ever."""
    held()
    daemon = daemon_pid(runtime)
    (binaries / "clients").write_text("11")
    end_coordinator(runtime, end)
    ended = os.pidfd_open(daemon)
    assert "still has clients; MPS starts after the last one" in nvshare_run("--", "true").stderr
    assert status(runtime)["state"] == "draining"
    (binaries / "clients").unlink()
    wait_for_end(ended)
    eventually(lambda: nvshare_run("--", "true").stderr == "", "a daemon of the new coordinator")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root serves another user")
def test_a_second_user_is_refused(environ: dict[str, str]) -> None:
    """Broken: a second user's program waits for ever in the first one's server."""
    code = "import socket, sys; s = socket.socket(1, 5); s.connect(sys.argv[1]); print(s.recv(999).decode())"
    with tempfile.TemporaryDirectory(prefix="nvs-") as place:
        folder = Path(place)
        folder.chmod(0o755)
        daemon = ControlDaemon(folder / "mps", environ, real_cards=False)
        service = Mps(folder / "sock", daemon, lambda *_: None, all_users=True)
        service.start()
        with contextlib.closing(service):
            first, second, again = (
                subprocess.run(
                    [SYSTEM_PYTHON, "-c", code, folder / "sock"],
                    user=user, cwd="/", capture_output=True, text=True, check=True,
                ).stdout
                for user in (0, 65534, 0)
            )  # fmt: skip
    assert first == again == f"joined\n{folder / 'mps' / 'pipe'}\n"
    assert second.startswith("refused\nMPS serves user 0 until the coordinator ends")
