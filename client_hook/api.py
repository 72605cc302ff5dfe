"""The control API of the hook in this process; `client_hook` exports these names.

The functions call the already loaded library (client_hook/src/nvshare.h) with cffi in ABI mode.  The first call imports
cffi.  No function needs the coordinator.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any, Final

from nvshare.client_hook import autoload

_DECLARATIONS = """
struct nvshare_gpu {
    uint32_t size;
    uint32_t lease;
    uint64_t lease_id;
    uint32_t waiters;
    uint32_t waiting_threads;
    uint64_t calls;
    uint64_t allocated_bytes;
    uint64_t resident_bytes;
};
const char *nvshare_version(void);
int nvshare_active(void);
int nvshare_gpu_state(uint32_t gpu, struct nvshare_gpu *out);
int nvshare_yield(uint32_t gpu);
void nvshare_step(void);
int nvshare_pressure(uint64_t *times);
int nvshare_released(uint32_t gpu, uint64_t bytes);
"""


MOST_GPUS: Final = 32
"""CUDA ordinals are below this number."""


class HookNotLoadedError(RuntimeError):
    """This process does not run under the hook."""

    def __init__(self) -> None:
        reason = autoload.refusal or (
            "start it with `nvshare-run -- COMMAND`, or set NVSHARE_ENABLE=1 before Python starts"
        )
        super().__init__(f"this process does not run under the nvshare hook: {reason}")


class Lease(enum.IntEnum):
    """State of this process's lease of a GPU; `enum nvshare_lease`."""

    NONE = 0
    WAITING = 1
    HELD = 2
    RETURNING = 3
    FREE = 4
    UNMANAGED = 5


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU as seen by the hook of this process.  `lease_id` 0: none."""

    lease: Lease
    lease_id: int
    waiters: int
    """Other clients that wait for the held lease."""
    waiting_threads: int
    """Threads of this process that wait for the lease."""
    calls: int
    """Gated calls so far."""
    allocated_bytes: int
    resident_bytes: int


@functools.cache
def hook() -> tuple[Any, Any] | None:
    """(ffi, library); None without the hook, which cannot be loaded later."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(_DECLARATIONS)
    library: Any = ffi.dlopen(None)
    try:
        library.nvshare_version  # noqa: B018  (the attribute exists only with the hook)
    except AttributeError:
        return None
    return ffi, library


def _needed() -> tuple[Any, Any]:
    found = hook()
    if found is None:
        raise HookNotLoadedError
    return found


def loaded() -> bool:
    """Whether this process runs under the hook, active or not."""
    return hook() is not None


def version() -> str:
    """The hook's version.  Raises HookNotLoadedError."""
    ffi, library = _needed()
    text: bytes = ffi.string(library.nvshare_version())
    return text.decode()


def active() -> bool:
    """Whether the hook gates this process's GPU work.

    False without the hook, with NVSHARE_DISABLE=1, without a coordinator, and before the first use of CUDA.
    """
    found = hook()
    return found is not None and found[1].nvshare_active() > 0


def state(gpu: int = 0) -> GpuState:
    """One GPU, by this process's own CUDA ordinal.  Raises HookNotLoadedError, ValueError for an impossible ordinal."""
    ffi, library = _needed()
    _check_ordinal(gpu)
    out = ffi.new("struct nvshare_gpu *")
    out.size = ffi.sizeof("struct nvshare_gpu")
    if library.nvshare_gpu_state(gpu, out) != 0:
        raise ValueError(f"the hook (version {version()}) knows no GPU {gpu}")
    return GpuState(
        lease=Lease(out.lease),
        lease_id=out.lease_id,
        waiters=out.waiters,
        waiting_threads=out.waiting_threads,
        calls=out.calls,
        allocated_bytes=out.allocated_bytes,
        resident_bytes=out.resident_bytes,
    )


def yield_lease(gpu: int = 0) -> None:
    """Releases the lease after the submitted work, if another client waits for it.

    Does not block.  Raises HookNotLoadedError, ValueError for an impossible ordinal.
    """
    _, library = _needed()
    _check_ordinal(gpu)
    if library.nvshare_yield(gpu) != 0:
        raise ValueError(f"the hook (version {version()}) knows no GPU {gpu}")


def _check_ordinal(gpu: int) -> None:
    if not 0 <= gpu < 1 << 32:
        raise ValueError(f"{gpu} is not a CUDA ordinal")
