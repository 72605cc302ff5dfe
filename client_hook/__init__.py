"""The Python side of the hook.  A program may control the hook of its own process:

    from nvshare import client_hook
    if client_hook.active():
        client_hook.yield_lease()   # for example between two batches, or before a long step on the CPU

The names are loaded from api.py on first use: the notebook opt-in imports this package at each start of Python.
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
        step,
        version,
        yield_lease,
    )

__all__ = ["GpuState", "HookNotLoadedError", "Lease", "active", "loaded", "state", "step", "version", "yield_lease"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvshare.client_hook import api

    return getattr(api, name)
