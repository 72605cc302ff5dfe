"""A program that calls `nvshare.step()`: a command a line in, one line of JSON out.

`step`, `cell` and `step_apart` answer with what the callbacks did since the last answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import nvshare
from nvshare.client_hook import steps

cuda = ctypes.CDLL("libcuda.so.1")
context, stream = ctypes.c_void_p(), ctypes.c_void_p()
cached: list[ctypes.c_uint64] = []
needed: list[ctypes.c_uint64] = []
called: list[str] = []


def start() -> int:
    """A context and a stream."""
    result = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context)
    return int(result or cuda.cuStreamCreate(ctypes.byref(stream), 1))


def allocate(size: int, into: list[ctypes.c_uint64]) -> int:
    """Memory of the device."""
    into.append(ctypes.c_uint64())
    return int(cuda.cuMemAlloc_v2(ctypes.byref(into[-1]), ctypes.c_size_t(size)))


def free() -> None:
    """The callback that frees it."""
    called.append(f"freed in {threading.current_thread().name}")
    while cached:
        assert cuda.cuMemFree_v2(cached.pop()) == 0


def fail() -> None:
    """A callback that raises."""
    called.append("failed")
    raise ValueError("of no use")


def step_inside() -> None:
    """A callback with a step of its own."""
    called.append("stepped")
    nvshare.step()


def since(action: Callable[[], object]) -> list[str]:
    """What the callbacks do during an action."""
    called.clear()
    action()
    return list(called)


def apart(action: Callable[[], object]) -> None:
    """Does it on a thread of its own."""
    thread = threading.Thread(target=action, name="apart")
    thread.start()
    thread.join()


def own_callback() -> None:
    """A thread with a callback of its own, and two steps."""
    nvshare.on_pressure(free)
    nvshare.step()
    nvshare.step()


def fork() -> int:
    """Exit code of a child that makes a step: how many callbacks it ran."""
    child = os.fork()
    if child == 0:
        os._exit(len(since(nvshare.step)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def pressure() -> list[int]:
    """What the hook says: the answer, and the count."""
    count = ctypes.c_uint64()
    return [ctypes.CDLL(None).nvshare_pressure(ctypes.byref(count)), count.value]


def capture(begin: str) -> int:
    """Begins or ends the capture of the stream."""
    if begin == "1":
        return int(cuda.cuStreamBeginCapture_v2(stream, 0))
    graph = ctypes.c_void_p()
    return int(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) or cuda.cuGraphDestroy(graph))


COMMANDS: dict[str, Callable[..., Any]] = {
    "start": start,
    "work": lambda: cuda.cuMemsetD8_v2(cached[0], ctypes.c_ubyte(1), ctypes.c_size_t(1)),
    "cache": lambda size: allocate(int(size), cached),
    "need": lambda size: allocate(int(size), needed),
    "on_pressure": lambda name: nvshare.on_pressure({"free": free, "fail": fail, "step": step_inside}[name]),
    "step": lambda: since(nvshare.step),
    "cell": lambda: since(steps.between_cells),
    "step_apart": lambda: since(lambda: apart(nvshare.step)),
    "register_apart": lambda: since(lambda: apart(own_callback)),
    "fork": fork,
    "pressure": pressure,
    "capture": capture,
}


def main() -> None:
    """Until the input ends."""
    for line in sys.stdin:
        name, *arguments = line.split()
        print(json.dumps(COMMANDS[name](*arguments)), flush=True)


if __name__ == "__main__":
    print("ready", flush=True)
    main()
