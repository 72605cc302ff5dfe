"""Interception: every way to a driver function leads through the hook, and what is not there stays absent.

Against a driver that only says which of its functions was reached (programs/intercept_driver.c), so that all rows of
the table can be called.  The checks themselves are in C, where applications are.

Non-goals: leases, memory, the simulated GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.compiled import SOURCE, compile_c
from tests.hook.interception.recording_driver import PROGRAMS, Programs, compile_driver
from tests.test_cuda_api import ROWS

OLD_DRIVER = 12010
"""CUDA version of the older one, as intercept_program.c has it."""


def check(output: str, at_least: int) -> None:
    """A program has made so many checks, and complains of nothing."""
    *complaints, last = output.splitlines()
    assert last.startswith("done "), output[-2000:]
    assert complaints == []
    assert int(last.removeprefix("done ")) >= at_least


@pytest.mark.parametrize(
    ("mode", "at_least"), [("look_up", 3000), ("by_proc_address", 30000), ("in_threads", 8), ("through_the_gate", 300)]
)
def test_every_function_by_every_look_up(programs: Programs, mode: str, at_least: int) -> None:
    """An entry point that is handed out raw, or leads to another function, or skips the gate, is a bypass."""
    check(programs.run(programs.look, mode), at_least)


def test_the_gate_of_the_right_gpu(programs: Programs) -> None:
    """A call would wait for the lease of a GPU that it does not use, and run on another without one."""
    check(programs.run(programs.look, "several_gpus", gpus=4), 50)


def test_a_driver_that_hides_functions(programs: Programs, tmp_path: Path) -> None:
    """What a driver lacks would be there with the hook; what it gives by version alone would slip past it."""
    script = tmp_path / "map"
    script.write_text("{ global: *; local: cuLaunchKernelEx; cuMemsetD8Async; };", encoding="utf-8")
    compile_driver(tmp_path, f"-Wl,--version-script={script}")
    check(programs.run(programs.look, "unexported", driver=tmp_path), 10)


def test_a_driver_that_is_older_than_the_table(programs: Programs, tmp_path: Path) -> None:
    """A function that came later would seem to be there, or a call of it would crash instead of failing."""
    later = [row.name for row in ROWS if row.since > OLD_DRIVER]
    script = tmp_path / "map"
    script.write_text(f"{{ global: *; local: {'; '.join(later)}; }};", encoding="utf-8")
    compile_driver(tmp_path, f"-Wl,--version-script={script}")
    assert len(later) > 50
    check(programs.run(programs.look, "older", driver=tmp_path, INTERCEPT_VERSION=str(OLD_DRIVER)), 5000)


@pytest.mark.parametrize("part", ["context", "captures"])
def test_contexts_streams_and_captures(tmp_path: Path, part: str) -> None:
    """A drain would miss a context or stream, ask the driver about one that is gone, or spoil a capture."""
    names = (f"contexts/{name}" for name in ("context", "gpu"))
    ours = (SOURCE / f"{name}.c" for name in (*names, "inflight/captures", "hooks/context"))
    flags = ("-fsanitize=thread", "-Wno-tsan")
    program = compile_c(tmp_path / "context", PROGRAMS / f"intercept_{part}.c", *ours, flags=flags)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    check(done.stdout, 25)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_driver(programs: Programs) -> None:
    """Programs that ask whether CUDA is there would be told so on a machine without it."""
    check(programs.run(programs.look, "without_driver"), 10)


def test_a_python_process_without_cuda(programs: Programs) -> None:
    """ctypes goes through dlsym for everything: Python must start, load libraries and end as without the hook."""
    script = (
        "import ctypes, ssl, sqlite3; print(ctypes.CDLL(None).strlen(b'abc'), hasattr(ctypes.CDLL(None), 'cuInit'))"
    )
    assert programs.run(Path(sys.executable), "-c", script) == "3 False\n"
