"""Memory of graphs and of pools: the figures of driver 580 on an H200."""

from __future__ import annotations

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
