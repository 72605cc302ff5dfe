"""A program with a sticky error on a real card: the simulated driver follows the answers of one driver.

Programs have at most 192 MiB each.

Non-goals: what the simulated GPU shows as well (tests/hook/memory/test_dead_contexts.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nvshare.bench.harness.fixture import Fixture, compile_program, fixture
from nvshare.client_hook.launcher import client_environment
from tests.conftest import ROOT, Built
from tests.end_to_end.test_dead_contexts import MIB, fault_beside
from tests.hook.memory.test_memory_process import start
from tests.waiting import eventually

pytestmark = pytest.mark.gpu

SIZE = 192 * MIB
CAPACITY = "--capacity=256MiB"
"""Less than two programs have."""


def holders(stand: Fixture) -> object:
    """Holders of the first GPU's lease."""
    return stand.control("status")["gpus"][0]["holders"]


@pytest.mark.parametrize("mode", ["device", "swap"])
def test_a_rival_of_a_faulted_program(built: Built, tmp_path: Path, mode: str) -> None:
    """Broken: a failed notebook keeps the card until somebody closes it, or waits hours to hear of its failure."""
    saturate = compile_program(ROOT / "bench" / "programs" / "saturate.c", tmp_path)
    own = {name: value for name, value in os.environ.items() if not name.startswith("NVSHARE_SIM")}
    running: list[subprocess.Popen[str]] = []
    with fixture(simulate=None, quantum="3600s", more=[CAPACITY]) as stand:
        environment = client_environment(own, hook=built.hook, runtime_dir=stand.directory, options={"memory": mode})

        def occupy() -> None:
            eventually(lambda: not holders(stand), "the rival's lease to be free")
            running.append(stand.start([str(saturate), "600", "200000", "4"], hooked=True))
            eventually(lambda: holders(stand), "the third program to hold the lease")

        size = 16 * MIB if mode == "device" else SIZE
        try:
            told = fault_beside(lambda: start(environment), size, occupy)
            assert running[0].poll() is None, "the calls did not wait for the end of the third program"
        finally:
            for process in running:
                process.kill()
                process.communicate()
    assert told.count("\n") <= 1, told
