"""The application's own virtual memory management in mode `swap`: real coordinator and hook, a card too small for two.

Non-goals: what one call answers (tests/hook/swap/test_swap_vmm.py).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.end_to_end.conftest import Node, finish, until_evicted
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized
from tests.hook.compiled import compile_c

SOURCE = Path(__file__).parent / "programs" / "vmm_program.c"


@pytest.fixture(scope="session")
def vmm_program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """programs/vmm_program.c, linked with the simulated driver."""
    return compile_c(tmp_path_factory.mktemp("vmm") / "vmm_program", SOURCE, built.sim_dir / "libcuda.so.1")


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
def test_handles_move_and_keep_their_contents(node: Node, vmm_program: Path) -> None:
    """Broken: what a program mapped itself is lost, mixed up or pinned when another one takes the card."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # pytest shows it when the test fails
    node.start_coordinator("--quantum=20ms")

    def pair() -> None:
        both = [node.run([str(vmm_program), str(seed + i), "500", "170"], "--memory=swap") for i in range(2)]
        results = [finish(process) for process in both]
        assert all(result["mismatches"] == result["failures"] == 0 for result in results), results
        assert all(result["checks"] > 50 and result["left"] == 0 for result in results), results

    until_evicted(node, pair)


@pytest.mark.sanitizer
@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_handles_under_sanitizers(node: Node, vmm_program: Path, kind: str) -> None:
    """Broken: a race or a use after free between the program's calls, and the mover."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=20ms")

    def pair() -> None:
        words = [[str(vmm_program), seed, "250", "170"] for seed in ("1", "2")]
        finish_sanitized(*(node.run(command, "--memory=swap", variables=variables) for command in words))

    until_evicted(node, pair)
