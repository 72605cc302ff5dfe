"""An unmodified ctypes program: what does the driver say about memory, and where does it say no?"""

from __future__ import annotations

import ctypes
import json
import sys

MIB = 1 << 20


def main() -> int:
    """Prints the card's size as seen, and how many MiB could be had in pieces of 16."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    pieces: list[ctypes.c_uint64] = []
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    result = 0
    while result == 0 and len(pieces) < 1024:
        piece = ctypes.c_uint64()
        result = cuda.cuMemAlloc_v2(ctypes.byref(piece), ctypes.c_size_t(16 * MIB))
        if result == 0:
            pieces.append(piece)
    had = len(pieces) * 16
    for piece in pieces:
        assert cuda.cuMemFree_v2(piece) == 0
    again = ctypes.c_uint64()
    after = cuda.cuMemAlloc_v2(ctypes.byref(again), ctypes.c_size_t(16 * MIB))
    print(json.dumps({"total_mib": total.value // MIB, "had_mib": had, "result": result, "after": after}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
