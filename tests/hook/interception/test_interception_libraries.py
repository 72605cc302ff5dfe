"""Interception in libraries that a program opens: whatever the flags, their calls pass the gate.

Non-goals: names, versions and flags of look-ups (test_interception.py).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.interception.recording_driver import PROGRAMS, Programs

CALLS = 4
"""Calls to the GPU in one round of intercept_plugin.c."""


@pytest.fixture(scope="session")
def opener(programs: Programs) -> Path:
    """intercept_open.c; finds libraries in a folder of its own by its RUNPATH."""
    flags = ("-Wl,--enable-new-dtags", f"-Wl,-rpath,{programs.directory / 'plugins'}")
    return compile_c(programs.directory / "open", PROGRAMS / "intercept_open.c", flags=flags)


@pytest.fixture(scope="session", params=["full", "partial"])
def plugin(request: pytest.FixtureRequest, programs: Programs) -> Path:
    """intercept_plugin.c, linked with the driver, its table of addresses read-only or not."""
    folder = programs.directory / "plugins"
    folder.mkdir(exist_ok=True)
    relocations = ("-Wl,-z,now,-z,relro",) if request.param == "full" else ("-Wl,-z,lazy,-z,norelro",)
    sources = (PROGRAMS / "intercept_plugin.c", programs.directory / "libcuda.so.1")
    return compile_c(folder / f"libplugin_{request.param}.so", *sources, flags=("-fPIC", "-shared", *relocations))


HOWS = [" ".join(words) for words in itertools.product(("now", "lazy"), ("local", "global"), ("", "deepbind"))]


@pytest.mark.parametrize("how", HOWS)
def test_calls_of_an_opened_library_pass_the_gate(programs: Programs, opener: Path, plugin: Path, how: str) -> None:
    """A framework's plug-in would submit work without a lease because of the flags that it is opened with."""
    assert programs.run(opener, how, str(plugin)) == f"calls {CALLS} wrong 0\n"


def test_a_library_that_is_opened_again_and_again(programs: Programs, opener: Path, plugin: Path) -> None:
    """What is unloaded and loaded elsewhere would be bound only the first time."""
    assert programs.run(opener, "deepbind closed", str(plugin)) == f"calls {3 * CALLS} wrong 0\n"


@pytest.mark.parametrize("how", ["now", "now deepbind"])
def test_a_library_is_found_by_the_callers_search_path(
    programs: Programs, opener: Path, plugin: Path, how: str
) -> None:
    """A program would not find its own library any more: libc looks where the caller of dlopen says."""
    assert programs.run(opener, how, plugin.name) == f"calls {CALLS} wrong 0\n"


@pytest.mark.parametrize(("how", "copies"), [("dlopen", 1), ("dlmopen", 1), ("by name", 0)])
def test_a_second_copy_of_the_driver_is_named_once(
    hook_env: dict[str, str], built: Built, tmp_path: Path, how: str, copies: int
) -> None:
    """Broken: work that a program submits by another libcuda needs no lease, and nobody learns it."""
    copy = str(shutil.copy(built.sim_dir / "libcuda.so.1", tmp_path / "libcopy.so"))
    opened = {
        "dlopen": f"ctypes.CDLL({copy!r})",
        "dlmopen": f"ctypes.CDLL(None, handle=c.dlmopen(c_long(-1), {os.fsencode(copy)!r}, 2))",
        "by name": "driver",
    }[how]
    program = (
        "import ctypes; from ctypes import c_long; c = ctypes.CDLL(None); c.dlmopen.restype = ctypes.c_void_p\n"
        f"driver = ctypes.CDLL('libcuda.so.1'); other = {opened}\n"
        "print(other.cuInit(0), bool(other.cuLaunchKernel), bool(other.cuMemAlloc_v2))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=hook_env, capture_output=True, text=True, check=False)
    assert done.stdout == "0 True True\n", done.stderr
    assert done.stderr.count("is a second copy of the CUDA driver") == copies
    assert done.stderr.count(copy) == copies
