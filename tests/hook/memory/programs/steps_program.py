"""memory_program.py with calls of `nvshare.step()`.

`step`, `cell` and `step_apart` answer with what the callbacks did since the last answer.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

from memory_program import COMMANDS, allocate, cuda, main  # type: ignore[import-not-found]  # beside this program

import nvshare
from nvshare.client_hook import steps

cached: list[ctypes.c_uint64] = []
called: list[str] = []


def cache(size: int) -> int:
    """Memory that the callback frees."""
    result, pointer = allocate("cuMemAlloc_v2", ctypes.c_size_t(size))
    cached.append(ctypes.c_uint64(pointer))
    return int(result)


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


COMMANDS |= {
    "work": lambda: cuda.cuMemsetD8_v2(cached[0], ctypes.c_ubyte(1), ctypes.c_size_t(1)),
    "cache": cache,
    "on_pressure": lambda name: nvshare.on_pressure({"free": free, "fail": fail, "step": step_inside}[name]),
    "step": lambda: since(nvshare.step),
    "cell": lambda: since(steps.between_cells),
    "step_apart": lambda: since(lambda: apart(nvshare.step)),
    "register_apart": lambda: since(lambda: apart(own_callback)),
    "fork": fork,
    "pressure": pressure,
}

if __name__ == "__main__":
    main()
