"""An unmodified ctypes program: takes GPU memory in pieces of 16 MiB, says how much it got, and stays with `stay`.

usage: hold_memory.py MIB [CARD_MIB [stay]]

It begins when the card that it sees has CARD_MIB, after a minute in any case: a program that a busy coordinator has not
answered for two seconds goes on without a limit.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

MIB = 1 << 20
WAIT_S = 60


def main() -> None:
    """Prints one JSON object."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    end_s = time.monotonic() + WAIT_S
    while sys.argv[2:] and time.monotonic() < end_s and total.value != int(sys.argv[2]) * MIB:
        os.sched_yield()
        assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    had, result = 0, 0
    while result == 0 and had < int(sys.argv[1]):
        piece = ctypes.c_uint64()
        result = cuda.cuMemAlloc_v2(ctypes.byref(piece), ctypes.c_size_t(16 * MIB))
        had += 16 if result == 0 else 0
    print(json.dumps({"total_mib": total.value // MIB, "had_mib": had, "result": result}), flush=True)
    if "stay" in sys.argv:
        signal.pause()


if __name__ == "__main__":
    main()
