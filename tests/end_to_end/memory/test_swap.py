"""Memory mode `swap` end to end: real coordinator, real hook, a simulated GPU that is too small for both programs.

Non-goals: what the hook does alone (tests/hook/swap/test_swap_process.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import overlaps
from tests.conftest import Built
from tests.end_to_end.conftest import Node, finish, until_evicted
from tests.hook.compiled import compile_c
from tests.waiting import eventually

PROGRAMS = Path(__file__).parent / "programs"
BUSY = [sys.executable, "-m", "nvshare.bench.workloads.busy"]
MIB = 1 << 20
CARD = 128 * MIB


@pytest.mark.parametrize("node", ["1x128MiB"], indirect=True)
def test_two_programs_beyond_the_card(node: Node) -> None:
    """Broken: data is lost, more of it is moved than has no room, or a program that grows finds no memory."""
    node.start_coordinator("--quantum=20ms")
    node.follow_events()
    heavy = [*BUSY, "--seconds=1", f"--copy-kib={80 * 1024}", "--burst=2"]

    def pair() -> None:
        both = [node.run([*heavy, f"--seed={seed}"], "--memory=swap") for seed in (1, 2)]
        results = [finish(process) for process in both]
        assert all(result["mismatches"] == 0 and result["copies"] > 0 for result in results), results

    gpu = until_evicted(node, pair)
    # One moves out while the other moves in, in pieces smaller than what the programs copy.
    assert overlaps([busy for busy in node.trace() if busy.kind != "copy" or busy.bytes_moved > 64 * MIB]) == []
    each = (80 + 16) * MIB  # what it copies, and its log
    overflow = 2 * each - CARD
    assert gpu["evicted_bytes"] <= 1.3 * overflow * gpu["evict_orders"], gpu  # all of a program would be 1.5
    failed = [event for event in node.events if event["kind"] == "moved" and event["error"]]
    assert failed == [], failed[0]


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
def test_a_crowd_gets_what_there_is(node: Node, built: Built, tmp_path: Path) -> None:
    """Broken: threads that allocate at the same moment make a chunk each, and are refused memory that is free."""
    library = built.sim_dir / "libcuda.so.1"
    program = compile_c(tmp_path / "crowd", PROGRAMS / "crowd_allocates.c", library)
    node.start_coordinator()
    slow = {"NVSHARE_SIM_FAULTS": "slow:cuMemCreate=3000000"}
    process = node.run([str(program), "200", str(MIB)], "--memory=swap", variables=slow)
    assert finish(process) == {"refused": 0}


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
def test_a_program_starts_while_another_one_ends(node: Node, built: Built, tmp_path: Path) -> None:
    """Broken: memory comes in again and again in vain, because the driver has not freed that of a program that ends."""
    library = built.sim_dir / "libcuda.so.1"
    program = compile_c(tmp_path / "ends", PROGRAMS / "ends_slowly.c", library)
    node.start_coordinator()
    first = node.run([str(program), str(200 * MIB), "2500"], "--memory=swap")
    assert first.stdout is not None
    assert first.stdout.readline() == '{"result": 0}\n'
    eventually(lambda: not node.control("status")["clients"], "the hook's exit handler")
    assert finish(node.run([str(program), str(200 * MIB), "0"], "--memory=swap")) == {"result": 0}
    assert node.control("status")["gpus"][0]["failed_orders"] == 0
