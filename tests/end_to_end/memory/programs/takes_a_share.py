"""A program that sizes itself by the memory that it sees, as JAX and vLLM do: PERCENT of it in one allocation.

It says in JSON what it sees, and for each line of its standard input whether its memory is what it last wrote, which it
then overwrites.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import pynvml

PIECE = 4 << 20


def main() -> None:
    """See the module."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        result = getattr(cuda, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    context, memory, free, total = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
    call("cuInit", 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    pynvml.nvmlInit()
    seen = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    size, value = total.value * int(sys.argv[1]) // 100 // PIECE * PIECE, int(sys.argv[2])
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    call("cuMemsetD8_v2", memory, ctypes.c_ubyte(value), ctypes.c_size_t(size))
    call("cuCtxSynchronize")
    print(json.dumps({"cuda": [free.value, total.value], "nvml": [seen.free, seen.total]}), flush=True)
    buffer = ctypes.create_string_buffer(PIECE)
    for _ in sys.stdin:
        whole = True
        for offset in range(0, size, PIECE):
            call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(memory.value + offset), ctypes.c_size_t(PIECE))
            whole = whole and buffer.raw == bytes([value]) * PIECE
        value += 1
        call("cuMemsetD8_v2", memory, ctypes.c_ubyte(value), ctypes.c_size_t(size))
        call("cuCtxSynchronize")
        print(json.dumps({"whole": whole}), flush=True)


if __name__ == "__main__":
    main()
