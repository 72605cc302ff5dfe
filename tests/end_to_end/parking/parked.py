"""Makes calls of the driver as it is told by standard input: one word a line, one answer a line."""

import ctypes
import os
import select
import sys
from collections.abc import Callable

cuda = ctypes.CDLL("libcuda.so.1")
SIZE = int(os.environ.get("PARKED_MIB", "8")) << 20
context, stream, event, memory, copy, graph, ready = (ctypes.c_void_p() for _ in range(7))
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
        call("cuMemAlloc_v2", ctypes.byref(copy), ctypes.c_size_t(SIZE)),
        call("cuStreamBeginCapture_v2", stream, 0),
        call("cuMemcpyDtoDAsync_v2", copy, memory, ctypes.c_size_t(SIZE), stream),
        call("cuStreamEndCapture", stream, ctypes.byref(graph)),
        call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0)),
    ):
        assert result == 0, result


def read(address: ctypes.c_void_p = memory) -> tuple[int, bool]:
    """The result, and whether the memory is what it was."""
    found = ctypes.create_string_buffer(SIZE)
    return call("cuMemcpyDtoH_v2", found, address, ctypes.c_size_t(SIZE)), found.raw == pattern


def launch() -> tuple[int, bool]:
    """The captured graph copies the memory."""
    results = (
        call("cuMemsetD8_v2", copy, ctypes.c_ubyte(0), ctypes.c_size_t(SIZE)),
        call("cuGraphLaunch", ready, stream),
        call("cuStreamSynchronize", stream),
    )
    return sum(results), read(copy)[1]


def work() -> tuple[int, bool]:
    """Works until it is told something else."""
    result, whole = 0, True
    while not select.select([sys.stdin], [], [], 0)[0]:
        once = launch()
        result, whole = result + once[0], whole and once[1]
    return result, whole


def card() -> tuple[str, str]:
    """The UUIDs of the GPU by both functions of the driver."""
    found = (ctypes.create_string_buffer(16), ctypes.create_string_buffer(16))
    assert call("cuDeviceGetUuid", found[0], 0) == call("cuDeviceGetUuid_v2", found[1], 0) == 0
    return found[0].raw.hex(), found[1].raw.hex()


def nvml() -> tuple[int, bool]:
    """Memory that the first card's handle shows as used, and whether it lists this process."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    listed = [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return pynvml.nvmlDeviceGetMemoryInfo(handle).used, os.getpid() in listed


def make() -> tuple[int, int]:
    """A call that the hook does not wrap, and that waits in the driver while the process is locked."""
    made = ctypes.c_void_p()
    result = call("cuEventCreate", ctypes.byref(made), 0)
    return result, call("cuEventDestroy_v2", made)


def free() -> tuple[int, bool]:
    some, all_ = ctypes.c_size_t(), ctypes.c_size_t()
    return call("cuMemGetInfo_v2", ctypes.byref(some), ctypes.byref(all_)), some.value > 0


def look() -> tuple[int, bool]:
    """The second card's size, as a framework asks for each card that it sees."""
    size = ctypes.c_size_t()
    return call("cuDeviceTotalMem_v2", ctypes.byref(size), 1), size.value > 0


def touch() -> tuple[int, int]:
    """A context on the second card, and nothing in it."""
    second, popped = ctypes.c_void_p(), ctypes.c_void_p()
    made = call("cuDevicePrimaryCtxRetain", ctypes.byref(second), 1)
    return made, call("cuCtxPushCurrent_v2", second) + call("cuCtxPopCurrent_v2", ctypes.byref(popped))


def second() -> tuple[int, bool]:
    """Memory on the second card."""
    context, block, popped = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    results = (
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 1),
        call("cuCtxPushCurrent_v2", context),
        call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(SIZE)),
        call("cuMemcpyHtoD_v2", block, pattern, ctypes.c_size_t(SIZE)),
    )
    answer = read(block)
    return sum(results) + answer[0] + call("cuCtxPopCurrent_v2", ctypes.byref(popped)), answer[1]


def managed() -> tuple[int, bool]:
    """Managed memory of its own."""
    made = ctypes.c_void_p()
    return call("cuMemAllocManaged", ctypes.byref(made), ctypes.c_size_t(4096), 1), bool(made.value)


DO: dict[str, Callable[[], tuple[object, object]]] = {
    "read": read,
    "make": make,
    "free": free,
    "launch": launch,
    "work": work,
    "look": look,
    "touch": touch,
    "second": second,
    "managed": managed,
    "card": card,
    "nvml": nvml,
    "query": lambda: (call("cuEventQuery", event), call("cuStreamQuery", stream)),
    "wait": lambda: (call("cuEventSynchronize", event), call("cuStreamSynchronize", stream)),
}

begin()
print("ready", flush=True)
for line in sys.stdin:
    print(*DO[line.strip()](), flush=True)
print("end", flush=True)
