"""Programs with a sticky error: their calls need no lease, and their memory is dropped.

Non-goals: other programs beside them (tests/end_to_end/test_dead_contexts.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import MIB, Client, attached, reported, simulated, start
from tests.hook.scripted import ScriptedCoordinator

__all__ = ["simulated"]  # fixture

ILLEGAL_ADDRESS = 700
UNKNOWN = 999
NOWHERE = 16
SIZE = 96 * MIB


def faulted(client: Client, coordinator: ScriptedCoordinator) -> int:
    """Memory of a program that faults under its lease, and gives the lease back."""
    coordinator.grant(1)
    assert client.ask("held") == 0
    result, pointer = client.ask("alloc", SIZE)
    assert result == 0
    assert client.ask("write", pointer, SIZE, 3) == 0
    assert client.ask("kernel_copy", NOWHERE, NOWHERE, 4) == ILLEGAL_ADDRESS
    assert coordinator.revoke(1).drained
    return int(pointer)


@pytest.mark.parametrize("mode", ["device", "managed", "swap"])
def test_calls_need_no_lease(coordinator: ScriptedCoordinator, simulated: dict[str, str], mode: str) -> None:
    """Broken: a notebook whose kernel has failed waits for its turn to hear so, and has memory moved for that."""
    with start({**simulated, "NVSHARE_MEMORY": mode}) as client:
        attached(client, coordinator)
        pointer = faulted(client, coordinator)
        before = len(coordinator.received)
        assert client.ask("read", pointer, 4) == ILLEGAL_ADDRESS
        assert client.ask("alloc", MIB)[0] == ILLEGAL_ADDRESS
        assert client.ask("kernel_copy", pointer, pointer, 4) == ILLEGAL_ADDRESS
        assert not [m for m in coordinator.received[before:] if isinstance(m, messages.Request)]


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_memory_is_dropped(
    coordinator: ScriptedCoordinator, simulated: dict[str, str], tmp_path: Path, mode: str
) -> None:
    """Broken: others wait for room until the program ends, or what is dropped is to be brought back."""
    with start({**simulated, "NVSHARE_MEMORY": mode}) as client:
        attached(client, coordinator)
        faulted(client, coordinator)
        moved = SIZE if mode == "swap" else 0
        assert coordinator.evict(SIZE) == (moved, 0)
        report = reported(coordinator, resident=0)
        assert (report.allocated_bytes, report.pinned_bytes, report.host_bytes) == (0, 0, 0)
        assert coordinator.restore(SIZE) == (0, 0)
        assert reported(coordinator, resident=0).allocated_bytes == 0
    log = (tmp_path / "log").read_text()
    assert log.count("\n") == 1, log


def test_a_context_beside_a_dead_one(coordinator: ScriptedCoordinator, simulated: dict[str, str]) -> None:
    """Broken: memory that a living context uses is dropped, or does not move since another context is dead."""
    with start({**simulated, "NVSHARE_MEMORY": "swap"}) as client:
        assert client.ask("another") == 0, "the first that a move finds"
        attached(client, coordinator)
        coordinator.grant(1)
        assert client.ask("held") == 0
        pointer = client.ask("alloc", SIZE)[1]
        assert client.ask("write", pointer, SIZE, 3) == 0
        assert client.ask("switch", 1) == 0
        assert client.ask("kernel_copy", NOWHERE, NOWHERE, 4) == ILLEGAL_ADDRESS
        assert client.ask("switch", 0) == 0
        assert coordinator.revoke(1).drained
        assert coordinator.evict(SIZE) == (SIZE, 0)
        client.tell(f"same {pointer} {SIZE} 3")
        coordinator.expect(messages.Request)
        assert coordinator.restore(SIZE) == (SIZE, 0)
        coordinator.grant(2)
        assert client.result() is True


@pytest.mark.parametrize("code", [46, 719, 999])
def test_memory_of_a_lost_gpu_is_dropped(
    coordinator: ScriptedCoordinator, simulated: dict[str, str], tmp_path: Path, code: int
) -> None:
    """Broken: a driver that fails all copies keeps a program's memory on the card, and others wait until it ends."""
    faults = f"cuMemcpyDtoHAsync@1-={code}"
    with start({**simulated, "NVSHARE_MEMORY": "swap", "NVSHARE_SIM_FAULTS": faults}) as client:
        attached(client, coordinator)
        coordinator.grant(1)
        assert client.ask("held") == 0
        pointer = client.ask("alloc", SIZE)[1]
        assert client.ask("write", pointer, SIZE, 3) == 0
        assert coordinator.revoke(1).drained
        for _ in range(2):
            assert coordinator.evict(SIZE) == (0, UNKNOWN)
            assert reported(coordinator, resident=SIZE).allocated_bytes == SIZE, "it may have been a passing failure"
        assert coordinator.evict(SIZE) == (SIZE, 0)
        assert reported(coordinator, resident=0).allocated_bytes == 0
    log = (tmp_path / "log").read_text()
    assert f"have the CUDA error {code} until the program ends" in log
