"""Interception: every way to a driver function leads through the hook, and what is not there stays absent.

Against a driver that only says which of its functions was reached (programs/intercept_driver.c), so that all rows of
the table can be called.  The checks themselves are in C, where applications are.

May not go here: leases, memory, the simulated GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from client_hook.find_cuda_header import candidates
from tests.conftest import ROOT, Built

PROGRAMS = Path(__file__).resolve().parent / "programs"
SOURCE = ROOT / "client_hook" / "src"


def compile_c(out: Path, *arguments: str) -> Path:
    """Compiles a program or library of this folder, warnings being errors."""
    flags = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-I", str(SOURCE))
    done = subprocess.run(
        [os.environ.get("CC", "cc"), *flags, *arguments, "-o", str(out), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@dataclass(frozen=True, slots=True)
class Programs:
    """What the tests below run."""

    directory: Path
    look: Path
    linked: Path
    hook: Path

    def run(
        self, program: Path, *arguments: str, preload: bool = True, gpus: int = 1, driver: Path | None = None
    ) -> str:
        """What a program under the hook says, all of it."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NVSHARE_")}
        environment |= {"LD_LIBRARY_PATH": str(driver or self.directory), "INTERCEPT_GPUS": str(gpus)}
        if preload:
            environment["LD_PRELOAD"] = str(self.hook)
        done = subprocess.run(
            [str(program), *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
        assert done.stderr == ""
        return done.stdout


def compile_driver(directory: Path, *more: str) -> Path:
    """libcuda.so.1 in this directory."""
    flags = ("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic-functions", "-Wl,-soname,libcuda.so.1")
    return compile_c(directory / "libcuda.so.1", str(PROGRAMS / "intercept_driver.c"), *flags, *more)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Programs:
    """The driver that says what was reached, and programs that look at it."""
    directory = tmp_path_factory.mktemp("interception")
    header = next(d for d in candidates() if (d / "cuda.h").is_file()) / "cuda.h"
    version = re.findall(r"#define CUDA_VERSION (\d+)", header.read_text(encoding="utf-8"))[0]
    driver = compile_driver(directory)
    return Programs(
        directory,
        compile_c(directory / "look", str(PROGRAMS / "intercept_program.c"), f"-DCUDA_VERSION={version}"),
        compile_c(directory / "linked", str(PROGRAMS / "intercept_linked.c"), str(driver)),
        built.hook,
    )


def complaints(output: str) -> tuple[list[str], int]:
    """What a program found wrong, and how many things it looked at."""
    *lines, last = output.splitlines()
    assert last.startswith("done "), output[-2000:]
    return lines, int(last.removeprefix("done "))


@pytest.mark.parametrize(
    ("mode", "at_least"),
    [("look_up", 3000), ("by_proc_address", 30000), ("in_threads", 8), ("through_the_gate", 300)],
)
def test_every_function_by_every_look_up(programs: Programs, mode: str, at_least: int) -> None:
    """An entry point that is handed out raw, or leads to another function, or skips the gate, is a bypass."""
    wrong, checks = complaints(programs.run(programs.look, mode))
    assert wrong == []
    assert checks >= at_least


def test_the_gate_of_the_right_gpu(programs: Programs) -> None:
    """A call would wait for the lease of a GPU that it does not use, and run on another without one."""
    wrong, checks = complaints(programs.run(programs.look, "several_gpus", gpus=4))
    assert wrong == []
    assert checks > 50


def test_a_driver_that_hides_functions(programs: Programs, tmp_path: Path) -> None:
    """What a driver lacks would be there with the hook; what it gives by version alone would slip past it."""
    script = tmp_path / "map"
    script.write_text("{ global: *; local: cuLaunchKernelEx; cuMemsetD8Async; };", encoding="utf-8")
    compile_driver(tmp_path, f"-Wl,--version-script={script}")
    wrong, checks = complaints(programs.run(programs.look, "unexported", driver=tmp_path))
    assert wrong == []
    assert checks > 10


def test_contexts_streams_and_captures(tmp_path: Path) -> None:
    """A drain would miss a context or stream, ask the driver about one that is gone, or spoil a capture."""
    include = next(d for d in candidates() if (d / "cuda.h").is_file())
    sources = [str(PROGRAMS / "intercept_context.c"), str(SOURCE / "context.c"), str(SOURCE / "hook_context.c")]
    sanitize = ("-fsanitize=thread", "-Wno-tsan", "-Wno-unused-parameter")
    program = compile_c(tmp_path / "context", *sources, *sanitize, "-isystem", str(include))
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
    wrong, checks = complaints(done.stdout)
    assert wrong == []
    assert (done.returncode, done.stderr) == (0, "")
    assert checks > 30


def test_without_a_driver(programs: Programs) -> None:
    """Programs that ask whether CUDA is there would be told so on a machine without it."""
    wrong, checks = complaints(programs.run(programs.look, "without_driver"))
    assert wrong == []
    assert checks > 10


def test_calls_of_a_linked_program(programs: Programs) -> None:
    """A program linked with libcuda calls through the PLT: our symbol must come first, and lead to the driver's."""
    wrong, checks = complaints(programs.run(programs.linked))
    assert wrong == []
    assert checks > 5


def test_the_linked_program_notices_a_missing_hook(programs: Programs) -> None:
    """The test above would pass without any hook."""
    wrong, _ = complaints(programs.run(programs.linked, preload=False))
    assert "the hook is not there" in wrong


def test_a_python_process_without_cuda(programs: Programs) -> None:
    """ctypes goes through dlsym for everything: Python must start, load libraries and end as without the hook."""
    script = (
        "import ctypes, ssl, sqlite3; print(ctypes.CDLL(None).strlen(b'abc'), hasattr(ctypes.CDLL(None), 'cuInit'))"
    )
    assert programs.run(Path(sys.executable), "-c", script) == "3 False\n"


def test_ctypes_gets_the_wrappers(programs: Programs) -> None:
    """CuPy, Numba and JAX's plugins load the driver at run time and look its functions up by name."""
    script = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
name = ctypes.c_char_p.in_dll(cuda, "intercept_name")
class State(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("lease", ctypes.c_uint32), ("lease_id", ctypes.c_uint64),
                ("waiters", ctypes.c_uint32), ("waiting", ctypes.c_uint32), ("calls", ctypes.c_uint64),
                ("allocated", ctypes.c_uint64), ("resident", ctypes.c_uint64)]
state = State(ctypes.sizeof(State))
assert cuda.cuInit(0) == 0
assert cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(1), b"x", ctypes.c_size_t(1)) == 0
assert ctypes.CDLL(None).nvshare_gpu_state(0, ctypes.byref(state)) == 0
print(name.value.decode(), state.calls)
"""
    assert programs.run(Path(sys.executable), "-c", script) == "cuMemcpyHtoD_v2 1\n"
