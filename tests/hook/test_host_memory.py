"""Host memory by itself, in a time that only the test moves (c/host_check.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hook.compiled import PROGRAMS, SOURCE, compile_c


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, under the sanitizers."""
    out = tmp_path_factory.mktemp("host") / "check"
    sources = [SOURCE / f"{name}.c" for name in ("agent_host", "host_pool", "gate")]
    return compile_c(out, PROGRAMS / "host_check.c", *sources, flags=("-fsanitize=address,undefined",))


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("idle", id="unused-for-ten-seconds"),
        pytest.param("used-again", id="used-again"),
        pytest.param("silent", id="a-coordinator-silent-for-two-seconds"),
        pytest.param("answers", id="one-that-answers"),
    ],
)
def test_host_memory(check: Path, scenario: str) -> None:
    """Broken: pinned memory that nobody uses is kept from the machine for ever, or goes back between two evictions; or
    allocations wait for, or are refused by, a coordinator that does not answer."""
    done = subprocess.run([str(check), scenario], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
