"""The agent's tests once more with a program that is instrumented whole; the hook's interception has to be left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.sanitizer
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitized(tmp_path: Path, sanitizer: str) -> None:
    """Broken: agent, transport, gate or pacing race, touch freed memory, or rely on undefined behaviour."""
    options = f"log_path={tmp_path}/report"
    foreign = tmp_path / "foreign"
    foreign.write_text("race:libcuda\n")  # not instrumented, so their locks are not seen
    environment = os.environ | {
        "NVSHARE_TEST_SANITIZE": sanitizer,
        "TSAN_OPTIONS": f"{options}:exitcode=0:report_thread_leaks=0:suppressions={foreign}",
        "ASAN_OPTIONS": f"{options}:detect_leaks=0",  # threads that exit() cuts short leave what they had
        "UBSAN_OPTIONS": f"{options}:print_stacktrace=1",
    }
    files = ["tests/hook/test_agent.py", "tests/hook/test_agent_faults.py"]
    arguments = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", "--maxfail=5"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    reports = "\n".join(path.read_text() for path in sorted(tmp_path.glob("report.*")))
    assert not reports, reports[:20_000]
    assert done.returncode == 0, done.stdout[-4000:]
