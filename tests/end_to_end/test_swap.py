"""Memory mode `swap` end to end: real coordinator, real hook, a simulated GPU that is too small for both programs.

May not go here: what the hook does alone (tests/hook/test_swap_process.py).
"""

from __future__ import annotations

import sys

import pytest

from simulated_gpu.trace import overlaps
from tests.end_to_end.conftest import Node, finish

BUSY = [sys.executable, "-m", "bench.workloads.busy"]
MIB = 1 << 20
CARD = 256 * MIB


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
def test_two_programs_beyond_the_card(node: Node) -> None:
    """Broken: data is lost, more of it is moved than has no room, or a program that grows finds no memory."""
    node.start_coordinator("--quantum=20ms")
    heavy = [*BUSY, "--seconds=1.5", f"--copy-kib={160 * 1024}", "--burst=2"]
    both = [node.run([*heavy, f"--seed={seed}"], "--memory=swap") for seed in (1, 2)]
    results = [finish(process) for process in both]
    assert all(result["mismatches"] == 0 and result["copies"] > 0 for result in results), results
    assert overlaps(node.trace()) == []
    gpu = node.control("status")["gpus"][0]
    each = (160 + 16) * MIB  # what it copies, and its log
    overflow = 2 * each - CARD
    assert gpu["evict_orders"] > 1, gpu
    assert gpu["evicted_bytes"] <= 1.05 * overflow * gpu["evict_orders"], gpu
