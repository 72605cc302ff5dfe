"""Small C programs and libraries, each compiled once for its text: the results are kept under build/test-programs.

Non-goals: tests; the whole hook (see the fixture `built`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "client_hook" / "src"
SHARED = ROOT / "tests" / "programs"
"""Headers of the programs."""
GATE = tuple(SOURCE / f"{name}.c" for name in ("base/hot", "gate/gate"))
KEPT = ROOT / "build" / "test-programs"
INCLUDES = ("-I", str(SOURCE), "-I", str(SHARED))
UNUSED = ("-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections")
"""A program need not define what only functions that it does not call would use."""
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wno-unused-parameter", "-Werror")


@functools.cache
def cuda_include() -> str:
    """Directory of cuda.h."""
    finder = [sys.executable, str(ROOT / "client_hook" / "find_cuda_header.py")]
    return subprocess.check_output(finder, text=True).strip()


def run_compiler(command: list[str]) -> str:
    """Output of the compiler; a failure shows it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stderr[-4000:]}", pytrace=False)
    return done.stdout


def compile_c(out: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compiles C sources, and links libraries that are among them, with the hook's own warnings as errors."""
    options = ["-std=gnu11", "-O1", "-g", *WARNINGS, *UNUSED, *INCLUDES, "-isystem", cuda_include(), *flags]
    compiler = [os.environ.get("CC", "gcc"), *options]
    command = [*compiler, *map(str, sources), "-lpthread", "-ldl", "-o"]
    if any(str(out.parent) in flag for flag in flags):  # of this test alone
        run_compiler([*command, str(out)])
        return out
    texts = [str(path) for path in sources if path.suffix == ".c"]
    key = hashlib.sha256(run_compiler([*compiler, "-E", "-P", *texts]).encode())
    key.update("\0".join(compiler).encode())
    for path in sources:
        if path.suffix != ".c":
            key.update(path.name.encode() + path.read_bytes())
    kept = KEPT / key.hexdigest()
    if not kept.is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as made:
            result = Path(made) / out.name
            run_compiler([*command, str(result)])
            result.rename(kept)
    shutil.copy(kept, out)
    return out
