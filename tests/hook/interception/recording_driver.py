"""The driver that only says which of its functions was reached, and the programs that look at it.

Non-goals: tests.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvshare.client_hook.find_cuda_header import candidates
from tests.conftest import Built
from tests.hook.compiled import compile_c

PROGRAMS = Path(__file__).resolve().parent / "programs"


@dataclass(frozen=True, slots=True)
class Programs:
    """Compiled programs of the tests."""

    directory: Path
    look: Path
    hook: Path

    def run(self, program: Path, *arguments: str, gpus: int = 1, driver: Path | None = None, **more: str) -> str:
        """Output of a program under the hook; `more` are variables of its environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_")}
        environment |= {"LD_LIBRARY_PATH": str(driver or self.directory), "INTERCEPT_GPUS": str(gpus)} | more
        environment |= {"LD_PRELOAD": str(self.hook), "NVSHARE_DISABLE": "1"}
        done = subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
        assert done.stderr == ""
        return done.stdout


def compile_driver(directory: Path, *more: str) -> Path:
    """libcuda.so.1 in this directory."""
    flags = ("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic-functions", "-Wl,-soname,libcuda.so.1")
    sources = (PROGRAMS / "intercept_driver.c",)
    return compile_c(directory / "libcuda.so.1", *sources, flags=("-O0", "-g0", *flags, *more))


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Programs:
    """The driver that says what was reached, and programs that look at it."""
    directory = tmp_path_factory.mktemp("interception")
    header = next(d for d in candidates() if (d / "cuda.h").is_file()) / "cuda.h"
    version = re.findall(r"#define CUDA_VERSION (\d+)", header.read_text(encoding="utf-8"))[0]
    compile_driver(directory)
    return Programs(
        directory,
        compile_c(directory / "look", PROGRAMS / "intercept_program.c", flags=(f"-DCUDA_VERSION={version}",)),
        built.hook,
    )
