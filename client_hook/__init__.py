"""The Python side of the hook.  A program may control the hook of its own process:

    from nvshare import client_hook
    if client_hook.active():
        client_hook.yield_lease()   # for example between two batches, or before a long step on the CPU

The names are loaded from api.py and steps.py on first use: the notebook opt-in imports this package at each start of
Python.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvshare.client_hook.api import (
        GpuState,
        HookNotLoadedError,
        Lease,
        active,
        loaded,
        state,
        version,
        yield_lease,
    )
    from nvshare.client_hook.steps import on_pressure, release_caches, step

__all__ = [
    "GpuState", "HookNotLoadedError", "Lease", "active", "loaded", "on_pressure", "release_caches", "state", "step",
    "version", "yield_lease",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvshare.client_hook import api, steps

    return getattr(steps if hasattr(steps, name) else api, name)
