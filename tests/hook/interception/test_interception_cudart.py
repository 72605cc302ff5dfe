"""The real libcudart, from NVIDIA's wheels, over the simulated GPU and under the hook: what it submits passes the gate.

cudart finds the driver's functions as every framework does: by cuGetProcAddress, before cuInit, by version and flags.
Older ones ask for older versions of them; libraries such as cuBLAS each carry a static cudart of their own.

Non-goals: what is right about the results (tests of the simulated GPU), leases.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvshare.client_hook.find_cuda_header import candidates
from tests.conftest import Built
from tests.hook.interception.cudarts import STATIC, WHEELS, shared_library, static_library

PROGRAM = """
import ctypes, json, sys

class State(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("lease", ctypes.c_uint32), ("lease_id", ctypes.c_uint64),
                ("waiters", ctypes.c_uint32), ("waiting", ctypes.c_uint32), ("calls", ctypes.c_uint64),
                ("allocated", ctypes.c_uint64), ("resident", ctypes.c_uint64)]

hook = ctypes.CDLL(None)
results = {}

class Cudart:
    def __init__(self, path, prefix):
        self.library, self.prefix = ctypes.CDLL(path), prefix
    def __getattr__(self, name):
        return getattr(self.library, self.prefix + name)

def gated():
    state = State(ctypes.sizeof(State))
    assert hook.nvshare_gpu_state(0, ctypes.byref(state)) == 0
    return state.calls

def call(name, *arguments):
    before = gated()
    results.setdefault(name, []).append([getattr(cudart, name)(*arguments), gated() - before])

for path, prefix in zip(sys.argv[1::2], sys.argv[2::2]):
    cudart = Cudart(path, prefix)
    size, host = ctypes.c_size_t(65536), ctypes.create_string_buffer(65536)
    pointer, stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cudaMalloc", ctypes.byref(pointer), size)
    call("cudaStreamCreate", ctypes.byref(stream))
    call("cudaMemcpy", pointer, host, size, 1)
    call("cudaMemcpy_ptds", pointer, host, size, 1)
    call("cudaMemcpyAsync", pointer, host, size, 1, stream)
    call("cudaMemcpyAsync_ptsz", pointer, host, size, 1, None)
    pitch, width, height = ctypes.c_size_t(512), ctypes.c_size_t(256), ctypes.c_size_t(8)
    call("cudaMemcpy2D", pointer, pitch, host, pitch, width, height, 1)
    call("cudaMemset", pointer, 0, size)
    call("cudaMemsetAsync", pointer, 0, size, stream)
    call("cudaMemsetAsync_ptsz", pointer, 0, size, None)
    call("cudaStreamSynchronize", stream)
    call("cudaStreamBeginCapture", stream, 0)
    cudart.cudaMemsetAsync(pointer, 0, size, stream)
    call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    call("cudaGraphInstantiate", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    call("cudaGraphUpload", executable, stream)
    call("cudaGraphLaunch", executable, stream)
    call("cudaStreamSynchronize", stream)
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    call("cudaStreamDestroy", stream)
    call("cudaFree", pointer)
    call("cudaDeviceSynchronize")
    call("cudaDeviceReset")
print(json.dumps(results))
"""

GATED = (
    *("cudaMemcpy", "cudaMemcpy_ptds", "cudaMemcpyAsync", "cudaMemcpyAsync_ptsz", "cudaMemcpy2D"),
    *("cudaMemset", "cudaMemsetAsync", "cudaMemsetAsync_ptsz", "cudaGraphLaunch", "cudaGraphUpload"),
)
UNGATED = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemGetInfo", "cudaStreamDestroy")


USED = sorted(set(re.findall(r"cuda[A-Z]\w+", PROGRAM)))
PREFIX = "own_"


def own_cudart() -> Path:
    """libcudart.so.13, which the wheel with cuda.h carries."""
    for directory in candidates():
        for found in sorted((directory.parent / "lib").glob("libcudart.so.1[3-9]*")):
            return found
    pytest.skip("no libcudart: pip install nvidia-cuda-runtime")


def carrier(version: str, folder: Path) -> Path:
    """A library that carries a static cudart, as cuBLAS does; its functions are hidden, so it exports jumps to them."""
    archive = static_library(version)
    if archive is None:
        pytest.skip(f"libcudart_static.a of {version} is not installed: python -m tests.hook.interception.cudarts")
    jump = "jmp" if os.uname().machine == "x86_64" else "b"
    lines = [f".globl {PREFIX}{name}\n.type {PREFIX}{name},@function\n{PREFIX}{name}: {jump} {name}\n" for name in USED]
    source, out = folder / f"carrier-{version}.s", folder / f"libcarrier-{version}.so"
    source.write_text(".text\n" + "".join(lines) + '.section .note.GNU-stack,"",@progbits\n', encoding="ascii")
    parts = (str(source), str(archive), "-ldl", "-lrt", "-lpthread")
    command = [os.environ.get("CC", "cc"), "-shared", "-o", str(out), *parts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def check(built: Built, sim_env: dict[str, str], *libraries: tuple[Path, str]) -> None:
    """Runs the program with these (path, prefix of names), in turn in one process; everything passes the gate."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(word) for library in libraries for word in library)],
        env={**sim_env, "LD_PRELOAD": str(built.hook), "NVSHARE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    results: dict[str, list[list[int]]] = json.loads(done.stdout)
    assert {len(calls) % len(libraries) for calls in results.values()} == {0}
    assert {name: calls for name, calls in results.items() if any(result != 0 for result, _ in calls)} == {}
    assert [name for name in GATED if any(passed < 1 for _, passed in results[name])] == []
    assert {name: results[name] for name in UNGATED if any(passed != 0 for _, passed in results[name])} == {}


def test_what_cudart_submits_passes_the_gate(built: Built, sim_env: dict[str, str]) -> None:
    """PyTorch, CuPy and every CUDA C++ program reach the GPU through cudart: what it is handed raw is a bypass."""
    check(built, sim_env, (own_cudart(), ""))


@pytest.mark.parametrize("version", WHEELS)
def test_every_version_of_cudart_passes_the_gate(built: Built, sim_env: dict[str, str], version: str) -> None:
    """Programs built with an older or newer CUDA ask for other versions of the functions: none may slip past."""
    library = shared_library(version)
    if library is None:
        pytest.skip(f"libcudart of {version} is not installed: python -m tests.hook.interception.cudarts")
    check(built, sim_env, (library, ""))


def test_several_cudarts_in_one_process(built: Built, sim_env: dict[str, str], tmp_path: Path) -> None:
    """PyTorch's process has one shared cudart and a static one in each of NVIDIA's libraries, of other versions."""
    several = [(carrier(version, tmp_path), PREFIX) for version in STATIC]
    check(built, sim_env, *several, (own_cudart(), ""))
