"""Containers that share a simulated GPU by the CDI specification, run by real engines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nvshare.simulated_gpu.trace import overlaps, read_trace
from tests.containers.engines import OUTER_USER, Crun, Engine, Podman, simulated_coordinator
from tests.daemon.processes import ctl
from tests.waiting import BOUND_S, eventually

WORK = ("1000", "1000000", "4")
"""Seconds, duration of a kernel, kernels in flight."""


@dataclass
class Machine:
    """A machine's coordinator of simulated GPUs, open to all users, and an engine that has the specification."""

    directory: Path
    engine: Engine
    coordinator: subprocess.Popen[bytes]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._json("status")
        return found

    def clients(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self._json("clients")["clients"]}

    def _json(self, word: str) -> Any:

        return json.loads(ctl(self.directory, word, "--json").stdout)

    def holder(self) -> str | None:
        """Name of the program with the lease of the first GPU."""
        held = self.status()["gpus"][0]["holders"]
        return next((name for name, each in self.clients().items() if each["client"] in held), None)


@pytest.fixture
def base() -> Iterator[Path]:
    """With a short path that all users may enter; not an overlay, which could not lie on another one."""
    with tempfile.TemporaryDirectory(prefix="nvs-", ignore_cleanup_errors=True) as made:  # podman may clean up
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture(params=[Crun, Podman])
def machine(request: pytest.FixtureRequest, base: Path) -> Iterator[Machine]:
    """Skipped, with the reason, where the engine cannot run a container."""
    kind: type[Engine] = request.param
    missing = [name for name in (kind.__name__.lower(), "crun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"{missing[0]} is not installed" if missing else "engines and mounts need root here")
    engine = kind(base)
    try:
        probe = engine.start("probe", Path(shutil.which("true") or "/usr/bin/true"))
        _, said = probe.communicate(timeout=BOUND_S)
        if probe.returncode != 0:
            pytest.skip(f"{kind.__name__} runs no container here: {said}")
        directory = base / "nvshare"
        with simulated_coordinator(directory) as coordinator:
            words = ("install", "cdi", "--library-dir", str(base / "lib"), "--output", str(engine.specification))
            done = ctl(directory, *words)
            assert done.returncode == 0, done.stderr
            yield Machine(directory, engine, coordinator)
    finally:
        engine.close()


def test_two_containers_take_turns(machine: Machine, saturate: Path) -> None:
    """Broken: containers do not share a GPU, run at the same time, or keep lease and memory when they are killed."""
    for name in ("one", "two"):
        device = "nvshare.com/gpu=0"
        machine.engine.start(name, saturate, *WORK, device=device, NVSHARE_NAME=name, NVSHARE_MEMORY="swap")
    eventually(lambda: machine.status()["gpus"][0]["grants"] >= 8, "turns")
    clients = machine.clients()
    assert clients.keys() == {"one", "two"}
    for each in clients.values():  # the kernel has translated both ids
        assert each["user_id"] == 0
        assert b"/program" in Path(f"/proc/{each['process_id']}/cmdline").read_bytes()
    trace = read_trace(machine.directory / "simulated_gpu")
    assert len({busy.process_id for busy in trace}) == 2
    assert overlaps(trace) == []
    assert ctl(machine.directory, "set", "quantum", "1h").returncode == 0
    eventually(lambda: machine.status()["gpus"][0]["waiting"] == 1 and machine.holder(), "one holds, one waits")
    holds = str(machine.holder())
    (waits,) = clients.keys() - {holds}
    machine.engine.kill(holds)
    eventually(lambda: machine.holder() == waits and machine.clients().keys() == {waits}, "the lease is free")
    machine.engine.kill(waits)
    eventually(lambda: not machine.clients(), "the other one's end")
    assert machine.status()["gpus"][0]["resident_bytes"] == 0


def test_a_container_sees_its_devices(machine: Machine, saturate: Path) -> None:
    """Broken: a container with the second GPU runs on the first, or options of the container are lost."""
    machine.engine.start("second", saturate, *WORK, device="nvshare.com/gpu=1", NVSHARE_CLASS="interactive")
    eventually(lambda: machine.status()["gpus"][1]["grants"], "the second GPU has a client")
    (client,) = machine.clients().values()
    assert (client["name"], client["job_class"]) == ("program", "interactive")
    assert machine.status()["gpus"][0]["grants"] == 0


def test_a_restarted_coordinator_has_its_containers_again(machine: Machine, saturate: Path) -> None:
    """Broken: a restart, which makes new sockets, leaves running containers without a coordinator."""
    machine.engine.start("one", saturate, *WORK, device="nvshare.com/gpu=all", NVSHARE_NAME="one")
    eventually(lambda: machine.holder() == "one", "it runs")
    process = machine.clients()["one"]["process_id"]
    machine.coordinator.kill()
    machine.coordinator.wait(BOUND_S)
    with simulated_coordinator(machine.directory):
        eventually(lambda: machine.holder() == "one", "it runs again")
        assert machine.clients()["one"]["process_id"] == process


def test_users_of_a_container_are_those_outside(machine: Machine, saturate: Path) -> None:
    """Broken: the coordinator takes root of a container with users of its own for root, or that container's programs
    do not trust the coordinator, whose user they cannot name."""
    if not isinstance(machine.engine, Crun):
        pytest.skip("one engine shows it; podman needs entries in /etc/subuid")
    container = machine.engine.start(
        "mapped", saturate, *WORK, device="nvshare.com/gpu=0", user=OUTER_USER, NVSHARE_NAME="mapped"
    )
    eventually(lambda: machine.clients() or container.poll() is not None, "it runs")
    if container.poll() is not None and "user" in (said := container.communicate()[1]):
        pytest.skip(f"no user namespaces here: {said}")
    assert machine.clients()["mapped"]["user_id"] == OUTER_USER
