"""The real libcudart, from NVIDIA's wheel, over the simulated GPU and under the hook: what it submits passes the gate.

cudart finds the driver's functions as every framework does: by cuGetProcAddress, before cuInit, by version and flags.

May not go here: what is right about the results (tests of the simulated GPU), leases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from client_hook.find_cuda_header import candidates
from tests.conftest import Built

PROGRAM = """
import ctypes, json, sys

class State(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("lease", ctypes.c_uint32), ("lease_id", ctypes.c_uint64),
                ("waiters", ctypes.c_uint32), ("waiting", ctypes.c_uint32), ("calls", ctypes.c_uint64),
                ("allocated", ctypes.c_uint64), ("resident", ctypes.c_uint64)]

hook = ctypes.CDLL(None)
cudart = ctypes.CDLL(sys.argv[1])
results = {}

def gated():
    state = State(ctypes.sizeof(State))
    assert hook.nvshare_gpu_state(0, ctypes.byref(state)) == 0
    return state.calls

def call(name, *arguments):
    before = gated()
    results[name] = [getattr(cudart, name)(*arguments), gated() - before]

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


@pytest.fixture(scope="session")
def cudart() -> Path:
    """libcudart.so.13, which the wheel with cuda.h carries."""
    for directory in candidates():
        for found in sorted((directory.parent / "lib").glob("libcudart.so.1[3-9]*")):
            return found
    pytest.skip("no libcudart: pip install nvidia-cuda-runtime")


def test_what_cudart_submits_passes_the_gate(built: Built, sim_env: dict[str, str], cudart: Path) -> None:
    """PyTorch, CuPy and every CUDA C++ program reach the GPU through cudart: what it is handed raw is a bypass."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cudart)],
        env={**sim_env, "LD_PRELOAD": str(built.hook)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    results: dict[str, list[int]] = json.loads(done.stdout)
    assert {name: result for name, (result, _) in results.items() if result != 0} == {}
    assert [name for name in GATED if results[name][1] < 1] == []
    assert {name: results[name][1] for name in UNGATED if results[name][1] != 0} == {}
