"""A lease that went back while its work still ran: memory is not moved under that work.

Non-goals: how memory moves (test_swap_targets.py, test_swap_process.py).
"""

from __future__ import annotations

import pytest

from tests.hook.memory.test_memory_process import MIB, begun
from tests.hook.scripted import ScriptedCoordinator
from tests.waiting import eventually

MS = 1_000_000
NOT_READY = 600
SIZE = 8 * MIB


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_memory_stays_while_work_runs(coordinator: ScriptedCoordinator, hook_env: dict[str, str], mode: str) -> None:
    """Broken: memory moves under a kernel that uses it, or a target that cannot be reached hangs or lies."""
    with begun(hook_env | {"NVSHARE_MEMORY": mode}, coordinator) as client:
        result, pointer = client.ask("alloc", SIZE)
        assert result == client.ask("write", pointer, SIZE, 3) == client.ask("block") == 0
        assert not coordinator.revoke(1, deadline_ns=MS).drained
        assert coordinator.evict(SIZE) == (0, NOT_READY), "moved while the kernel ran"
        client.ask("unblock")
        moved = eventually(lambda: coordinator.evict(SIZE)[0], "the end of the kernel")
        assert coordinator.restore(SIZE) == (moved, 0) == (SIZE, 0)
        coordinator.grant(2)
        assert client.ask("same", pointer, SIZE, 3) is True
