"""Memory of graphs and of pools: the figures of driver 580 on an H200."""

from __future__ import annotations

import pytest

from tests.simulated_gpu.conftest import Run

GRAPHS = """
d, size = Driver(), 64 << 20
s, p, graph, executable = d.stream(), c_uint64(), c_void_p(), c_void_p()
def capture(frees):
    d.cuStreamBeginCapture_v2(s, 0)
    d.cuMemAllocAsync(byref(p), c_size_t(size), s)
    d.cuMemsetD8Async(p, 5, c_size_t(size), s)
    if frees:
        d.cuMemFreeAsync(p, s)
    d.cuStreamEndCapture(s, byref(graph))
def launch():
    d.cuGraphLaunch(executable, s)
    d.cuStreamSynchronize(s)
def figures():
    # used, high, reserved, high, used of the card; in MiB
    values = []
    for attribute in range(4):
        value = c_uint64()
        d.cuDeviceGetGraphMemAttribute(0, attribute, byref(value))
        values.append(value.value >> 20)
    return (*values, d.used() >> 20)
none, all = (0, 0, 0, 0, 0), (64, 64, 64, 64, 64)
trimmed = (0, 64, 0, 64, 0)
"""


def test_a_graph_without_executable_holds_no_memory(run: Run) -> None:
    """A capture reserves only an address; memory comes with the upload or the launch."""
    run(
        GRAPHS
        + """
for _ in range(40):
    capture(False)
    assert figures() == none
    d.cuGraphDestroy(graph)
capture(True)
executable = d.instantiate(graph)
assert figures() == none
assert d.result("cuGraphInstantiateWithFlags", byref(c_void_p()), graph, c_uint64(0)) == 801
assert d.result("cuGraphClone", byref(c_void_p()), graph) == 801
d.cuGraphUpload(executable, s)
assert figures() == all
"""
    )


def test_memory_that_the_graph_frees_is_kept_until_a_trim(run: Run) -> None:
    """Later executables use the memory of a destroyed one."""
    run(
        GRAPHS
        + """
capture(True)
executable = d.instantiate(graph)
for _ in range(2):
    launch()
    assert figures() == all
d.cuDeviceGraphMemTrim(0)
assert figures() == trimmed
launch()
assert figures() == all
assert d.result("cuMemFreeAsync", p, s) == 1
d.cuGraphExecDestroy(executable)
d.cuGraphDestroy(graph)
assert figures() == all
capture(True)
executable = d.instantiate(graph)
launch()
assert figures() == all, "later executables use it"
d.cuGraphExecDestroy(executable)
d.cuDeviceGraphMemTrim(0)
assert figures() == trimmed
zero = c_uint64()
d.cuDeviceSetGraphMemAttribute(0, 1, byref(zero))
assert figures() == (0, 0, 0, 64, 0)
"""
    )


def test_memory_that_the_graph_does_not_free_outlives_it(run: Run) -> None:
    """The program frees it; a launch before that is an error."""
    run(
        GRAPHS
        + """
capture(False)
executable = d.instantiate(graph)
launch()
assert d.read(p, 4) == b"\\5" * 4
assert d.result("cuGraphLaunch", executable, s) == 1
d.cuMemFreeAsync(p, s)
assert d.result("cuMemFreeAsync", p, s) == 1
d.cuStreamSynchronize(s)
assert figures() == all
d.cuDeviceGraphMemTrim(0)
assert figures() == trimmed
launch()
d.cuGraphExecDestroy(executable)
d.cuGraphDestroy(graph)
d.cuDeviceGraphMemTrim(0)
assert figures() == all, "it is still allocated"
assert d.read(p, 4) == b"\\5" * 4
d.cuMemFree_v2(p)
assert figures() == all
d.cuDeviceGraphMemTrim(0)
assert figures() == trimmed
assert d.result("cuMemFreeAsync", p, s) == 1
"""
    )


def test_nodes_that_are_added_by_hand(run: Run) -> None:
    """Their address is known at once; nodes that run one after the other share memory."""
    run(
        GRAPHS
        + """
class Params(ctypes.Structure):
    _fields_ = [("kind", c_int), ("handles", c_int), ("location", c_int), ("id", c_int), ("pool", c_uint64 * 9),
                ("descriptors", c_void_p), ("count", c_size_t), ("bytes", c_size_t), ("pointer", c_uint64)]
def allocate(after=None):
    node, params = c_void_p(), Params(kind=1, location=1, bytes=size)
    count = c_size_t(1 if after else 0)
    d.cuGraphAddMemAllocNode(byref(node), graph, byref(after) if after else None, count, byref(params))
    back = Params()
    d.cuGraphMemAllocNodeGetParams(node, byref(back))
    assert (back.bytes, back.pointer, back.id) == (size, params.pointer, 0)
    return node, params.pointer
def free(pointer, after):
    node, back = c_void_p(), c_uint64()
    d.cuGraphAddMemFreeNode(byref(node), graph, byref(after), c_size_t(1), c_uint64(pointer))
    d.cuGraphMemFreeNodeGetParams(node, byref(back))
    assert back.value == pointer
    return node
assert ctypes.sizeof(Params) == 120
d.cuGraphCreate(byref(graph), 0)
one, pointer = allocate()
freed = free(pointer, one)
two, pointer = allocate(freed)
last = free(pointer, two)
assert d.result("cuGraphDestroyNode", last) == 801
assert figures() == none
executable = d.instantiate(graph)
launch()
assert figures() == all
d.cuGraphExecDestroy(executable)
d.cuGraphDestroy(graph)
d.cuDevicePrimaryCtxReset_v2(0)
assert figures()[::2] == (0, 0, 0), "it ends with its context"
"""
    )


MIB = 1 << 20
UNBOUNDED = 2**64 - 1
SCRIPT = (
    # The step; used, its high mark; reserved, its high mark with threshold 0; reserved with an unbounded threshold.
    ("alloc a 1000", 1000, 1000, 32, 32, 32),
    (f"alloc b {20 * MIB}", 1000 + 20 * MIB, 1000 + 20 * MIB, 32, 32, 32),
    (f"alloc c {40 * MIB + 512}", 1512 + 60 * MIB, 1512 + 60 * MIB, 64, 64, 64),
    ("free b", 1512 + 40 * MIB, 1512 + 60 * MIB, 64, 64, 64),
    ("sync", 1512 + 40 * MIB, 1512 + 60 * MIB, 64, 64, 64),
    (f"alloc b {10 * MIB}", 1512 + 50 * MIB, 1512 + 60 * MIB, 64, 64, 64),
    ("sync", 1512 + 50 * MIB, 1512 + 60 * MIB, 64, 64, 64),
    ("reset", 1512 + 50 * MIB, 1512 + 50 * MIB, 64, 64, 64),
    ("free c", 1000 + 10 * MIB, 1512 + 50 * MIB, 64, 64, 64),
    ("sync", 1000 + 10 * MIB, 1512 + 50 * MIB, 32, 64, 64),
    ("trim 0", 1000 + 10 * MIB, 1512 + 50 * MIB, 32, 64, 32),
    ("cuMemFree b", 1000 + 10 * MIB, 1512 + 50 * MIB, 32, 64, 32),
    ("free a", 10 * MIB, 1512 + 50 * MIB, 32, 64, 32),
    ("sync", 10 * MIB, 1512 + 50 * MIB, 0, 64, 32),
    ("trim 0", 10 * MIB, 1512 + 50 * MIB, 0, 64, 0),
    (f"alloc a {100 * MIB}", 110 * MIB, 110 * MIB, 128, 128, 128),
    ("free a", 10 * MIB, 110 * MIB, 128, 128, 128),
    ("sync", 10 * MIB, 110 * MIB, 0, 128, 128),
    (f"trim {50 * MIB}", 10 * MIB, 110 * MIB, 0, 128, 64),
)
"""Measured on the default pool and on a created one.  Memory that cuMemFree frees stays counted as used."""


@pytest.mark.parametrize("threshold", [0, UNBOUNDED])
@pytest.mark.parametrize("created", [False, True])
def test_figures_of_a_pool(run: Run, created: bool, threshold: int) -> None:
    """Frameworks show these figures to users."""
    wanted = [
        (what, used, high, kept if threshold else reserved, most) for what, used, high, reserved, most, kept in SCRIPT
    ]
    run(
        f"""
        d, pool, pointers = Driver(), c_void_p(), dict()
        s = d.stream()
        class Props(ctypes.Structure):
            _fields_ = [("kind", c_int), ("handles", c_int), ("location", c_int), ("id", c_int), ("rest", c_uint64 * 9)]
        if {created}:
            d.cuMemPoolCreate(byref(pool), byref(Props(kind=1, location=1)))
        else:
            d.cuDeviceGetDefaultMemPool(byref(pool), 0)
        d.cuMemPoolSetAttribute(pool, 4, byref(c_uint64({threshold})))
        def get(attribute):
            value = c_uint64()
            d.cuMemPoolGetAttribute(pool, attribute, byref(value))
            return value.value
        for what, *wanted in {wanted!r}:
            name, *rest = what.split()
            if name == "alloc":
                pointer = pointers[rest[0]] = c_uint64()
                d.cuMemAllocFromPoolAsync(byref(pointer), c_size_t(int(rest[1])), pool, s)
            elif name == "free":
                d.cuMemFreeAsync(pointers[rest[0]], s)
            elif name == "cuMemFree":
                d.cuMemFree_v2(pointers[rest[0]])
            elif name == "sync":
                d.cuStreamSynchronize(s)
            elif name == "trim":
                d.cuMemPoolTrimTo(pool, c_size_t(int(rest[0])))
            else:
                assert d.result("cuMemPoolSetAttribute", pool, 8, byref(c_uint64(5))) == 1
                d.cuMemPoolSetAttribute(pool, 8, byref(c_uint64()))
                d.cuMemPoolSetAttribute(pool, 6, byref(c_uint64()))
            assert [get(7), get(8), get(5) >> 20, get(6) >> 20] == wanted, (what, get(7), get(8), get(5), get(6))
        """
    )
