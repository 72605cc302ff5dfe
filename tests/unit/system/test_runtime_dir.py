"""The runtime directory of coordinators and clients, and its rights."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.cli.ctl_call import check_reachable
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.system import runtime_dir
from nvshare.coordinator.system.runtime_dir import (
    RuntimeDir,
    RuntimeDirError,
    client_directory,
    lock,
    note_wait,
    own_directory,
    prepare,
)


@pytest.fixture
def directory() -> Iterator[RuntimeDir]:
    with tempfile.TemporaryDirectory(prefix="nvs-") as base:
        made = RuntimeDir(Path(base) / "run")
        prepare(made)
        yield made


@pytest.mark.parametrize(
    ("variables", "user", "path", "may_be_foreign"),
    [
        ({"NVSHARE_RUNTIME_DIR": "/x"}, 0, Path("/x"), True),
        ({"NVSHARE_RUNTIME_DIR": "/x"}, 7, Path("/x"), True),
        ({"NVSHARE_RUNTIME_DIR": "relative"}, 7, Path.cwd() / "relative", True),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 0, Path("/run/nvshare"), True),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, Path("/run/user/7/nvshare"), False),
        ({}, 7, Path("/tmp/nvshare-7"), False),
    ],
)
def test_the_directory_is_found_as_documented(
    variables: dict[str, str], user: int, path: Path, may_be_foreign: bool
) -> None:
    """Broken: tools and coordinators look in different places, or whoever makes a user's directory below /tmp first is
    taken for that user."""
    assert own_directory(variables, user) == RuntimeDir(path, may_be_foreign=may_be_foreign)


def test_tools_refuse_a_fallback_directory_of_another_user(
    directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken if nvshare-ctl showed what somebody else's socket says, or sent commands to it."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ControlError, match=f"belongs to user {os.getuid()}, not to you"):
        check_reachable(RuntimeDir(directory.path, may_be_foreign=False))
    with pytest.raises(NoCoordinatorError):
        check_reachable(directory)


def test_a_client_prefers_the_systems_coordinator_if_one_answers(
    directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken if a user's programs missed the system's coordinator, or waited for one that is dead."""
    monkeypatch.setattr(runtime_dir, "SYSTEM_DIRECTORY", directory.path)
    mine = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert client_directory(mine, 7).path == Path("/run/user/7/nvshare")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory.hooks_socket))
        assert client_directory(mine, 7).path == Path("/run/user/7/nvshare")  # bound, but nobody listens
        listener.listen()
        assert client_directory(mine, 7).path == directory.path
        assert client_directory({"NVSHARE_RUNTIME_DIR": "/x"}, 7).path == Path("/x")


def test_the_lock_names_its_holder_and_ends_with_it(directory: RuntimeDir) -> None:
    """Broken if two coordinators could hold it, or a dead one kept it."""
    assert directory.coordinator_pid() is None
    child, parent = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        lock(directory)
        child.send(b"1")
        child.recv(1)
        os._exit(0)
    assert parent.recv(1) == b"1"
    assert directory.coordinator_pid() == pid
    with pytest.raises(RuntimeDirError, match=f"pid {pid}"):
        lock(directory)
    parent.send(b"1")
    os.waitpid(pid, 0)
    assert directory.coordinator_pid() is None
    os.close(lock(directory))
    child.close()
    parent.close()


def test_a_coordinator_that_waits_for_a_card_says_so_to_others(directory: RuntimeDir) -> None:
    """Broken: who starts a program is told to stop the coordinator that waits, not the one that has the card."""
    parent, child = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        parent.close()  # the parent's end, also by a failure, ends this process
        held = lock(directory)
        for reason in ("GPU-1 is scheduled by process 7; stop it", ""):
            note_wait(held, reason)
            child.send(b"1")
            child.recv(1)
        os._exit(0)
    child.close()
    assert parent.recv(1) == b"1"
    assert directory.coordinator_pid() == pid
    text = rf"\(pid {pid}\) does not serve yet: GPU-1 is scheduled by process 7; stop it$"
    with pytest.raises(RuntimeDirError, match=text):
        lock(directory)
    with pytest.raises(NoCoordinatorError, match="does not serve yet: GPU-1 is scheduled by process 7; stop it"):
        check_reachable(directory)
    parent.send(b"1")
    assert parent.recv(1) == b"1"
    with pytest.raises(RuntimeDirError, match=rf"another coordinator \(pid {pid}\) runs"):
        lock(directory)
    parent.close()
    os.waitpid(pid, 0)
    assert directory.waiting_reason() == ""  # of a process that is gone


def test_asking_who_runs_is_no_obstacle_to_starting(directory: RuntimeDir) -> None:
    """Broken if a tool that looks whether somebody runs made the start fail."""
    os.close(lock(directory))
    asking = os.open(directory.lock_file, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    (directory.path / "coordinator.lock").write_text("999999999\n")  # of a coordinator that is gone

    class Asks:
        """Lets go after a few attempts, as a tool does after an instant."""

        attempts = 0

        def sleep(self, _: float) -> None:
            self.attempts += 1
            if self.attempts == 5:
                os.close(asking)

    asks = Asks()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "sleep", asks.sleep)
        os.close(lock(directory))
    assert asks.attempts == 5


def test_an_existing_directory_keeps_its_mode(directory: RuntimeDir) -> None:
    """Broken if an operator's own choice of mode were undone."""
    directory.path.chmod(0o750)
    prepare(directory)
    assert directory.path.stat().st_mode & 0o777 == 0o750


def test_the_mode_does_not_depend_on_the_umask() -> None:
    """Broken if a careless or strict umask opened or closed the directory."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as base:
        for umask in (0, 0o777):
            made = RuntimeDir(Path(base) / f"run{umask}")
            before = os.umask(umask)
            try:
                prepare(made)
            finally:
                os.umask(before)
            assert made.path.stat().st_mode & 0o777 == 0o700


def test_directories_that_cannot_be_used_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """Broken if a bad directory ended in a traceback, or was used."""
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    cases = {
        tmp_path / "file": "not a directory",
        tmp_path / "open": "chmod go-w",
        tmp_path / ("x" * 120): "choose a shorter directory",
        Path("/proc/nvshare"): "--runtime-dir",
    }
    if os.geteuid() == 0:
        (tmp_path / "foreign").mkdir()
        os.chown(tmp_path / "foreign", 12_345, 12_345)
        cases[tmp_path / "foreign"] = "belongs to user 12345"
    else:
        (tmp_path / "closed").mkdir(mode=0o500)
        cases[tmp_path / "closed"] = "no permission"
    for path, remedy in cases.items():
        with pytest.raises(RuntimeDirError, match=remedy):
            prepare(RuntimeDir(path))


def test_a_link_in_place_of_the_lock_is_not_followed(directory: RuntimeDir, tmp_path: Path) -> None:
    """Broken if somebody could make a coordinator overwrite another file."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory.lock_file.symlink_to(victim)
    with pytest.raises(RuntimeDirError, match=r"coordinator\.lock"):
        lock(directory)
    assert victim.read_text() == "precious"
