"""Makes calls of the driver as it is told by standard input: one word a line, one answer a line."""

import ctypes
import sys
from collections.abc import Callable

cuda = ctypes.CDLL("libcuda.so.1")
SIZE = 8 << 20
context, stream, event, memory = (ctypes.c_void_p() for _ in range(4))
pattern = bytes(range(256)) * (SIZE // 256)


def call(name: str, *arguments: object) -> int:
    result: int = getattr(cuda, name)(*arguments)
    return result


def begin() -> None:
    for result in (
        call("cuInit", 0),
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0),
        call("cuCtxSetCurrent", context),
        call("cuStreamCreate", ctypes.byref(stream), 1),
        call("cuEventCreate", ctypes.byref(event), 0),
        call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(SIZE)),
        call("cuMemcpyHtoD_v2", memory, pattern, ctypes.c_size_t(SIZE)),
        call("cuEventRecord", event, stream),
    ):
        assert result == 0, result


def read() -> tuple[int, bool]:
    """The result, and whether the memory is what it was."""
    found = ctypes.create_string_buffer(SIZE)
    return call("cuMemcpyDtoH_v2", found, memory, ctypes.c_size_t(SIZE)), found.raw == pattern


def make() -> tuple[int, int]:
    """A call that the hook does not wrap, and that waits in the driver while the process is locked."""
    made = ctypes.c_void_p()
    result = call("cuEventCreate", ctypes.byref(made), 0)
    return result, call("cuEventDestroy_v2", made)


def free() -> tuple[int, bool]:
    some, all_ = ctypes.c_size_t(), ctypes.c_size_t()
    return call("cuMemGetInfo_v2", ctypes.byref(some), ctypes.byref(all_)), some.value > 0


DO: dict[str, Callable[[], tuple[int, object]]] = {
    "read": read,
    "make": make,
    "free": free,
    "query": lambda: (call("cuEventQuery", event), call("cuStreamQuery", stream)),
    "wait": lambda: (call("cuEventSynchronize", event), call("cuStreamSynchronize", stream)),
}

begin()
print("ready", flush=True)
for line in sys.stdin:
    print(*DO[line.strip()](), flush=True)
print("end", flush=True)
