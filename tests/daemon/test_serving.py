"""A coordinator's own life: starting, refusing to start, stopping, leaving, and what its supervisor hears of it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvshare.client_hook.launcher import coordinator_environment
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.supervisor import Supervisor
from nvshare.coordinator.protocol import messages
from tests.daemon.made_up_gpus import uuid_of
from tests.daemon.processes import Coordinators, Hook, Running
from tests.waiting import BOUND_S, eventually

Connect = Callable[..., Hook]
WATCHDOG_USEC = "300000"


def test_a_client_is_served_and_a_waiter_makes_the_holder_give_up(coordinator: Running, connect: Connect) -> None:
    """Broken if the path from a frame to a grant, or the quantum's timer, were."""
    first = connect(coordinator).hello("first").attach(wanted=True)
    assert first.next(messages.Welcome).client_id
    lease = first.next(messages.Grant)
    second = connect(coordinator).hello("second").attach(wanted=True)
    assert first.next(messages.Revoke).lease_id == lease.lease_id
    first.release(lease.lease_id)
    assert second.next(messages.Grant).lease_id > lease.lease_id


def test_only_one_coordinator_serves_a_directory(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a second one took the sockets away from the first."""
    running = coordinators.start()
    code, text = coordinators.refused()
    assert code == 1
    assert f"pid {running.process.pid}" in text
    assert "--runtime-dir" in text
    assert connect(running).hello().next(messages.Welcome)


def test_what_a_dead_coordinator_left_is_replaced(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if a killed coordinator's sockets, or a file in their place, kept the next one from starting."""
    dead = coordinators.start()
    dead.kill()
    assert dead.directory.hooks_socket.exists()
    dead.directory.control_socket.unlink()
    dead.directory.control_socket.write_text("old")
    running = coordinators.start()
    assert connect(running).hello().next(messages.Welcome)
    assert running.status()


def test_a_signal_stops_in_order(coordinators: Coordinators) -> None:
    """Broken if stopping left sockets behind or reported a failure."""
    running = coordinators.start()
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait() == 0
    left = {path.name for path in running.directory.path.iterdir()}
    assert not {"hooks.sock", "control.sock", "events.sock"} & left


def test_files_are_private(coordinator: Running) -> None:
    """Broken if another user could reach a user's own coordinator."""
    assert coordinator.directory.path.stat().st_mode & 0o777 == 0o700
    for path in coordinator.directory.path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_gpu_that_is_not_there_is_named(coordinators: Coordinators) -> None:
    """Broken if settings for a misspelt GPU were silently without effect."""
    settings = coordinators.base / "settings.toml"
    settings.write_text('[gpu."GPU-nowhere"]\nquantum = "1s"\n')
    code, text = coordinators.refused("--config", str(settings))
    assert code == 2
    assert "GPU-nowhere" in text
    assert uuid_of(0) in text
    code, text = coordinators.refused("--simulate=2xbig")
    assert code == 2
    assert "[xCAPACITY]" in text


def test_settings_of_one_gpu_are_its_own(coordinators: Coordinators) -> None:
    """Broken if an override changed other GPUs, or none."""
    settings = coordinators.base / "settings.toml"
    settings.write_text(
        f'quantum = "300ms"\n[gpu."{uuid_of(1)}"]\nquantum = "auto"\npolicy = "priority"\n'
        'capacity = "2GiB"\nsharing = "concurrent"\n'
    )
    first, second = coordinators.start("--config", str(settings), gpus=2).status()["gpus"]
    assert (first["quantum_ns"], first["policy"], first["sharing"]) == (300_000_000, "auto", "auto")
    assert first["capacity_bytes"] == 8 << 30
    assert second["quantum_automatic"]
    assert (second["policy"], second["sharing"], second["capacity_bytes"]) == ("priority", "concurrent", 2 << 30)


def test_hangup_reads_the_settings_again(coordinators: Coordinators) -> None:
    """Broken: SIGHUP ends the coordinator, ignores the file, takes a broken one, hides what waits for a restart, or
    undoes what was set live."""
    settings = coordinators.base / "settings.toml"
    settings.write_text('quantum = "300ms"\n')
    running = coordinators.start("--config", str(settings), gpus=2)

    def quanta() -> list[int]:
        return [gpu["quantum_ns"] for gpu in running.status()["gpus"]]

    def reloads(text: str, said: str) -> None:
        settings.write_text(text)
        running.process.send_signal(signal.SIGHUP)
        eventually(lambda: said in running.log.read_text(), said)

    reloads('quantum = "nonsense"\n', "settings are unchanged")
    assert quanta() == [300_000_000] * 2
    running.ask(api.Set(setting="quantum", value=5_000_000, gpu="1"))
    reloads('quantum = "700ms"\nswitch_share = "7%"\n', "settings reloaded")
    assert "live settings stay in force: quantum of GPU 1 " in running.log.read_text()
    assert quanta() == [700_000_000, 5_000_000]
    assert [gpu["switch_share"] for gpu in running.status()["gpus"]] == [0.07, 0.07]
    assert "need a restart" not in running.log.read_text()
    of_gpu = f'[gpu."{uuid_of(1)}"]\nquantum = "900ms"\ncapacity = "1GiB"\n'
    reloads('quantum = "700ms"\nrecovery = "9s"\n' + of_gpu, "changes of recovery, gpu need a restart")
    assert running.ask(api.Unset(setting="quantum"))["undone"][0]["value"] == 5_000_000
    assert quanta() == [700_000_000, 900_000_000], "as the file says now, not as at the start"


def test_an_embedded_coordinator_leaves_when_nobody_needs_it(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if it stayed for ever, or left while a program or a client wants it."""
    directory = coordinators.base / "run"
    directory.mkdir(mode=0o700)
    keepalive = os.open(directory / "keepalive.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(keepalive, fcntl.LOCK_SH)
    running = coordinators.start("--embedded", "--linger", "20ms", "--log-level", "debug")
    running.ask(api.Set(setting="quantum", value=5_000_000))
    assert running.directory.live_settings.exists()
    client = connect(running).hello()
    client.next(messages.Welcome)
    os.close(keepalive)
    assert running.ask(api.Ping())["clients"] == 1  # the client alone keeps it
    client.close()
    assert running.process.wait() == 0
    assert not running.directory.hooks_socket.exists()
    assert not running.directory.live_settings.exists(), "what was set was for the programs that are gone"


def test_an_idle_coordinator_sleeps(coordinator: Running, connect: Connect) -> None:
    """Broken if the loop polled: with a holder alone, no timer is set, so the process makes no system call."""
    client = connect(coordinator).hello().attach(wanted=True)
    client.next(messages.Grant)
    coordinator.ask(api.Ping())

    def switches() -> int:
        text = Path(f"/proc/{coordinator.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("voluntary_ctxt")))

    def settled() -> bool:
        before = switches()
        assert not client.socket.poll(200)  # nothing is said to a holder alone
        return switches() == before

    eventually(settled, "a coordinator that does nothing for 200 ms")


class Listener:
    """The supervisor's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)

    def heard(self, seconds: float) -> list[str] | None:
        """The lines of the next message; None if none comes."""
        readable, _, _ = select.select([self.socket], [], [], seconds)
        return self.socket.recv(4096).decode().split("\n") if readable else None

    def until(self, line: str) -> list[str]:
        """The message with this line; those before it are dropped."""
        while (lines := self.heard(BOUND_S)) is not None:
            if line in lines:
                return lines
        raise AssertionError(f"no {line}")


@pytest.fixture
def listener(coordinators: Coordinators) -> Iterator[Listener]:
    made = Listener(coordinators.base / "notify")
    yield made
    made.socket.close()


def supervised(coordinators: Coordinators, listener: Listener, hang_until: str = "") -> Running:
    """A coordinator that is a service with a watchdog."""
    return coordinators.start(NOTIFY_SOCKET=listener.address, WATCHDOG_USEC=WATCHDOG_USEC, HANG_UNTIL=hang_until)


def test_ready_means_that_clients_are_served(coordinators: Coordinators, listener: Listener, connect: Connect) -> None:
    """Broken: what systemd starts after the coordinator finds no socket, or the status shows no programs."""
    running = supervised(coordinators, listener)
    assert (listener.heard(BOUND_S) or [""])[0].startswith("STATUS=looking for a driver")
    assert listener.heard(BOUND_S) == ["READY=1", "STATUS=serving 1 GPU to 0 programs"]
    for path in (running.directory.hooks_socket, running.directory.control_socket, running.directory.events_socket):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    connect(running).hello()
    listener.until("STATUS=serving 1 GPU to 1 program")


def test_a_hung_loop_gives_no_sign_of_life(coordinators: Coordinators, listener: Listener, connect: Connect) -> None:
    """Broken: a coordinator that serves nobody any more is never restarted."""
    end = coordinators.base / "end"
    coordinators.program = "crashing.py"
    running = supervised(coordinators, listener, str(end))
    for _ in range(3):
        listener.until("WATCHDOG=1")
    connect(running).hello("hang")
    eventually(end.with_suffix(".began").exists, "the loop hangs")
    while listener.heard(0) is not None:
        pass
    assert listener.heard(int(WATCHDOG_USEC) / 1e6 * 3) is None
    end.touch()
    listener.until("WATCHDOG=1")


def test_reload_and_stop_are_told(coordinators: Coordinators, listener: Listener) -> None:
    """Broken: `systemctl status` shows a coordinator as running while it reloads or stops."""
    running = supervised(coordinators, listener)
    listener.until("READY=1")
    running.process.send_signal(signal.SIGHUP)
    assert listener.until("RELOADING=1")[1].removeprefix("MONOTONIC_USEC=").isdecimal()
    listener.until("READY=1")
    assert running.stop() == 0
    listener.until("STOPPING=1")


def test_a_supervisor_that_is_away_changes_nothing(coordinators: Coordinators) -> None:
    """Broken: a coordinator fails because of its supervisor's socket."""
    for address in (str(coordinators.base / "nobody"), "@nobody", "vsock:2:1", "relative", "/" + "x" * 200):
        Supervisor({"NOTIFY_SOCKET": address}).tell("READY=1")
    running = coordinators.start(NOTIFY_SOCKET=str(coordinators.base / "nobody"), WATCHDOG_USEC=WATCHDOG_USEC)
    assert running.status()["clients"] == []


def test_a_full_socket_drops_messages(listener: Listener) -> None:
    """Broken: a supervisor that does not read blocks the loop."""
    manager = Supervisor({"NOTIFY_SOCKET": listener.address})
    for _ in range(2_000):
        manager.tell("WATCHDOG=1")
    assert listener.heard(0) == ["WATCHDOG=1"]


def test_abstract_addresses_are_known() -> None:
    """Broken: supervisors with an abstract socket hear nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("")  # the kernel chooses an abstract name
        Supervisor({"NOTIFY_SOCKET": "@" + end.getsockname()[1:].decode()}).tell("READY=1", "STATUS=x")
        assert end.recv(100) == b"READY=1\nSTATUS=x"


@pytest.mark.parametrize(
    ("environment", "period_ns"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 10_000_000_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, (10**20 - 1) * 1_000 // 3),
        ({}, None),
    ],
)
def test_the_watchdog_is_for_this_process(environment: dict[str, str], period_ns: int | None) -> None:
    """Broken: a coordinator pings for another process, or misreads the period."""
    assert Supervisor({"NOTIFY_SOCKET": "/nowhere", **environment}).ping_period_ns == period_ns


def test_a_coordinator_that_a_service_starts_is_not_the_service() -> None:
    """Broken: the coordinator of a program in a service tells the service's supervisor that the service is ready."""
    given = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    assert set(coordinator_environment(given)) & set(given) == {"HOME"}
