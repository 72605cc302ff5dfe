"""Cost of a fork under the hook, in pages that the kernel gives to the child.

Non-goals: times; what a child may do with its GPU (test_agent_faults.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.faults.test_fault_sweep import sweep
from tests.hook.scripted import ScriptedCoordinator

PROGRAM = Path(__file__).resolve().parent / "programs" / "fork_faults.c"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """The program, linked with the simulated driver."""
    return compile_c(tmp_path_factory.mktemp("fork") / "fork", PROGRAM, built.sim_dir / "libcuda.so.1")


@pytest.mark.parametrize(
    ("words", "mode", "most"), [((), "swap", 3), (("cuda",), "device", 20), (("cuda",), "swap", 24)]
)
def test_pages_of_a_child(
    coordinator: ScriptedCoordinator,
    hook_env: dict[str, str],
    program: Path,
    words: tuple[str, ...],
    mode: str,
    most: int,
) -> None:
    """Broken: the child's handlers write to variables that stand apart, or to tables that the parent never wrote."""
    plain = {name: value for name, value in hook_env.items() if name != "LD_PRELOAD"}
    (without, _) = sweep(coordinator, plain, program, *words)
    (under, _) = sweep(coordinator, {**hook_env, "NVSHARE_MEMORY": mode}, program, *words)
    assert int(under) <= int(without) + most, (under, without)
