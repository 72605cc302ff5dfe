"""The Python side of the hook.  A program may ask the hook in its own process:

    import nvshare.client_hook
    if client_hook.active():
        client_hook.yield_lease()   # a good moment: between two batches, before a long step on the CPU

Invariant: importing this imports nothing, because the notebook opt-in does so at each start of Python; the names come
from api.py when they are first used.

May not go here: anything that runs on import.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvshare.client_hook.api import GpuState, HookNotLoadedError, Lease, active, loaded, state, version, yield_lease

__all__ = ["GpuState", "HookNotLoadedError", "Lease", "active", "loaded", "state", "version", "yield_lease"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvshare.client_hook import api

    return getattr(api, name)
