"""The control daemon's process, with the double of NVIDIA's program: started, watched, stopped, nothing left."""

from __future__ import annotations

import os
import pwd
import select
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.system.mps import obstacles
from nvshare.coordinator.system.mps.daemon import ControlDaemon, DaemonError
from tests import fake_mps
from tests.waiting import eventually

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def base() -> Iterator[Path]:
    """With a short path, because socket paths are short."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as made:
        yield Path(made)


@pytest.fixture
def environ(base: Path) -> dict[str, str]:
    return {"PATH": fake_mps.install(base / "bin"), "CUDA_MPS_PIPE_DIRECTORY": str(base / "none")}


@pytest.fixture
def daemon(base: Path, environ: dict[str, str]) -> Iterator[ControlDaemon]:
    made = ControlDaemon(base / "mps", environ, real_cards=False)
    yield made
    (base / "bin" / "clients").unlink(missing_ok=True)
    made.quit(wait=True)
    made.forget()


def pid_of(daemon: ControlDaemon) -> int:
    return int((daemon.pipe_directory / "nvidia-cuda-mps-control.pid").read_text())


def exists(process_id: int) -> bool:
    """Not counting a zombie whose parent has not asked yet."""
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def servers(daemon: ControlDaemon) -> list[int]:
    return [int(word) for word in daemon.command("get_server_list").split()]


def test_a_daemon_starts_with_its_server_and_stops_with_all(daemon: ControlDaemon, base: Path) -> None:
    """Broken: programs are sent to a server that cannot start, or processes stay after the end."""
    daemon.start(os.geteuid())
    started = [pid_of(daemon), *servers(daemon)]
    assert len(started) == 2
    (base / "bin" / "clients").write_text("11 12")
    daemon.quit(wait=False)
    assert all(map(exists, started)), "it has clients"
    (base / "bin" / "clients").unlink()
    assert daemon.pidfd is not None
    assert select.select([daemon.pidfd], [], [], 60.0)[0]
    eventually(lambda: not any(map(exists, started)), "the end of the daemon and the server")


@pytest.mark.parametrize(
    ("mode", "reason"), [("refuse", "already running"), ("no-server", "the MPS server does not start")]
)
def test_a_start_that_fails_leaves_nothing(
    daemon: ControlDaemon, base: Path, monkeypatch: pytest.MonkeyPatch, mode: str, reason: str
) -> None:
    """Broken: the operator does not learn why, or every program fails in cuInit."""
    monkeypatch.setattr("nvshare.coordinator.system.mps.daemon.START_TIMEOUT_S", 3.0)
    (base / "bin" / "mode").write_text(mode)
    with pytest.raises(DaemonError, match=reason):
        daemon.start(os.geteuid())
    assert daemon.pidfd is None
    assert not obstacles.answers(daemon.pipe_directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of another user")
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="the double needs a Python that every user may read")
def test_root_starts_the_daemon_as_its_user(daemon: ControlDaemon, base: Path) -> None:
    """Broken: a user's server runs as root, or the user's programs cannot reach it."""
    nobody = pwd.getpwnam("nobody").pw_uid
    base.chmod(0o755)
    fake_mps.install(base / "bin", SYSTEM_PYTHON)
    daemon.start(nobody)
    users = {Path(f"/proc/{pid}").stat().st_uid for pid in (pid_of(daemon), *servers(daemon))}
    assert users == {nobody}
    assert daemon.pipe_directory.stat().st_uid == nobody


def test_a_pid_file_that_names_another_process_is_not_believed(daemon: ControlDaemon) -> None:
    """Broken: a reused process id makes the coordinator end a stranger."""
    daemon.pipe_directory.mkdir(parents=True)
    (daemon.pipe_directory / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    assert not daemon.find()


def test_each_obstacle_is_named_with_its_remedy(base: Path, environ: dict[str, str]) -> None:
    """Broken: MPS does not start and nobody learns why."""
    pipe = base / "mps" / "pipe"
    assert obstacles.find_obstacle(pipe, environ, real_cards=False) is None
    assert "install it" in str(obstacles.find_obstacle(pipe, {"PATH": str(base)}, real_cards=False))
    too_long = obstacles.find_obstacle(base / ("x" * 90), environ, real_cards=False)
    assert "shorter --runtime-dir" in str(too_long)
    foreign = base / "none"
    foreign.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(foreign / "control"))
        assert obstacles.find_obstacle(pipe, environ, real_cards=False) is None, "a socket that nobody serves"
        listener.listen(1)
        found = str(obstacles.find_obstacle(pipe, environ, real_cards=False))
        assert str(foreign) in found
        assert "echo quit" in found


def test_a_foreign_mps_process_is_found(base: Path) -> None:
    """Broken: a second daemon starts on the cards of another user's MPS; or MPS starts once and never again where the
    first process waits for no orphan, as in many containers."""
    for number, own, state in (("6", False, "Z"), ("7", True, "S"), ("8", False, "S")):
        entry = base / number
        entry.mkdir()
        (entry / "comm").write_text("nvidia-cuda-mps\n")
        (entry / "stat").write_text(f"{number} (nvidia-cuda-mps) {state} 1 1 1 0")
        value = base / "pipe" if own else "/elsewhere"
        (entry / "environ").write_bytes(f"A=1\0CUDA_MPS_PIPE_DIRECTORY={value}\0".encode())
    assert "pid 8" in str(obstacles._foreign_process(base, base / "pipe"))
    (base / "8" / "comm").write_text("bash\n")
    assert obstacles._foreign_process(base, base / "pipe") is None
