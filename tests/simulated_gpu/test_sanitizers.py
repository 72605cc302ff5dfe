"""The simulated driver under ASan, UBSan and TSan: tests on a driver with races would prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "simulated_gpu" / "src"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    """Threads that use everything at once find no race, no overrun, no leak of what was released, no wrong byte."""
    finder = [sys.executable, str(ROOT / "client_hook" / "find_cuda_header.py")]
    include = subprocess.run(finder, capture_output=True, text=True, check=True).stdout.strip()
    program = tmp_path / "stress"
    sources = [path for path in sorted(SOURCES.rglob("*.c")) if path.parent.name != "nvml"]
    flags = (
        f"-fsanitize={sanitizer} -fno-omit-frame-pointer -fno-sanitize-recover=all -g -O1 -std=gnu11 -pthread".split()
    )
    flags += [f"-I{SOURCES}", f"-I{SOURCES.parent / 'include'}", "-isystem", include]
    compiler = os.environ.get("CC", "cc")
    stress = Path(__file__).parent / "programs" / "stress.c"
    command = [compiler, *flags, "-o", str(program), str(stress), *map(str, sources)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NVSHARE_")},
        "NVSHARE_SIM_COPY_GIBPS": "0",
        "NVSHARE_SIMULATE": "1x256MiB",
        "ASAN_OPTIONS": "detect_leaks=0",  # what a driver keeps until exit is no leak
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    # TSan of GCC 12 cannot live with the large address randomisation of newer kernels.
    command = ["setarch", "-R", str(program)] if sanitizer == "thread" else [str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    assert done.stdout == "ok\n"
