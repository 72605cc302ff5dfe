"""What nvshare takes for granted of the driver (docs/reference/driver-facts.md): on a card, and on the simulated GPU.

Without the hook.  On a new driver `pytest -m gpu tests/gpu/test_driver_facts.py` tells what has changed.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Built
from tests.hook.compiled import compile_c
from tests.waiting import BOUND_S

SOURCE = Path(__file__).resolve().parent / "programs" / "driver_facts.c"
PAGE = ROOT / "docs" / "reference" / "driver-facts.md"
CASES = re.findall(r'^ +\{"(\w+)", \1\},$', SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
ABSENT = 77
OTHERWISE = {
    "capture_of_context": "the simulated driver has no cuCtxRecordEvent",
    "checkpoint_lock": "its queries wait while the process is locked, where the driver's go on and later crash",
}
"""Facts that the simulated GPU does not keep, and why."""
CONTEXT = {"NVSHARE_SIMULATE": "2x256MiB", "NVSHARE_SIM_CONTEXT_BYTES": "1048576"}


def simulated(case: str) -> object:
    """The case, with what is known of the double."""
    why = OTHERWISE.get(case)
    return pytest.param(case, marks=pytest.mark.xfail(reason=why, strict=True)) if why is not None else case


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """The cases, linked with the driver as C programs are."""
    return compile_c(tmp_path_factory.mktemp("facts") / "driver_facts", SOURCE, built.sim_dir / "libcuda.so.1")


def run(program: Path, case: str, environment: dict[str, str]) -> None:
    """One case, which must find what the page says."""
    done = subprocess.run(
        [program, case], env=environment, capture_output=True, text=True, timeout=4 * BOUND_S, check=False
    )
    if done.returncode == ABSENT:
        pytest.skip("this machine cannot show it")
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stdout + done.stderr


@pytest.mark.parametrize("case", [simulated(case) for case in CASES])
def test_the_simulated_gpu_keeps_the_facts(program: Path, sim_env: dict[str, str], case: str) -> None:
    """Broken: what runs in the suite runs against a driver that nobody has."""
    run(program, case, sim_env | CONTEXT)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_driver_keeps_the_facts(program: Path, case: str) -> None:
    """Broken: the hook crashes, overlaps or hangs on a driver that behaves otherwise."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_") and k != "LD_PRELOAD"}
    run(program, case, plain)


def test_the_page_names_each_case_and_only_files_that_exist() -> None:
    """A fact without a test, or a test that nobody knows the reason of."""
    rows = [row.split(" | ") for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| ")][1:]
    tested = [case for row in rows for case in re.findall(r"`(\w+)`", row[2]) if case in CASES]
    assert sorted(tested) == sorted(CASES)
    named = {path for row in rows for path in re.findall(r"`([\w/.]+\.(?:c|h|py))`", row[1] + row[2])}
    assert {path for path in named if not (ROOT / path).is_file()} == set()
