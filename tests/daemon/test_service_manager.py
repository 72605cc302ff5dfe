"""What a service manager hears from a real coordinator, by datagrams to a real socket."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvshare.client_hook.launcher import coordinator_environment
from nvshare.coordinator.system.service_manager import ServiceManager
from tests.daemon.processes import Coordinators, Hook, Running
from tests.waiting import BOUND_S, eventually

Connect = Callable[..., Hook]
WATCHDOG_USEC = "300000"


class Supervisor:
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
def supervisor(coordinators: Coordinators) -> Iterator[Supervisor]:
    made = Supervisor(coordinators.base / "notify")
    yield made
    made.socket.close()


def supervised(coordinators: Coordinators, supervisor: Supervisor, hang_until: str = "") -> Running:
    """A coordinator that is a service with a watchdog."""
    return coordinators.start(
        NOTIFY_SOCKET=supervisor.address, WATCHDOG_USEC=WATCHDOG_USEC, HANG_UNTIL=hang_until
    )


def test_ready_means_that_clients_are_served(
    coordinators: Coordinators, supervisor: Supervisor, connect: Connect
) -> None:
    """Broken: what systemd starts after the coordinator finds no socket, or the status shows no programs."""
    running = supervised(coordinators, supervisor)
    assert (supervisor.heard(BOUND_S) or [""])[0].startswith("STATUS=looking for a driver")
    assert supervisor.heard(BOUND_S) == ["READY=1", "STATUS=serving 1 GPU(s) to 0 programs"]
    for path in (running.directory.hooks_socket, running.directory.control_socket, running.directory.events_socket):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    connect(running).hello()
    supervisor.until("STATUS=serving 1 GPU(s) to 1 program")


def test_a_hung_loop_gives_no_sign_of_life(
    coordinators: Coordinators, supervisor: Supervisor, connect: Connect
) -> None:
    """Broken: a coordinator that serves nobody any more is never restarted."""
    end = coordinators.base / "end"
    coordinators.program = "crashing.py"
    running = supervised(coordinators, supervisor, str(end))
    for _ in range(3):
        supervisor.until("WATCHDOG=1")
    connect(running).hello("hang")
    eventually(end.with_suffix(".began").exists, "the loop hangs")
    while supervisor.heard(0) is not None:
        pass
    assert supervisor.heard(int(WATCHDOG_USEC) / 1e6 * 3) is None
    end.touch()
    supervisor.until("WATCHDOG=1")


def test_reload_and_stop_are_told(coordinators: Coordinators, supervisor: Supervisor) -> None:
    """Broken: `systemctl status` shows a coordinator as running while it reloads or stops."""
    running = supervised(coordinators, supervisor)
    supervisor.until("READY=1")
    running.process.send_signal(signal.SIGHUP)
    assert supervisor.until("RELOADING=1")[1].removeprefix("MONOTONIC_USEC=").isdecimal()
    supervisor.until("READY=1")
    assert running.stop() == 0
    supervisor.until("STOPPING=1")


def test_a_supervisor_that_is_away_changes_nothing(coordinators: Coordinators) -> None:
    """Broken: a coordinator fails because of its supervisor's socket."""
    for address in (str(coordinators.base / "nobody"), "@nobody", "vsock:2:1", "relative", "/" + "x" * 200):
        ServiceManager({"NOTIFY_SOCKET": address}).tell("READY=1")
    running = coordinators.start(NOTIFY_SOCKET=str(coordinators.base / "nobody"), WATCHDOG_USEC=WATCHDOG_USEC)
    assert running.status()["clients"] == []


def test_a_full_socket_drops_messages(supervisor: Supervisor) -> None:
    """Broken: a supervisor that does not read blocks the loop."""
    manager = ServiceManager({"NOTIFY_SOCKET": supervisor.address})
    for _ in range(2_000):
        manager.tell("WATCHDOG=1")
    assert supervisor.heard(0) == ["WATCHDOG=1"]


def test_abstract_addresses_are_known() -> None:
    """Broken: supervisors with an abstract socket hear nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("")  # the kernel chooses an abstract name
        ServiceManager({"NOTIFY_SOCKET": "@" + end.getsockname()[1:].decode()}).tell("READY=1", "STATUS=x")
        assert end.recv(100) == b"READY=1\nSTATUS=x"


@pytest.mark.parametrize(
    ("environment", "period_ns"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 10_000_000_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_for_this_process(environment: dict[str, str], period_ns: int | None) -> None:
    """Broken: a coordinator pings for another process, or misreads the period."""
    assert ServiceManager({"NOTIFY_SOCKET": "/nowhere", **environment}).ping_period_ns == period_ns


def test_a_coordinator_that_a_service_starts_is_not_the_service() -> None:
    """Broken: the coordinator of a program in a service tells the service's supervisor that the service is ready."""
    given = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    assert set(coordinator_environment(given)) & set(given) == {"HOME"}
