"""The embedded coordinator: started once, shared, kept as long as somebody needs it, gone afterwards."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvshare.client_hook import embedded
from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.system import runtime_dir
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.environment import simulated_environment
from nvshare.simulated_gpu.trace import read_cards
from tests.daemon.processes import serving
from tests.launch.conftest import command_lines, finish, launch, run_command, wait_for_end
from tests.waiting import eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def coordinators(runtime: RuntimeDir) -> list[int]:
    """Process ids of all coordinators of this directory."""
    directory = os.fsencode(runtime.path)
    return [
        pid
        for pid, words in command_lines().items()
        if b"nvshare.coordinator.daemon.main" in words and directory in words
    ]


@pytest.fixture
def held(environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command under nvshare-run that lives until its standard input is closed."""
    process = subprocess.Popen(
        run_command("--", "sh", "-c", "echo up; read line"), env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.communicate()


def test_launchers_that_race_share_one_coordinator(environ: dict[str, str], runtime: RuntimeDir) -> None:
    """Else two coordinators would each grant the same GPU."""
    started = [launch(run_command("--", "true"), environ) for _ in range(6)]
    for process in started:
        assert finish(process) == (0, "", "")
    assert coordinators(runtime) == [runtime.coordinator_pid()]


def test_the_coordinator_is_detached(held: subprocess.Popen[bytes], runtime: RuntimeDir) -> None:
    """Else a Ctrl-C, a closed terminal or a wait for all children would reach everybody's coordinator."""
    pid = runtime.coordinator_pid()
    assert pid is not None
    assert os.getsid(pid) != os.getsid(held.pid)
    assert Path(f"/proc/{held.pid}/task/{held.pid}/children").read_text() != f"{pid} "
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["PPid"]) != held.pid
    open_files = {path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert runtime.keepalive_lock not in open_files
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
    assert Path(f"/proc/{pid}/fd/2").readlink() == runtime.path / "coordinator.log"


def test_the_coordinator_stays_while_a_command_runs(held: subprocess.Popen[bytes], runtime: RuntimeDir) -> None:
    """Else it would leave before a program, which imports for a minute, first touches the GPU."""
    with runtime.keepalive_lock.open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert held.poll() is None


def test_after_it_has_left_the_next_command_starts_another(nvshare_run: Run, runtime: RuntimeDir) -> None:
    """Else a stale socket or lock would keep everybody out."""
    assert nvshare_run("--", "true").returncode == 0
    pid = runtime.coordinator_pid()
    assert pid is not None
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(descriptor)
    assert nvshare_run("--", "true").returncode == 0
    assert runtime.coordinator_pid() not in (None, pid)


def test_a_coordinator_that_cannot_start_is_quoted(nvshare_run: Run) -> None:
    """Else the user would only learn that something failed."""
    done = nvshare_run("--", "true", NVSHARE_QUANTUM="banana")
    assert done.returncode == 1
    assert "NVSHARE_QUANTUM" in done.stderr
    assert "banana" in done.stderr


def test_a_full_disk_is_said_and_leaves_nothing(environ: dict[str, str], runtime: RuntimeDir) -> None:
    """Broken: the coordinator and later programs die of SIGBUS, since the simulated GPUs' state has no blocks."""
    script = 'ulimit -f 1000; exec "$@"'
    command = ["sh", "-c", script, "sh", *run_command("--", "true")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "cannot create the state of simulated GPUs" in done.stderr
    assert not list(runtime.path.glob("simulated_gpu*"))


def test_real_and_simulated_programs_do_not_meet(nvshare_run: Run, held: subprocess.Popen[bytes]) -> None:
    """Else a program on a real card would wait for leases of a simulated one."""
    done = nvshare_run("--", "true", simulate=False)
    assert done.returncode == 1
    assert "serves simulated GPUs" in done.stderr
    assert "--simulate" in done.stderr
    assert held.poll() is None


def test_a_simulated_program_does_not_join_a_coordinator_of_real_gpus(
    nvshare_run: Run, environ: dict[str, str], runtime: RuntimeDir, tmp_path: Path
) -> None:
    """Else it would wait for ever for the lease of a GPU that nobody serves."""
    as_if_real = simulated_environment(tmp_path / "cards", None, environ)
    server = [sys.executable, "-m", "nvshare.coordinator.daemon.main", "--runtime-dir", str(runtime.path)]
    by_hand = serving(server, as_if_real, tmp_path / "log")
    try:
        done = nvshare_run("--", "true")
        assert done.returncode == 1
        assert "serves real GPUs" in done.stderr
        assert nvshare_run("--", "true", simulate=False).returncode == 0
    finally:
        by_hand.terminate()
        by_hand.wait()


def test_other_simulated_cards_than_there_are_are_refused(nvshare_run: Run, held: subprocess.Popen[bytes]) -> None:
    """Else a program would run on other cards than it was given."""
    done = nvshare_run("--simulate=3x1GiB", "--", "true", simulate=False)
    assert done.returncode == 1
    assert "are 1x16GiB, not 3x1GiB" in done.stderr
    done = nvshare_run("--simulate=2x8GiB", "--", "true", simulate=False)
    assert done.returncode == 1, "as much memory altogether, but other cards"
    assert "are 1x16GiB, not 2x8GiB" in done.stderr
    assert held.poll() is None


def test_a_number_alone_takes_the_simulated_cards_that_there_are(nvshare_run: Run) -> None:
    """Broken: NVSHARE_SIMULATE=1 of a tutorial is refused beside a coordinator with other cards."""
    inner = run_command("--", "sh", "-c", "echo $NVSHARE_SIMULATE", simulate=False)
    done = nvshare_run("--simulate=2x1GiB", "--", "env", "NVSHARE_SIMULATE=1", *inner, simulate=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"2x{1 << 30}\n", "")


def test_the_last_program_of_a_simulation_leaves_no_cards(nvshare_run: Run, runtime: RuntimeDir) -> None:
    """Broken: each user of a machine leaves a process behind for ever, or 60 MB in a directory that may be memory."""
    assert nvshare_run("--", "true", NVSHARE_EMBEDDED_LINGER="100ms").returncode == 0
    eventually(lambda: runtime.coordinator_pid() is None, "it leaves")
    assert not runtime.simulated_gpu.exists()


def test_a_new_simulation_does_not_inherit_an_old_ones_cards(nvshare_run: Run, runtime: RuntimeDir) -> None:
    """Else a user could never have other simulated cards than the first time."""
    for cards in (2, 3):
        done = nvshare_run(f"--simulate={cards}x1GiB", "--", "true", simulate=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(read_cards(runtime.simulated_gpu)) == cards
        pid = runtime.coordinator_pid()
        assert pid is not None
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        wait_for_end(descriptor)


def test_a_program_below_nvshare_run_may_use_it_again(nvshare_run: Run, runtime: RuntimeDir) -> None:
    """Else a script under nvshare-run could not call another that uses it too."""
    inner = run_command("--", "sh", "-c", "echo $LD_PRELOAD", simulate=False)
    done = nvshare_run("--", *inner)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("libnvshare_hook.so") == 1
    assert coordinators(runtime) == [runtime.coordinator_pid()]


def test_another_users_coordinator_is_used_as_it_is(
    environ: dict[str, str], runtime: RuntimeDir, held: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the users of a node could not share the system's coordinator, whose files they cannot write."""
    before = sorted(runtime.path.iterdir())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    attached = embedded.ensure_coordinator(runtime, environ, simulate="")
    assert (attached.started, attached.keepalive) == (False, None)
    assert sorted(runtime.path.iterdir()) == before
    assert held.poll() is None


def test_a_fallback_directory_of_another_user_is_refused(
    environ: dict[str, str], runtime: RuntimeDir, held: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever makes a user's directory below /tmp first would have that user's programs."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    fallback = RuntimeDir(runtime.path, may_be_foreign=False)
    with pytest.raises(LaunchError, match=f"belongs to user {os.getuid()}, not to you .* or name this one to"):
        embedded.ensure_coordinator(fallback, environ, simulate="")
    link = RuntimeDir(runtime.path / "link", may_be_foreign=False)
    link.path.symlink_to(runtime.path)
    assert link.is_foreign()
    with pytest.raises(LaunchError, match="not a directory"):
        embedded.ensure_coordinator(link, environ, simulate="")
    assert held.poll() is None


def test_which_directory_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else a simulated program would ask the system's coordinator, which serves the node's cards."""
    system = RuntimeDir(tmp_path / "system")
    system.path.mkdir()
    monkeypatch.setattr(embedded, "SYSTEM_DIRECTORY", system.path)
    monkeypatch.setattr(runtime_dir, "SYSTEM_DIRECTORY", system.path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(system.hooks_socket))
        listener.listen()
        assert embedded.choose_directory({"XDG_RUNTIME_DIR": "/run/user/7"}, None, None) == system
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "NVSHARE_RUNTIME_DIR": str(tmp_path / "mine")}
    assert embedded.choose_directory(own, None, None).path == tmp_path / "mine"
    assert embedded.choose_directory(own, None, "").path == tmp_path / "mine"
    assert embedded.choose_directory(own, str(tmp_path / "named"), "2").path == tmp_path / "named"


def test_waiting_for_another_launcher_is_bounded(environ: dict[str, str], runtime: RuntimeDir) -> None:
    """Else a launcher that was stopped would stop every later program of the user."""
    with (runtime.path / "launch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="another launcher"):
            embedded.ensure_coordinator(runtime, environ, simulate="", timeout_s=0.05)


def test_a_failed_start_leaves_no_lock_held(environ: dict[str, str], runtime: RuntimeDir) -> None:
    """Else a program that goes on without the hook would keep an embedded coordinator for ever."""
    with pytest.raises(LaunchError, match="did not start"):
        embedded.ensure_coordinator(runtime, environ, simulate="", arguments=["--no-such-flag"])
    with runtime.keepalive_lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
