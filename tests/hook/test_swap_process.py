"""Memory mode `swap` in a real process: the whole hook over the simulated GPU, told by a scripted coordinator.

The simulated GPU keeps what is in a chunk with the chunk: what was not copied before it was released is lost.
"""

from __future__ import annotations

import random
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import wire
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.test_memory_process import Client, finished, reported, until

MIB, GIB = 1 << 20, 1 << 30
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
CAPACITY = 256 * MIB
PROGRAM = Path(__file__).resolve().parent / "programs" / "memory_program.py"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[ScriptedCoordinator]:
    """Speaks when the test does."""
    with ScriptedCoordinator(tmp_path / "hooks.sock") as scripted:
        yield scripted


@pytest.fixture
def environment(sim_env: dict[str, str], built: Any, tmp_path: Path) -> dict[str, str]:
    """Environment of a program under the hook."""
    return {
        **sim_env,
        "LD_PRELOAD": str(built.hook),
        "NVSHARE_SOCKET": str(tmp_path / "hooks.sock"),
        "NVSHARE_LOG_FILE": str(tmp_path / "log"),
        "NVSHARE_MEMORY": "swap",
        "NVSHARE_SIMULATE": "1x512MiB",
    }


def start(environment: dict[str, str], tmp_path: Path) -> Client:
    """The program, as an executable file: the loader of the script is the Python that runs the tests."""
    script = tmp_path / "program.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -S {PROGRAM}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return Client(script, environment)


def settings(coordinator: ScriptedCoordinator, capacity: int = CAPACITY, reserve: bool = False, pacing: int = 0) -> None:
    """GpuSettings for GPU 0."""
    coordinator.send(
        wire.GpuSettings(
            gpu=0, memory_limit_bytes=0, capacity_bytes=capacity, reserve=reserve, pacing_budget_ns=pacing,
            idle_release_ns=0, drain_deadline_ns=10**10, sharing=0,
        )
    )  # fmt: skip


def attached(client: Client, coordinator: ScriptedCoordinator, **values: Any) -> None:
    """Has the program use its GPU for the first time."""
    assert client.ask("start") == 0
    client.tell("info")
    coordinator.expect(wire.Hello)
    coordinator.send(wire.Welcome(wire.PROTOCOL_VERSION, 1))
    coordinator.expect(wire.AttachGpu)
    settings(coordinator, **values)
    assert client.result()[0] == 0


def order(coordinator: ScriptedCoordinator, kind: type[wire.Evict] | type[wire.Restore], number: int, size: int) -> tuple[int, int]:
    """(bytes moved, CUresult) of an order."""
    coordinator.send(kind(gpu=0, order_id=number, bytes=size))
    return finished(coordinator, number)


def last_report(coordinator: ScriptedCoordinator) -> wire.MemoryReport:
    """The newest report that was read."""
    return [m for m in coordinator.received if isinstance(m, wire.MemoryReport)][-1]


def test_data_survives_eviction(coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path) -> None:
    """Broken: a client's bytes differ after a switch, or it claims to have made room that it did not make."""
    with start(environment, tmp_path) as client:
        attached(client, coordinator)
        coordinator.grant(1)
        sizes = {1: 3 * MIB, 2: 96 * MIB, 3: 4097, 4: 1}
        pointers = {}
        for seed, size in sizes.items():
            result, pointers[seed] = client.ask("alloc", size)
            assert result == 0
            assert client.ask("write", pointers[seed], size, seed) == 0
        coordinator.revoke(1)
        held = 4 * MIB + 96 * MIB + 2 * MIB
        report = last_report(coordinator)
        assert (report.allocated_bytes, report.resident_bytes, report.pinned_bytes) == (held, held, 0)
        assert order(coordinator, wire.Evict, 5, held) == (held, 0)
        assert reported(coordinator, resident=0).host_bytes == held
        assert order(coordinator, wire.Restore, 6, held) == (held, 0)
        coordinator.grant(2)
        for seed, size in sizes.items():
            assert client.ask("same", pointers[seed], size, seed) is True
            assert client.ask("free", pointers[seed]) == 0
        assert client.ask("info")[1] == CAPACITY
