"""Small C programs and libraries made of single files of the hook.

May not go here: tests; anything that needs the whole hook (see the fixture `built`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "client_hook" / "src"
GATE = tuple(SOURCE / f"{name}.c" for name in ("base/hot", "base/process/futex", "gate/gate", "gate/wait"))
PROGRAMS = Path(__file__).resolve().parent / "c"


def cuda_include() -> str:
    """Directory of cuda.h."""
    finder = [sys.executable, str(ROOT / "client_hook" / "find_cuda_header.py")]
    return subprocess.check_output(finder, text=True).strip()


def compile_c(out: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """gcc with the hook's own warnings as errors."""
    warnings = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Wno-unused-parameter", "-Werror")
    include = ("-I", str(SOURCE), "-isystem", cuda_include())
    command = ["gcc", *warnings, *include, *flags, *map(str, sources), "-o", str(out), "-lpthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stderr[-4000:]}", pytrace=False)
    return out
