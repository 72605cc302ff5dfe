"""The system's coordinator and launchers: who waits for it, who shares its cards, who may have them meanwhile."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nvshare.client_hook import embedded
from nvshare.client_hook.launcher import LaunchError
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system import runtime_dir
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.environment import simulated_environment
from nvshare.simulated_gpu.trace import gpus_of
from tests.waiting import BOUND_S, eventually

SUPERVISED = {"NOTIFY_SOCKET": "/nowhere"}
"""Of a coordinator that systemd would start again."""
PROGRAM = Path(__file__).parent / "programs" / "system_coordinator.py"


class System:
    """A directory in the place of the system's, and the coordinators that a test starts in it."""

    def __init__(self, directory: RuntimeDir, environ: dict[str, str]) -> None:
        self.directory = directory
        self._environ = environ
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, supervised: bool = True) -> subprocess.Popen[bytes]:
        """One that serves."""
        command = [sys.executable, str(PROGRAM), str(self.directory.path), *words]
        environ = self._environ | SUPERVISED if supervised else self._environ
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.started.append(process)
        eventually(lambda: self.directory.answers() and self.directory.events_socket.exists(), "it listens everywhere")
        call(self.directory, api.Status())
        assert self.directory.daemon_mark.exists() == supervised
        return process

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.started[-1].send_signal(number)
        assert self.started[-1].wait() == (-number if number == signal.SIGKILL else 0)


@pytest.fixture
def system(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    """No coordinator runs there yet."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as base:
        directory = RuntimeDir(Path(base) / "system")
        for module in (embedded, runtime_dir):
            monkeypatch.setattr(module, "SYSTEM_DIRECTORY", directory.path)
        made = System(directory, environ)
        yield made
        for process in made.started:
            process.kill()
            process.wait()


@pytest.fixture
def own(environ: dict[str, str], runtime: RuntimeDir) -> dict[str, str]:
    """The environment of a user whose own directory is `runtime`, by XDG_RUNTIME_DIR."""
    made = {name: value for name, value in environ.items() if name != "NVSHARE_RUNTIME_DIR"}
    return made | {"XDG_RUNTIME_DIR": str(runtime.path)}


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's own directory is the system's; these tests are of other users'."""
    real = runtime_dir.own_directory
    for module in (embedded, runtime_dir):
        monkeypatch.setattr(module, "own_directory", lambda environ, _user=None: real(environ, os.geteuid() or 1))


def test_a_launcher_waits_while_the_systems_coordinator_is_restarted(
    system: System, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an embedded coordinator takes the place of the system's, which then cannot come back."""
    system.start("--simulate=1x1GiB")
    system.stop()
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)

    def launch() -> embedded.Attached:
        directory = embedded.choose_directory(own, None, "")
        patient = own | {"NVSHARE_SYSTEM_WAIT": f"{BOUND_S:.0f}s"}
        return embedded.ensure_coordinator(directory, patient, simulate="")

    with ThreadPoolExecutor() as threads:
        launched = threads.submit(launch)
        eventually(said.getvalue, "it says that it waits")
        again = system.start("--simulate=1x1GiB")
        attached = launched.result(BOUND_S)
    assert (attached.directory, attached.started) == (system.directory, False)
    assert system.directory.coordinator_pid() == again.pid
    assert said.getvalue().count("\n") == 1
    if attached.keepalive is not None:
        os.close(attached.keepalive)


def test_a_wait_in_vain_ends_with_a_message(
    system: System, own: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a launcher waits for ever, or starts a second coordinator beside one that comes back later."""
    system.start("--simulate=1x1GiB")
    system.stop()
    directory = embedded.choose_directory(own, None, "")
    with pytest.raises(LaunchError, match=f"does not answer; .* remove {system.directory.daemon_mark}"):
        embedded.ensure_coordinator(directory, own | {"NVSHARE_SYSTEM_WAIT": "20ms"}, simulate="")
    assert not (system.directory.path / "coordinator.log").exists()
    assert "waiting up to 20ms for the coordinator in" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="NVSHARE_SYSTEM_WAIT: "):
        embedded.ensure_coordinator(directory, own | {"NVSHARE_SYSTEM_WAIT": "soon"}, simulate="")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_coordinator_that_nothing_starts_again_is_not_waited_for(
    system: System, own: dict[str, str], runtime: RuntimeDir, number: int
) -> None:
    """Broken: after a trial of the daemon nobody could use nvshare-run until the next boot."""
    system.start("--simulate=1x1GiB", supervised=False)
    system.stop(number)
    assert embedded.choose_directory(own, None, "").path == runtime.path / "nvshare"
    assert system.directory.simulated_gpu.exists() == (number == signal.SIGKILL), "it takes room"


def test_other_simulated_gpus_than_an_earlier_coordinators(system: System, runtime: RuntimeDir) -> None:
    """Broken: `--simulate=2x2GiB` serves the cards of an earlier simulation, or takes them from its programs."""
    system.start("--simulate=1x1GiB", supervised=False)
    system.stop(signal.SIGKILL)
    with system.directory.keepalive_lock.open("w") as program:
        fcntl.flock(program, fcntl.LOCK_SH)
        system.start("--simulate=2x2GiB", supervised=False)
        assert gpus_of(system.directory.simulated_gpu, "1x1GiB")[1]
        system.stop(signal.SIGKILL)
    system.start("--simulate=2x2GiB", supervised=False)
    assert gpus_of(system.directory.simulated_gpu, "2x2GiB")[1]


def test_a_slot_of_another_user_is_refused_at_once(own: dict[str, str], tmp_path: Path) -> None:
    """Broken: a launcher waits 10 s for a coordinator that runs, and then advises to restart it."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as base, socket.socket(socket.AF_UNIX) as listener:
        slot = RuntimeDir(Path(base))
        slot.path.chmod(0o711)
        slot.daemon_mark.touch()
        listener.bind(str(slot.hooks_socket))
        slot.hooks_socket.chmod(0)
        listener.listen()
        root = os.geteuid() == 0
        os.seteuid(65534 if root else os.geteuid())
        try:
            with pytest.raises(LaunchError, match=r"does not serve user .* choose another directory"):
                embedded.ensure_coordinator(slot, own, simulate="")
        finally:
            os.seteuid(0 if root else os.geteuid())


def test_a_users_own_coordinator_that_runs_is_used_meanwhile(
    system: System, own: dict[str, str], runtime: RuntimeDir
) -> None:
    """Broken: while the system's daemon waits for a card, the user who has it could start nothing more on it."""
    system.start("--simulate=1x1GiB")
    system.stop()
    mine = RuntimeDir(runtime.path / "nvshare")
    attached = embedded.ensure_coordinator(mine, own, simulate="")
    try:
        assert embedded.choose_directory(own, None, "") == mine
    finally:
        assert attached.keepalive is not None
        os.close(attached.keepalive)
        pid = mine.coordinator_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def test_a_users_own_coordinator_is_waited_for_and_takes_over_from_an_embedded_one(
    own: dict[str, str], runtime: RuntimeDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: in the second of an upgrade an embedded coordinator took the daemon's place and deleted its settings."""
    mine = RuntimeDir(runtime.path / "nvshare")
    command = [sys.executable, "-m", "nvshare.coordinator.daemon.main", "--simulate=1x1GiB"]
    command += ["--runtime-dir", str(mine.path), "--sharing", "exclusive"]
    attached = embedded.ensure_coordinator(mine, own, simulate="1x1GiB")  # before the daemon was installed
    assert (attached.started, attached.keepalive is not None) == (True, True)
    began, again = mine.coordinator_pid(), own | SUPERVISED
    daemon = subprocess.Popen(command, env=again, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: mine.daemon_mark.exists() and mine.answers(), "it serves")
        assert mine.coordinator_pid() == daemon.pid != began
        call(mine, api.Set(setting="quantum", value=77_000_000))
        daemon.kill()
        daemon.wait()
        with pytest.raises(LaunchError, match=f"does not answer; .* remove {mine.daemon_mark}"):
            embedded.ensure_coordinator(mine, own | {"NVSHARE_SYSTEM_WAIT": "20ms"}, simulate="1x1GiB")
        assert f"waiting up to 20ms for the coordinator in {mine.path}" in capsys.readouterr().err
        daemon = subprocess.Popen(command, env=again, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(lambda: mine.answers() and mine.events_socket.exists(), "it serves again")
        gpu = call(mine, api.Status())["gpus"][0]
        assert (gpu["sharing"], gpu["quantum_ns"]) == ("exclusive", 77_000_000)
    finally:
        os.close(attached.keepalive or 0)
        daemon.kill()
        daemon.wait()


def test_users_share_the_systems_simulation(system: System, own: dict[str, str], runtime: RuntimeDir) -> None:
    """Broken: each user gets simulated cards of their own, or cannot write the state of the shared ones."""
    assert embedded.choose_directory(own, None, "").path == runtime.path / "nvshare"
    system.start("--simulate=1x1GiB")
    assert embedded.choose_directory(own, None, "") == system.directory
    assert stat.S_IMODE(system.directory.simulated_gpu.stat().st_mode) == 0o666
    status = call(system.directory, api.Status())
    assert (status["simulated"], [gpu["total_bytes"] for gpu in status["gpus"]]) == (True, [1 << 30])
    assert embedded.choose_directory(own, None, None).path == runtime.path / "nvshare", "real cards are not there"


def test_a_coordinator_waits_for_the_card_of_another_one(
    environ: dict[str, str], runtime: RuntimeDir, tmp_path: Path
) -> None:
    """Broken: two users' coordinators grant one card, or the one that comes back gives up."""
    as_if_real = simulated_environment(tmp_path / "cards", None, environ)
    directories = [RuntimeDir(runtime.path / name) for name in ("first", "second")]
    log = tmp_path / "log"
    started = []
    try:
        for directory in directories:
            command = [sys.executable, "-m", "nvshare.coordinator.daemon.main", "--runtime-dir", str(directory.path)]
            with log.open("wb") as output:
                started.append(subprocess.Popen(command, env=as_if_real, stdin=subprocess.DEVNULL, stderr=output))
            if len(started) == 1:
                eventually(directory.answers, "the first one serves")
        named = f"is scheduled by process {started[0].pid} of user "
        eventually(lambda: named in log.read_text(), "the second one says who has the card")
        assert str(directories[0].path) in log.read_text()
        assert not directories[1].answers()
        started[0].terminate()
        eventually(directories[1].answers, "the second one serves")
    finally:
        for process in started:
            process.kill()
            process.wait()
