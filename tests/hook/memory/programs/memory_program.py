"""A CUDA program that does what it is told, a line at a time: `name argument...` in, one line of JSON out.

Runs under the hook in a process of its own, so it imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from between_gpus import (  # type: ignore[import-not-found]  # beside this program
    Driver,
    copy_between,
    launch_spread,
    spread,
)
from graphs_and_pools import COMMANDS as GRAPHS_AND_POOLS  # type: ignore[import-not-found]  # as above
from legacy_ipc import COMMANDS as LEGACY_IPC  # type: ignore[import-not-found]  # as above
from peer_access import COMMANDS as PEER_ACCESS  # type: ignore[import-not-found]  # as above

u64, size_t = ctypes.c_uint64, ctypes.c_size_t
cuda = Driver()
context, another = ctypes.c_void_p(), ctypes.c_void_p()
stream = ctypes.c_void_p()


class Property(ctypes.Structure):
    """The head of CUmemAllocationProp, and room for the rest."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("rest", u64 * 8),
    ]


def pattern(seed: int, size: int) -> bytes:
    """`size` bytes that depend on every bit of `seed`."""
    block = hashlib.shake_128(seed.to_bytes(8, "little")).digest(min(size, 65521))
    return (block * (size // len(block) + 1))[:size]


def start() -> int:
    """A context and a stream."""
    result = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context)
    return int(result or cuda.cuStreamCreate(ctypes.byref(stream), 1))


class Gpu(ctypes.Structure):
    """nvshare_gpu of client_hook/src/nvshare.h."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("lease", ctypes.c_uint32),
        ("lease_id", u64),
        ("waiters", ctypes.c_uint32),
        ("waiting_threads", ctypes.c_uint32),
        ("figures", u64 * 3),
    ]


def held() -> int:
    """Waits until the hook holds the lease of GPU 0 and its gate is open; -1 when that takes a minute."""
    state = Gpu(size=ctypes.sizeof(Gpu))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if ctypes.CDLL(None).nvshare_gpu_state(0, ctypes.byref(state)) == 0 and state.lease == 2:
            cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(1), u64(0), size_t(0))  # gated, and moves nothing
            return 0
    return -1


def use(gpu: int) -> int:
    """Makes the primary context of another GPU current."""
    other = ctypes.c_void_p()
    return int(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(other), gpu) or cuda.cuCtxSetCurrent(other))


def allocate(function: str, *arguments: Any) -> list[int]:
    """[CUresult, pointer or handle] of a function whose first parameter receives it."""
    out = u64()
    return [int(getattr(cuda, function)(ctypes.byref(out), *arguments)), out.value]


def pitch(width: int, height: int) -> list[int]:
    """[CUresult, pointer, pitch]"""
    out, row = u64(), size_t()
    result = cuda.cuMemAllocPitch_v2(ctypes.byref(out), ctypes.byref(row), size_t(width), size_t(height), 4)
    return [int(result), out.value, row.value]


def create(size: int) -> list[int]:
    """[CUresult, handle] of device memory."""
    return allocate("cuMemCreate", size_t(size), ctypes.byref(Property(type=1, location_type=1)), u64(0))


def map_released(size: int) -> list[int]:
    """[CUresult, address] of memory that is mapped, its handle released: what PyTorch's expandable segments hold."""
    result, handle = create(size)
    if result != 0:
        return [result, 0]
    result, address = allocate("cuMemAddressReserve", size_t(size), size_t(0), u64(0), u64(0))
    mapped = result or cuda.cuMemMap(u64(address), size_t(size), size_t(0), u64(handle), u64(0))
    return [int(cuda.cuMemRelease(u64(handle)) or mapped), address]


def unmap(address: int, size: int) -> int:
    """The end of such memory."""
    return int(cuda.cuMemUnmap(u64(address), size_t(size)) or cuda.cuMemAddressFree(u64(address), size_t(size)))


def array(size: int) -> list[int]:
    """A CUDA array of rows of 1024 floats."""
    shape = (u64 * 3)(1024, size // 4096, 0x20 | 1 << 32)
    return allocate("cuArrayCreate_v2", shape)


def create_as(size: int, handle_types: int, rdma: int) -> list[int]:
    """[CUresult, handle] of device memory that wants to be exportable, or reachable by other devices."""
    wanted = Property(type=1, handle_types=handle_types, location_type=1)
    wanted.rest[1] = rdma << 8  # behind win32HandleMetaData: allocFlags.gpuDirectRDMACapable
    return allocate("cuMemCreate", size_t(size), ctypes.byref(wanted), u64(0))


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int)]


def allow(address: int, size: int, gpu: int, flags: int) -> int:
    """cuMemSetAccess for a GPU."""
    return int(cuda.cuMemSetAccess(u64(address), size_t(size), ctypes.byref(Access(1, gpu, flags)), size_t(1)))


def pool_allow(owner: int, gpu: int) -> int:
    """A GPU may reach what another one's default pool gives."""
    pool = ctypes.c_void_p()
    result = cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), owner)
    return int(result or cuda.cuMemPoolSetAccess(pool, ctypes.byref(Access(1, gpu, 3)), size_t(1)))


def access(address: int, gpu: int) -> list[int]:
    """[CUresult, flags]"""
    return allocate("cuMemGetAccess", ctypes.byref(Access(1, gpu, 0)), u64(address))


def properties(handle: int) -> list[int]:
    """[CUresult, kinds of descriptors, GPU]"""
    out = Property()
    result = int(cuda.cuMemGetAllocationPropertiesFromHandle(ctypes.byref(out), u64(handle)))
    return [result, out.handle_types, out.location_id]


def export(handle: int, kind: int) -> list[int]:
    """[CUresult, descriptor]"""
    descriptor = ctypes.c_int(-1)
    result = cuda.cuMemExportToShareableHandle(ctypes.byref(descriptor), u64(handle), kind, u64(0))
    return [int(result), descriptor.value]


def imported(descriptor: int) -> list[int]:
    """[CUresult, handle]"""
    return allocate("cuMemImportFromShareableHandle", ctypes.c_void_p(descriptor), 1)


def set_sync(pointer: int, on: int) -> int:
    """CU_POINTER_ATTRIBUTE_SYNC_MEMOPS"""
    return int(cuda.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint(on)), 6, u64(pointer)))


def info() -> list[int]:
    """[CUresult, free, total, total by cuDeviceTotalMem]"""
    free, total, of_device, gpu = size_t(), size_t(), size_t(), ctypes.c_int()
    cuda.cuCtxGetDevice(ctypes.byref(gpu))
    result = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    result = result or cuda.cuDeviceTotalMem_v2(ctypes.byref(of_device), gpu)
    return [int(result), free.value, total.value, of_device.value]


def attribute(number: int, pointer: int) -> list[int]:
    """[CUresult, value] of cuPointerGetAttribute, and of cuPointerGetAttributes."""
    one, other = u64(), u64()
    result = cuda.cuPointerGetAttribute(ctypes.byref(one), number, u64(pointer))
    numbers = (ctypes.c_int * 1)(number)
    data = (ctypes.c_void_p * 1)(ctypes.addressof(other))
    several = cuda.cuPointerGetAttributes(1, numbers, data, u64(pointer))
    return [int(result), one.value, int(several), other.value]


def address_range(pointer: int) -> list[int]:
    """[CUresult, base, size]"""
    base, size = u64(), size_t()
    return [
        int(cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), u64(pointer))),
        base.value,
        size.value,
    ]


def write(pointer: int, size: int, seed: int) -> int:
    """Copies a pattern to the GPU."""
    return int(cuda.cuMemcpyHtoD_v2(u64(pointer), pattern(seed, size), size_t(size)))


def read(pointer: int, size: int) -> int:
    """Copies from the GPU, for the answer alone."""
    return int(cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(size), u64(pointer), size_t(size)))


read_back = ctypes.create_string_buffer(1)  # grows, and serves again: new pages take longer than the copy


def same(pointer: int, size: int, seed: int) -> bool:
    """Is the pattern still there?"""
    global read_back
    if len(read_back) < size:
        read_back = ctypes.create_string_buffer(size)
    ctypes.memset(read_back, 0xA5, size)
    result = cuda.cuMemcpyDtoH_v2(read_back, u64(pointer), size_t(size))
    return int(result) == 0 and ctypes.CDLL(None).memcmp(read_back, pattern(seed, size), size_t(size)) == 0


def capture(begin: bool) -> int:
    """Begins or ends the capture of the program's stream, in global mode."""
    if begin:
        return int(cuda.cuStreamBeginCapture_v2(stream, 0))
    graph = ctypes.c_void_p()
    return int(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))


def storm(threads: int, rounds: int) -> int:
    """Threads that allocate and free; how many calls failed."""
    failed = []

    def run(seed: int) -> None:
        cuda.cuCtxSetCurrent(context)
        for number in range(rounds):
            result, pointer = allocate("cuMemAlloc_v2", size_t(1 + (seed * 7919 + number * 104729) % 100000))
            if result != 0 or cuda.cuMemFree_v2(u64(pointer)) != 0:
                failed.append(number)

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return len(failed)


KERNELS = b"""
.version 7.0
.target sm_70
.address_size 64
// A simulated GPU knows these by their names.
.visible .entry nvs_busy(.param .u64 duration, .param .u64 unused) { ret; }
.visible .entry nvs_call(.param .u64 function, .param .u64 data) { ret; }
"""


def launch(kernel: bytes, value: int) -> int:
    """Launches a kernel and does not wait for it."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    result = cuda.cuModuleLoadData(ctypes.byref(module), KERNELS)
    result = result or cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel)
    values = (u64 * 2)(value, 0)
    arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(values) + offset for offset in (0, 8)))
    return int(result or cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))


unblocked = threading.Event()
wait_for_unblock = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _data: unblocked.wait() and None)


def fork() -> int:
    """A child that asks the hook, and ends; its exit code."""
    child = os.fork()
    if child == 0:
        out = u64()
        os._exit(0 if cuda.cuMemAlloc_v2(ctypes.byref(out), size_t(1024)) != 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fail(name: int, result: int) -> int:
    """Has a function of the simulated driver, its name being the bytes of a number, fail from now on; 0: none."""
    if name == 0:
        cuda.nvs_sim_clear_faults()
    else:
        cuda.nvs_sim_fail(name.to_bytes((name.bit_length() + 7) // 8, "big"), u64(0), result)
    return 0


def fork_and_stay() -> int:
    """A child that does nothing until it is killed; its process id."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


def short_lived(count: int) -> list[int]:
    """[CUresult, most bytes in all] with buffers of as many sizes, one at a time, made and freed in stream order."""
    most, state = 0, Gpu(size=ctypes.sizeof(Gpu))
    for number in range(count):
        result, pointer = allocate("cuMemAllocAsync", size_t((1 << 20) + 512 * number), stream)
        result = result or cuda.cuMemFreeAsync(u64(pointer), stream) or cuda.cuStreamSynchronize(stream)
        ctypes.CDLL(None).nvshare_gpu_state(0, ctypes.byref(state))
        if result:
            return [result, most]
        most = max(most, state.figures[1])  # allocated
    return [0, most]


COMMANDS: dict[str, Callable[..., Any]] = {
    "start": start,
    "use": use,
    "another": lambda: cuda.cuInit(0) or cuda.cuCtxCreate_v2(ctypes.byref(another), 0, 0),
    "switch": lambda to_another: cuda.cuCtxSetCurrent(another if to_another else context),
    "held": held,
    "alloc": lambda size: allocate("cuMemAlloc_v2", size_t(size)),
    "pinned": lambda size: allocate("cuMemAllocHost_v2", size_t(size)),
    "managed": lambda size: allocate("cuMemAllocManaged", size_t(size), 1),
    "async": lambda size: allocate("cuMemAllocAsync", size_t(size), stream),
    "pitch": pitch,
    "create": create,
    "map_released": map_released,
    "unmap": unmap,
    "create_as": create_as,
    "reserve": lambda size: allocate("cuMemAddressReserve", size_t(size), size_t(0), u64(0), u64(0)),
    "unreserve": lambda address, size: cuda.cuMemAddressFree(u64(address), size_t(size)),
    "map": lambda address, size, offset, handle: cuda.cuMemMap(
        u64(address), size_t(size), size_t(offset), u64(handle), u64(0)
    ),
    "unmap_only": lambda address, size: cuda.cuMemUnmap(u64(address), size_t(size)),
    "allow": allow,
    "access": access,
    "retain": lambda address: allocate("cuMemRetainAllocationHandle", ctypes.c_void_p(address)),
    "properties": properties,
    "export": export,
    "array": array,
    "import": imported,
    "set_sync": set_sync,
    "copy_between": copy_between,
    "spread": spread,
    "launch_spread": launch_spread,
    "pool_allow": pool_allow,
    "peer_copy": lambda to, source, size: cuda.cuMemcpyPeer(u64(to), context, u64(source), context, size_t(size)),
    "descriptor": lambda pointer, size: cuda.cuMemGetHandleForAddressRange(
        ctypes.byref(ctypes.c_int()), u64(pointer), size_t(size), 1, u64(0)
    ),
    "release": lambda handle: cuda.cuMemRelease(u64(handle)),
    "free_pinned": lambda pointer: cuda.cuMemFreeHost(u64(pointer)),
    "free": lambda pointer: cuda.cuMemFree_v2(u64(pointer)),
    "free_async": lambda pointer: cuda.cuMemFreeAsync(u64(pointer), stream),
    "short_lived": short_lived,
    "info": info,
    "attribute": attribute,
    "range": address_range,
    "write": write,
    "read": read,
    "set": lambda pointer, size, value: (
        cuda.cuMemsetD8_v2(u64(pointer), ctypes.c_ubyte(value), size_t(size)) or cuda.cuCtxSynchronize()
    ),
    "write_value": lambda pointer, value: (
        cuda.cuStreamWriteValue32_v2(None, u64(pointer), ctypes.c_uint32(value), 0) or cuda.cuCtxSynchronize()
    ),
    "same": same,
    "capture": lambda begin: capture(bool(begin)),
    "reset": lambda: cuda.cuDevicePrimaryCtxReset_v2(0) or start(),
    "synchronize": lambda: cuda.cuStreamSynchronize(stream),
    "storm": storm,
    "busy": lambda duration_ns: launch(b"nvs_busy", duration_ns),
    "block": lambda: launch(b"nvs_call", ctypes.cast(wait_for_unblock, ctypes.c_void_p).value or 0),
    "unblock": unblocked.set,
    "fork": fork,
    "fork_and_stay": fork_and_stay,
    "fail": fail,
    **GRAPHS_AND_POOLS,
    **LEGACY_IPC,
    **PEER_ACCESS,
}


def main() -> None:
    """Until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        print(json.dumps(COMMANDS[name](*(int(word) if word.isdecimal() else word for word in words))), flush=True)


if __name__ == "__main__":
    main()
