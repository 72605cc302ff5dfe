"""Waits for the GPU in its main thread, as its words say; prints what happens.

`held`: the calls hold the GIL.  `threads`: other threads compete for it.  `SIGINT=print`, `SIGTERM=exit`: what the
program's own handler does.  `busy`: the main thread stays in Python, and another thread waits.  `stuck`: when the main
thread waits, another one reads two bytes of standard input in one call that keeps the GIL.
"""

from __future__ import annotations

import ctypes
import itertools
import signal
import sys
import threading
from types import FrameType

from nvshare import client_hook

words = set(sys.argv[1:])
driver = (ctypes.PyDLL if "held" in words else ctypes.CDLL)("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    result = getattr(driver, name)(*arguments)
    assert result == 0, (name, result)


def leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(7)


def show(_number: int, _frame: FrameType | None) -> None:
    print("handler", flush=True)


def compute() -> None:
    for number in itertools.count():
        sum(range(number % 1000))


def keep_gil() -> None:
    while client_hook.state(0).waiting_threads == 0:
        threading.Event().wait(0.01)
    library, size = ctypes.PyDLL(None), ctypes.c_size_t
    library.fread(ctypes.create_string_buffer(2), size(1), size(2), ctypes.c_void_p.in_dll(library, "stdin"))


def wait() -> None:
    call("cuCtxSetCurrent", context)
    print("waits", flush=True)
    print("result", driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), ctypes.c_size_t(4096)), flush=True)


if "SIGINT=print" in words:
    signal.signal(signal.SIGINT, show)
if "SIGTERM=exit" in words:
    signal.signal(signal.SIGTERM, leave)
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4096))
for _ in range(3 if "threads" in words else 0):
    threading.Thread(target=compute, daemon=True).start()
if "stuck" in words:
    threading.Thread(target=keep_gil, daemon=True).start()
if "busy" in words:
    threading.Thread(target=wait, daemon=True).start()
    compute()
wait()
