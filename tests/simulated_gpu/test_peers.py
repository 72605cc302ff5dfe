"""Rights between simulated GPUs: when they are looked at, and what takes them away.

May not go here: which call needs which right (the table in tests/end_to_end/two_gpus.py, which cards are held against).
"""

from __future__ import annotations

from tests.simulated_gpu.conftest import Run

TWO = {"NVSHARE_SIM_COPY_GIBPS": "0", "NVSHARE_SIMULATE": "2x64MiB"}
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
    """A copy that goes on after its right was taken would hide a hook that takes memory away too early."""
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
    """A captured copy that counts the launching GPU's rights would fail, or succeed, where a card's does not."""
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


def test_nobody_can_be_given_what_is_not_possible(run: Run) -> None:
    """A hook that gives rights without asking would look right on the double and fail on most machines."""
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


def test_access_to_a_pool_comes_and_goes(run: Run) -> None:
    """A pool's access that cannot be asked for or taken back leads allocators astray."""
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


def test_batches_of_shapes(run: Run) -> None:
    """Rows and layers that are ignored corrupt what is copied; a batch that does nothing slips past the gate unseen."""
    run(
        """
    d = Driver()
    class Operand(ctypes.Structure):
        _fields_ = [("kind", c_int), ("pointer", c_uint64), ("row", c_size_t), ("layer", c_size_t), ("hint", c_int * 2)]
    class Operation(ctypes.Structure):
        _fields_ = [
            ("source", Operand), ("to", Operand), ("extent", c_size_t * 3), ("order", c_int), ("flags", c_uint)
        ]
    a, b, s = d.allocate(64), d.allocate(64), d.stream()
    d.write(a, bytes(range(64)))
    d.cuMemsetD8_v2(b, 0, c_size_t(64))
    d.cuCtxSynchronize()
    two = (Operation * 2)(
        Operation(Operand(1, a.value, 8, 2), Operand(1, b.value, 3, 2), (c_size_t * 3)(3, 2, 2), 1),
        Operation(Operand(1, a.value + 60), Operand(1, b.value + 32), (c_size_t * 3)(4, 1, 1), 1),
    )
    d.cuMemcpy3DBatchAsync_v2(c_size_t(2), two, c_uint64(0), s)
    d.cuStreamSynchronize(s)
    assert d.read(b, 12) == bytes([0, 1, 2, 8, 9, 10, 16, 17, 18, 24, 25, 26])
    assert d.read(b, 5, 32) == bytes([60, 61, 62, 63, 0])
    assert d.result("cuMemcpy3DBatchAsync_v2", c_size_t(2), two, c_uint64(0), None) == 1, "the legacy stream"
    """,
        **TWO,
    )
