"""The real libcudart and the real CuPy run on the simulated GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import read_trace
from tests.simulated_gpu.conftest import Run


def cudart() -> Path:
    """libcudart of the nvidia-cuda-runtime wheel."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    found = [file for root in roots for file in sorted(root.glob("cu*/lib/libcudart.so.*"))]
    if not found:
        pytest.skip("no libcudart: pip install nvidia-cuda-runtime")
    return found[-1]


RUNTIME = """
    r = ctypes.CDLL(os.environ["CUDART"])
    r.cudaGetErrorName.restype = ctypes.c_char_p
    class Runtime:
        def __getattr__(self, name):
            def call(*arguments):
                result = r[name](*arguments)
                assert result == 0, (name, r.cudaGetErrorName(result))
            return call
    c = Runtime()
    class Dim(ctypes.Structure):
        _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]
    def kernel():
        # as compiled programs register theirs: a fat binary and the address of a stub
        class Wrapper(ctypes.Structure):
            _fields_ = [("magic", c_uint), ("version", c_uint), ("data", c_void_p), ("unused", c_void_p)]
        header = (0xBA55ED50).to_bytes(4, "little") + (0x00100001).to_bytes(4, "little") + (48).to_bytes(8, "little")
        image = ctypes.create_string_buffer(header, 64)
        wrapper = Wrapper(0x466243B1, 1, ctypes.addressof(image))
        register = r["__cudaRegisterFatBinary"]
        register.restype = c_void_p
        handle = c_void_p(register(byref(wrapper)))
        stub = ctypes.create_string_buffer(16)
        r["__cudaRegisterFunction"](handle, stub, b"nvs_busy", b"nvs_busy", -1, None, None, None, None, None)
        r["__cudaRegisterFatBinaryEnd"](handle)
        stub.keep = image, wrapper
        return stub
    def launch(stub, stream, duration_ns):
        value = c_uint64(duration_ns)
        parameters = (c_void_p * 1)(ctypes.cast(byref(value), c_void_p))
        c.cudaLaunchKernel(stub, Dim(1, 1, 1), Dim(1, 1, 1), parameters, c_size_t(0), stream)
    stream = c_void_p()
    c.cudaStreamCreate(byref(stream))
"""


def test_runtime_launches_and_graphs(run: Run, state: Path) -> None:
    """Kernels of compiled programs get their parameters, directly and from graphs."""
    run(
        RUNTIME
        + """
    stub = kernel()
    launch(stub, stream, 3_000_000)
    c.cudaStreamSynchronize(stream)
    p, graph, executable = c_void_p(), c_void_p(), c_void_p()
    c.cudaMallocAsync(byref(p), c_size_t(4096), stream)
    c.cudaFreeAsync(p, stream)
    c.cudaStreamBeginCapture(stream, 0)
    launch(stub, stream, 4_000_000)
    c.cudaStreamEndCapture(stream, byref(graph))
    c.cudaGraphInstantiate(byref(executable), graph, c_uint64(0))
    c.cudaGraphLaunch(executable, stream)
    c.cudaDeviceSynchronize()
    blocks = c_int()
    c.cudaOccupancyMaxActiveBlocksPerMultiprocessor(byref(blocks), stub, 256, c_size_t(0))
    assert blocks.value == 8
    """,
        CUDART=str(cudart()),
    )
    assert [(busy.kind, busy.end_ns - busy.start_ns) for busy in read_trace(state)] == [
        ("kernel", 3_000_000),
        ("graph", 4_000_000),
    ]
