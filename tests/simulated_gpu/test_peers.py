"""Access rights between simulated GPUs: when they are checked, and when they end.

tests/end_to_end/two_gpus.py has the table of calls and rights, which is checked against cards.
"""

from __future__ import annotations

from tests.simulated_gpu.conftest import Run

TWO = {"NVSHARE_SIMULATE": "2x64MiB"}
ON_GPU_0 = """
    d, size = Driver(), 2 << 20
    address = d.reserve(size)
    d.map(address, size, d.physical(size))
    other = Driver(device=1)
    mine, s = other.allocate(size), other.stream()

    def allow(gpu, flags):
        access = AccessDesc(Location(1, gpu), flags)
        return d.result("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
"""


def test_rights_count_when_work_runs(run: Run) -> None:
    """A copy without access rights would hide a hook that removes memory too early."""
    run(
        ON_GPU_0
        + """
    assert allow(1, 3) == 0
    with other.held(s):
        other.cuMemcpyAsync(mine, address, c_size_t(size), s)
        assert allow(1, 0) == 0
    assert other.result("cuStreamSynchronize", s) == 700
    """,
        **TWO,
    )


def test_a_graph_keeps_the_gpu_that_its_nodes_were_captured_on(run: Run) -> None:
    """The rights of the capturing GPU count, as on a card, not those of the launching GPU."""
    run(
        ON_GPU_0
        + """
    graph = c_void_p()
    assert allow(1, 3) == 0
    other.cuStreamBeginCapture_v2(s, 0)
    other.cuMemcpyAsync(mine, address, c_size_t(size), s)
    other.cuStreamEndCapture(s, byref(graph))
    ready = other.instantiate(graph)
    other.cuGraphLaunch(ready, s)
    other.cuStreamSynchronize(s)
    assert allow(1, 0) == 0
    other.cuGraphLaunch(ready, s)
    assert other.result("cuStreamSynchronize", s) == 700
    """,
        **TWO,
    )


def test_impossible_access_cannot_be_given(run: Run) -> None:
    """A hook that sets access without asking would fail on most machines."""
    run(
        ON_GPU_0
        + """
    can, pool, flags = c_int(-1), c_void_p(), c_int(-1)
    d.cuDeviceCanAccessPeer(byref(can), 1, 0)
    assert can.value == 0
    d.cuDeviceGetP2PAttribute(byref(can), 3, 1, 0)
    assert can.value == 0
    assert d.result("cuCtxEnablePeerAccess", d.context, 0) == 217
    assert allow(1, 3) == 101
    assert allow(0, 3) == 0
    d.cuDeviceGetDefaultMemPool(byref(pool), 0)
    assert d.result("cuMemPoolSetAccess", pool, byref(AccessDesc(Location(1, 1), 3)), c_size_t(1)) == 101
    d.cuMemPoolGetAccess(byref(flags), pool, byref(Location(1, 1)))
    assert flags.value == 0
    """,
        **TWO,
        NVSHARE_SIM_PEERS="0",
    )


def test_access_to_a_pool(run: Run) -> None:
    """Allocators set, read and remove the access to a pool."""
    run(
        """
    d = Driver()
    pool, flags, pointer = c_void_p(), c_int(-1), c_uint64()
    d.cuDeviceGetDefaultMemPool(byref(pool), 0)
    d.cuMemAllocAsync(byref(pointer), c_size_t(4096), None)
    other = Driver(device=1)
    for given, result in ((0, 1), (3, 0), (0, 1)):
        d.cuMemPoolSetAccess(pool, byref(AccessDesc(Location(1, 1), given)), c_size_t(1))
        d.cuMemPoolGetAccess(byref(flags), pool, byref(Location(1, 1)))
        assert flags.value == given
        assert other.result("cuMemsetD8_v2", pointer, 1, c_size_t(16)) == result
    assert d.result("cuMemPoolSetAccess", pool, byref(AccessDesc(Location(1, 0), 0)), c_size_t(1)) == 101, "its own"
    """,
        **TWO,
    )
