"""A program with a sticky error that lives on, like a notebook: others get its memory, and it gets its error.

Non-goals: what one hook does by itself (tests/hook/memory/test_dead_contexts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvshare.client_hook.launcher import client_environment
from nvshare.simulated_gpu.environment import simulated_environment
from tests.conftest import Built
from tests.end_to_end.conftest import Node, stop
from tests.hook.memory.test_memory_process import Client, start

MIB = 1 << 20
ILLEGAL_ADDRESS = 700
NOWHERE = 16


def fault_beside(program: Callable[[], Client], size: int, occupy: Callable[[], object]) -> str:
    """A program of `size` bytes faults, another one works in as many; a third has the GPU from `occupy` on.

    What the faulted program wrote to standard error.
    """
    with program() as faulted:
        assert faulted.ask("start") == 0
        result, pointer = faulted.ask("alloc", size)
        assert result == 0
        assert faulted.ask("write", pointer, size, 3) == 0
        assert faulted.ask("kernel_copy", NOWHERE, NOWHERE, 4) == ILLEGAL_ADDRESS
        with program() as rival:
            assert rival.ask("start") == 0
            result, memory = rival.ask("alloc", size)
            assert result == 0
            assert rival.ask("write", memory, size, 4) == 0
            assert rival.ask("same", memory, size, 4) is True
        occupy()
        assert faulted.ask("read", pointer, 4) == ILLEGAL_ADDRESS
        assert faulted.ask("alloc", MIB)[0] == ILLEGAL_ADDRESS
        return faulted.finish()[1]


def programs(node: Node, built: Built, tmp_path: Path, mode: str, **variables: str) -> Callable[[], Client]:
    """Starts programs/memory_program.py of tests/hook."""
    base = simulated_environment(node.state, node.simulate, node.environment())
    options = {"memory": mode}
    environment = client_environment(base, hook=built.hook, runtime_dir=node.directory, options=options)
    return lambda: start(environment | variables)


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
@pytest.mark.parametrize("mode", ["device", "swap"])
def test_a_rival_of_a_faulted_program(node: Node, built: Built, tmp_path: Path, saturate: Path, mode: str) -> None:
    """Broken: a failed notebook keeps the card until somebody closes it, or waits hours to hear of its failure."""
    node.start_coordinator("--quantum=3600s")

    def occupy() -> None:
        process = node.run([str(saturate), "600", "200000", "4"])
        node.await_work(process.pid)

    size = 16 * MIB if mode == "device" else 160 * MIB
    told = fault_beside(programs(node, built, tmp_path, mode), size, occupy)
    assert told.count("\n") <= 1, told
    assert stop(node.started[-1])["launches"] > 0


def test_a_restoration_that_never_succeeds(node: Node, built: Built, tmp_path: Path) -> None:
    """Broken: a driver that maps no memory any more leaves the program waiting for ever."""
    node.start_coordinator()
    program = programs(node, built, tmp_path, "swap", NVSHARE_SIM_FAULTS="cuMemMap=999")
    with program() as client:
        assert client.ask("start") == 0
        result, pointer = client.ask("alloc", 8 * MIB)
        assert result == 0, "without a lease it needs no memory of the card"
        assert client.ask("write", pointer, 8 * MIB, 3) != 0
        told = client.finish()[1].splitlines()
    assert len(told) == len(set(told)) <= 3, told
