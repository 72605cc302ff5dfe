"""A lease that went back while its work still ran: memory is not moved under that work.

Non-goals: how memory moves (test_memory_moves.py, test_swap_process.py).
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import read_trace
from tests.hook.memory.test_memory_process import start
from tests.hook.scripted import ScriptedCoordinator

MIB, MS = 1 << 20, 1_000_000
NOT_READY = 600
KERNEL_NS = 8000 * MS
"""Longer than the hook waits for what a release left behind, and a busy machine pauses."""


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_memory_stays_while_work_runs(coordinator: ScriptedCoordinator, hook_env: dict[str, str], mode: str) -> None:
    """Broken: memory moves under a kernel that uses it, or a target that cannot be reached hangs or lies."""
    environment = hook_env | {"NVSHARE_MEMORY": mode}
    size = 8 * MIB
    with start(environment) as client:
        assert client.ask("start") == 0
        client.tell("info")
        coordinator.welcome()
        assert client.result()[0] == 0
        coordinator.grant(1)
        assert client.ask("held") == 0
        result, pointer = client.ask("alloc", size)
        assert result == 0
        assert client.ask("write", pointer, size, 3) == 0
        assert client.ask("busy", KERNEL_NS) == 0
        release = coordinator.revoke(1, deadline_ns=MS)
        assert not release.drained
        outcomes = []
        for _ in range(94):
            outcomes.append(coordinator.evict(size))
            if outcomes[-1] != (0, NOT_READY):
                break
        assert outcomes[0] == (0, NOT_READY), "moved while the kernel ran"
        assert outcomes[-1] == (size, 0), "and not moved when it was done"
        (kernel,) = (
            one for one in read_trace(Path(environment["NVSHARE_SIM_STATE"])) if one.end_ns - one.start_ns >= KERNEL_NS
        )
        assert kernel.end_ns <= time.monotonic_ns()
        assert coordinator.restore(size) == (size, 0)
        coordinator.grant(2)
        assert client.ask("same", pointer, size, 3) is True
