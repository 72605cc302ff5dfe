"""Copies from one GPU to another by every call that there is, for the programs that tests start: ctypes only.

Each waits for its end and returns a CUresult.  The current GPU is the one that is to work; pointers may be of any.

Non-goals: anything that imports the product; these programs see what an application sees.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

u64, size_t = ctypes.c_uint64, ctypes.c_size_t


@functools.cache
def driver() -> ctypes.CDLL:
    """Loaded when it is first called: tests import this for the names of the calls."""
    return ctypes.CDLL("libcuda.so.1")


class Driver:
    """`cuda.cuInit(0)`."""

    def __getattr__(self, function: str) -> Any:
        return getattr(driver(), function)


cuda = Driver()
DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D, of device memory only."""

    _fields_ = [
        ("source_place", size_t * 2), ("source_kind", ctypes.c_int), ("source_host", u64), ("source", u64),
        ("source_rest", size_t * 2),
        ("place", size_t * 2), ("kind", ctypes.c_int), ("host", u64), ("to", u64), ("rest", size_t * 2),
        ("width", size_t), ("height", size_t),
    ]  # fmt: skip


class End(ctypes.Structure):
    """One end of CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER: `context` is the latter's, reserved in the former."""

    _fields_ = [
        ("x", size_t), ("y", size_t), ("z", size_t), ("lod", size_t), ("kind", ctypes.c_int), ("host", u64),
        ("device", u64), ("array", u64), ("context", u64), ("pitch", size_t), ("rows", size_t),
    ]  # fmt: skip


class Copy3D(ctypes.Structure):
    """Both."""

    _fields_ = [("source", End), ("to", End), ("width", size_t), ("height", size_t), ("depth", size_t)]


class Operand(ctypes.Structure):
    """CUmemcpy3DOperand, a pointer."""

    _fields_ = [
        ("kind", ctypes.c_int), ("pointer", u64), ("row", size_t), ("layer", size_t), ("hint", ctypes.c_int * 2),
    ]  # fmt: skip


class Operation(ctypes.Structure):
    """CUDA_MEMCPY3D_BATCH_OP."""

    _fields_ = [
        ("source", Operand), ("to", Operand), ("extent", size_t * 3), ("order", ctypes.c_int), ("flags", ctypes.c_uint),
    ]  # fmt: skip


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams with a copy in it."""

    _fields_ = [
        ("type", ctypes.c_int), ("reserved", ctypes.c_int * 3),
        ("flags", ctypes.c_int), ("more", ctypes.c_int), ("context", u64), ("copy", Copy3D),
        ("padding", ctypes.c_char * (232 - 16 - ctypes.sizeof(Copy3D))), ("reserved2", ctypes.c_longlong),
    ]  # fmt: skip


def primary(gpu: int) -> int:
    """The handle of a GPU's primary context."""
    found = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(found), gpu) == 0
    return found.value or 0


def current() -> int:
    """The current context."""
    found = ctypes.c_void_p()
    assert cuda.cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value or 0


def own_stream() -> Any:
    """One that does not wait for the default stream, on the current GPU."""
    made = ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(made), 1) == 0
    return made


def shape(to: int, source: int, size: int) -> Copy3D:
    """As a row of bytes, from GPU 0 to GPU 1 where it says so."""
    return Copy3D(
        source=End(kind=DEVICE, device=source, pitch=size, rows=1),
        to=End(kind=DEVICE, device=to, pitch=size, rows=1),
        width=size, height=1, depth=1,
    )  # fmt: skip


def peer_shape(to: int, source: int, size: int) -> Copy3D:
    """The same for cuMemcpy3DPeer."""
    made = shape(to, source, size)
    made.source.context, made.to.context = primary(0), primary(1)
    return made


def lists(to: int, source: int, size: int) -> tuple[Any, ...]:
    """First arguments of both versions of cuMemcpyBatchAsync."""
    attributes = (ctypes.c_int * 16)(1)  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    one = (u64 * 1)(to), (u64 * 1)(source), (size_t * 1)(size), size_t(1)
    return (*one, attributes, (size_t * 1)(0), size_t(1))


def operation(to: int, source: int, size: int) -> Any:
    """A list of one."""
    made = (Operation * 1)()
    made[0].source, made[0].to = Operand(kind=1, pointer=source), Operand(kind=1, pointer=to)
    made[0].extent[:] = [size, 1, 1]
    made[0].order = 1
    return made


def launched(graph: Any) -> int:
    """Instantiates and launches."""
    ready = ctypes.c_void_p()
    result = cuda.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, u64(0))
    return int(result or cuda.cuGraphLaunch(ready, own_stream()))


def by_node(to: int, source: int, size: int) -> int:
    """A graph that is built by hand."""
    graph, node = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuGraphCreate(ctypes.byref(graph), 0)
    copy = shape(to, source, size)
    here = ctypes.c_void_p(current())
    result = cuda.cuGraphAddMemcpyNode(ctypes.byref(node), graph, None, size_t(0), ctypes.byref(copy), here)
    return int(result) or launched(graph)


def by_general_node(to: int, source: int, size: int) -> int:
    """The same by the function that takes any node."""
    graph, node = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuGraphCreate(ctypes.byref(graph), 0)
    params = NodeParams(type=1, context=current(), copy=shape(to, source, size))
    result = cuda.cuGraphAddNode_v2(ctypes.byref(node), graph, None, None, size_t(0), ctypes.byref(params))
    return int(result) or launched(graph)


def by_changed_node(to: int, source: int, size: int) -> int:
    """A node between the same GPUs that is told other addresses before and after it is instantiated."""
    graph, node, ready = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuGraphCreate(ctypes.byref(graph), 0)
    here, half = ctypes.c_void_p(current()), size // 2
    low, high = shape(to, source, half), shape(to + half, source + half, size - half)
    result = cuda.cuGraphAddMemcpyNode(ctypes.byref(node), graph, None, size_t(0), ctypes.byref(high), here)
    result = result or cuda.cuGraphMemcpyNodeSetParams(node, ctypes.byref(low))
    result = result or cuda.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, u64(0))
    result = result or cuda.cuGraphLaunch(ready, own_stream()) or cuda.cuCtxSynchronize()
    result = result or cuda.cuGraphExecMemcpyNodeSetParams(ready, node, ctypes.byref(high), here)
    return int(result or cuda.cuGraphLaunch(ready, own_stream()))


def by_capture(to: int, source: int, size: int) -> int:
    """A copy that is captured."""
    graph, stream = ctypes.c_void_p(), own_stream()
    cuda.cuStreamBeginCapture_v2(stream, 0)
    result = cuda.cuMemcpyAsync(u64(to), u64(source), size_t(size), stream)
    ended = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    return int(result or ended) or launched(graph)


KINDS: dict[str, Callable[[int, int, int], int]] = {
    "Peer": lambda to, source, size: cuda.cuMemcpyPeer(
        u64(to), ctypes.c_void_p(primary(1)), u64(source), ctypes.c_void_p(primary(0)), size_t(size)
    ),
    "DtoD": lambda to, source, size: cuda.cuMemcpyDtoD_v2(u64(to), u64(source), size_t(size)),
    "Async": lambda to, source, size: cuda.cuMemcpyAsync(u64(to), u64(source), size_t(size), None),
    "PeerAsync": lambda to, source, size: cuda.cuMemcpyPeerAsync(
        u64(to), ctypes.c_void_p(primary(1)), u64(source), ctypes.c_void_p(primary(0)), size_t(size), None
    ),
    "Batch": lambda to, source, size: cuda.cuMemcpyBatchAsync_v2(*lists(to, source, size), own_stream()),
    "OldBatch": lambda to, source, size: cuda.cuMemcpyBatchAsync(
        *lists(to, source, size), ctypes.byref(size_t()), own_stream()
    ),
    "2D": lambda to, source, size: cuda.cuMemcpy2D_v2(
        ctypes.byref(Copy2D(source_kind=DEVICE, kind=DEVICE, to=to, source=source, width=size, height=1))
    ),
    "3D": lambda to, source, size: cuda.cuMemcpy3D_v2(ctypes.byref(shape(to, source, size))),
    "3DAsync": lambda to, source, size: cuda.cuMemcpy3DAsync_v2(ctypes.byref(shape(to, source, size)), own_stream()),
    "3DPeer": lambda to, source, size: cuda.cuMemcpy3DPeer(ctypes.byref(peer_shape(to, source, size))),
    "3DBatch": lambda to, source, size: cuda.cuMemcpy3DBatchAsync_v2(
        size_t(1), operation(to, source, size), u64(0), own_stream()
    ),
    "Old3DBatch": lambda to, source, size: cuda.cuMemcpy3DBatchAsync(
        size_t(1), operation(to, source, size), ctypes.byref(size_t()), u64(0), own_stream()
    ),
    "Node": by_node,
    "GeneralNode": by_general_node,
    "ChangedNode": by_changed_node,
    "Capture": by_capture,
}


def copy_between(kind: int, to: int, source: int, size: int) -> int:
    """By the call of that place in KINDS, waiting for its end.  What names contexts copies from GPU 0 to GPU 1."""
    call = list(KINDS.values())[kind]
    return int(call(to, source, size) or cuda.cuCtxSynchronize())


spreading: dict[str, Any] = {}


def spread(there: int, size: int) -> int:
    """Captures a fill on GPU 0 from a stream of GPU 1, which is current before and after."""
    graph, ready, here = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(current())
    begun, done = ctypes.c_void_p(), ctypes.c_void_p()
    mine = own_stream()
    cuda.cuEventCreate(ctypes.byref(begun), 2)
    cuda.cuCtxSetCurrent(ctypes.c_void_p(primary(0)))
    other = own_stream()
    cuda.cuEventCreate(ctypes.byref(done), 2)
    cuda.cuCtxSetCurrent(here)
    result = cuda.cuStreamBeginCapture_v2(mine, 2) or cuda.cuEventRecord(begun, mine)
    result = result or cuda.cuStreamWaitEvent(other, begun, 0)
    result = result or cuda.cuMemsetD8Async(u64(there), ctypes.c_ubyte(7), size_t(size), other)
    result = result or cuda.cuEventRecord(done, other) or cuda.cuStreamWaitEvent(mine, done, 0)
    result = result or cuda.cuStreamEndCapture(mine, ctypes.byref(graph))
    spreading.update(ready=ready, stream=mine)
    return int(result or cuda.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, u64(0)))


def launch_spread() -> int:
    """That graph, waiting for it."""
    return int(
        cuda.cuGraphLaunch(spreading["ready"], spreading["stream"]) or cuda.cuStreamSynchronize(spreading["stream"])
    )
