"""Graphs that allocate, and pools, for the programs that tests start: ctypes only.

Non-goals: anything that imports the product; these programs see what an application sees.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from between_gpus import Driver  # type: ignore[import-not-found]  # beside this program

u64, size_t, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
cuda = Driver()


def made(function: str, *arguments: Any) -> list[int]:
    """[CUresult, handle] of a function whose first parameter receives it."""
    out = u64()
    return [int(getattr(cuda, function)(ctypes.byref(out), *arguments)), out.value]


class Params(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS; the first four words are those of CUmemPoolProps."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("kind", "handles", "location", "gpu")),
        ("pool", u64 * 9),
        ("descriptors", pointer),
        ("count", size_t),
        ("size", size_t),
        ("address", u64),
    ]


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams of a node that allocates."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("alloc", Params),
        ("rest", ctypes.c_char * 256),
    ]


def graph_alloc(graph: int, size: int, general: bool) -> list[int]:
    """[CUresult, address] of a node that is added by hand, by one call or the other."""
    node, wanted = pointer(), Params(kind=1, location=1, size=size)
    if not general:
        result = cuda.cuGraphAddMemAllocNode(ctypes.byref(node), u64(graph), None, size_t(0), ctypes.byref(wanted))
        return [int(result), wanted.address]
    params = NodeParams(type=10, alloc=wanted)
    result = cuda.cuGraphAddNode_v2(ctypes.byref(node), u64(graph), None, None, size_t(0), ctypes.byref(params))
    return [int(result), params.alloc.address]


def capture_pieces(frees: int, *sizes: int) -> list[int]:
    """[CUresult, graph, address...] of a capture that allocates pieces in turn, and frees each at once if it is to."""
    stream, graph, out = pointer(), u64(), u64()
    addresses = []
    result = cuda.cuStreamCreate(ctypes.byref(stream), 1) or cuda.cuStreamBeginCapture_v2(stream, 1)
    for size in sizes:
        result = result or cuda.cuMemAllocAsync(ctypes.byref(out), size_t(size), stream)
        result = result or cuda.cuMemsetD8Async(out, ctypes.c_ubyte(7), size_t(size), stream)
        result = result or (cuda.cuMemFreeAsync(out, stream) if frees else 0)
        addresses.append(out.value)
    result = result or cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    return [int(result or cuda.cuStreamDestroy_v2(stream)), graph.value, *addresses]


def listed(graph: int) -> list[int]:
    """The types of its nodes, in the order in which the driver lists them."""
    count, kind = size_t(64), ctypes.c_int()
    nodes = (pointer * 64)()
    if cuda.cuGraphGetNodes(u64(graph), nodes, ctypes.byref(count)) != 0:
        return []
    return [cuda.cuGraphNodeGetType(pointer(node), ctypes.byref(kind)) or kind.value for node in nodes[: count.value]]


def launch(executable: int) -> int:
    """And waits for it."""
    return int(cuda.cuGraphLaunch(u64(executable), None) or cuda.cuCtxSynchronize())


def figures(pool: int) -> list[int]:
    """Figures of a pool: used, its high mark, reserved, its high mark."""
    values = []
    for attribute in (7, 8, 5, 6):
        value = u64(2**64 - 1)
        cuda.cuMemPoolGetAttribute(u64(pool), attribute, ctypes.byref(value))
        values.append(value.value)
    return values


COMMANDS: dict[str, Callable[..., Any]] = {
    "graph_create": lambda: made("cuGraphCreate", 0),
    "graph_alloc": graph_alloc,
    "graph_capture": capture_pieces,
    "graph_listed": listed,
    "graph_destroy": lambda graph: cuda.cuGraphDestroy(u64(graph)),
    "graph_instantiate": lambda graph: made("cuGraphInstantiateWithFlags", u64(graph), u64(0)),
    "graph_launch": launch,
    "graph_end": lambda executable: cuda.cuGraphExecDestroy(u64(executable)),
    "graph_trim": lambda: cuda.cuDeviceGraphMemTrim(0),
    "pool_default": lambda: made("cuDeviceGetDefaultMemPool", 0),
    "pool_make": lambda shared=0: made("cuMemPoolCreate", ctypes.byref(Params(kind=1, handles=shared, location=1))),
    "pool_destroy": lambda pool: cuda.cuMemPoolDestroy(u64(pool)),
    "pool_use": lambda pool: cuda.cuDeviceSetMemPool(0, u64(pool)),
    "pool_alloc": lambda pool, size: made("cuMemAllocFromPoolAsync", size_t(size), u64(pool), None),
    "pool_alloc_current": lambda size: made("cuMemAllocAsync", size_t(size), None),
    "synchronize_all": lambda: cuda.cuCtxSynchronize(),
    "pool_set": lambda pool, attribute, value: cuda.cuMemPoolSetAttribute(
        u64(pool), attribute, ctypes.byref(u64(value))
    ),
    "pool_trim": lambda pool, keep: cuda.cuMemPoolTrimTo(u64(pool), size_t(keep)),
    "pool_free": lambda address: cuda.cuMemFreeAsync(u64(address), None),
    "pool_figures": figures,
}
