"""A program's steps, and the callbacks between two of them that free memory which the program keeps unused.

Blocks that PyTorch or CuPy keep for later move like live memory.  The GPU is under pressure when the coordinator has
moved memory of this program for others, or expects to.  Then `step()` calls the callbacks of `on_pressure`, and the
notebook extension calls them between two cells:

    nvshare.on_pressure(nvshare.release_caches)
    for batch in batches:
        train(batch)
        nvshare.step()

Invariants:
- A callback runs on the thread that registered it, after one of that thread's own steps or cells.  It never runs while
  a stream is captured, nor inside another callback.
- `step()` calls at most once for each order to evict.  A program that has taken most of the freed memory back by the
  next order is called at each second one, then at each fourth, up to each `RAREST`.
- Without the hook, without a coordinator and without other programs nothing is called.
- A forked child keeps the callbacks.  Only the pressure on its own memory counts.

Non-goals: captures that another thread begins while a callback runs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from nvshare.client_hook import api

Callback = Callable[[], object]

RAREST: Final = 16
"""Orders to evict between two calls that did not help."""


class _Thread(threading.local):
    """What one thread has registered, and its last calls."""

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self.failed: list[Callback] = []
        self.running = False
        self.seen = 0
        """Count of pressure at the last call."""
        self.every = 1
        self.freed_bytes = self.left_bytes = 0
        """By the last call, and after it."""


_own = _Thread()
os.register_at_fork(after_in_child=lambda: setattr(_own, "seen", 0))


def on_pressure(callback: Callback) -> None:
    """Has this thread call `callback()` between its steps, or between cells, while its GPU is under pressure.

    The callback should free GPU memory that can be made again, such as caches.  If it raises an `Exception`, the first
    one is logged and the program goes on.  A callback that is registered already changes nothing.
    """
    if callback not in _own.callbacks:
        _own.callbacks.append(callback)


def step() -> None:
    """The program has done one more of its steps; the coordinator measures its speed by them.

    Calls this thread's callbacks of `on_pressure` if they are due, and does not block otherwise.  Does nothing without
    the hook.
    """
    found = api.hook()
    if found is not None:
        found[1].nvshare_step()
        if _own.callbacks:
            _look(*found, cells=False)


def between_cells() -> None:
    """For notebooks: as `step`, but counts no step, and always calls while the coordinator expects evictions."""
    found = api.hook()
    if found is not None and _own.callbacks:
        _look(*found, cells=True)


def _look(ffi: Any, library: Any, *, cells: bool) -> None:
    if _own.running or not hasattr(library, "nvshare_pressure"):  # the node's hook may be an older one
        return
    count = ffi.new("uint64_t *")
    expected: int = library.nvshare_pressure(count)
    times = int(count[0])
    due = expected == 1 or times != _own.seen if cells else times >= _own.seen + _own.every
    if expected < 0 or not due:
        return
    before = _allocated_bytes()
    taken_back = 2 * (sum(before) - _own.left_bytes) >= _own.freed_bytes > 0
    _own.every = min(2 * _own.every, RAREST) if taken_back else 1
    _own.seen, _own.running = times, True
    try:
        for callback in tuple(_own.callbacks):
            _call(callback)
    finally:
        _own.running = False
    after = _allocated_bytes()
    _own.freed_bytes, _own.left_bytes = sum(before) - sum(after), sum(after)
    for gpu, (had, has) in enumerate(zip(before, after, strict=True)):
        if had > has:
            library.nvshare_released(gpu, had - has)


def _call(callback: Callback) -> None:
    try:
        callback()
    except Exception:
        if callback not in _own.failed:
            import logging

            _own.failed.append(callback)
            logging.getLogger("nvshare").warning(
                "the on_pressure callback %r failed; the program goes on, and its further failures are not logged",
                callback,
                exc_info=True,
            )


def _allocated_bytes() -> list[int]:
    return [api.state(gpu).allocated_bytes for gpu in range(api.MOST_GPUS)]


# --- ready callbacks --------------------------------------------------------------------------------------------------


def release_caches() -> list[str]:
    """Frees the memory that CuPy and PyTorch keep unused, if they are loaded.  Returns the names of those that did.

    It frees the default pools of CuPy for device and pinned memory, and PyTorch's cached blocks.
    """
    return [name for name, free in _CACHES.items() if name in sys.modules and _freed(free, sys.modules[name])]


def _freed(free: Callable[[Any], bool], library: Any) -> bool:
    try:
        return free(library)
    except Exception:  # a library that is loaded only in part, or has no GPU
        return False


def _free_cupy(cupy: Any) -> bool:
    pool = cupy.get_default_memory_pool()
    # To select a GPU that the program does not use would make a context there.  None: the current one.
    for gpu in [gpu for gpu, size in enumerate(_allocated_bytes()) if size] if api.loaded() else [None]:
        with cupy.cuda.Device(gpu):
            pool.free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return True


def _free_torch(torch: Any) -> bool:
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.empty_cache()
    return True


_CACHES: Final[dict[str, Callable[[Any], bool]]] = {"cupy": _free_cupy, "torch": _free_torch}
