"""Kinds of memory: mapped, managed, stream-ordered, arrays; unmapped memory is really gone; access rights between GPUs.

tests/end_to_end/two_gpus.py has the table of calls and rights, which is checked against cards.
"""

from __future__ import annotations

from tests.simulated_gpu.conftest import Run


def test_unmap_removes_the_bytes_and_map_restores_them(run: Run) -> None:
    """Swapping moves chunks in and out at one address; bytes that stayed would hide a missing copy."""
    run("""
        d, size = Driver(), 2 << 20
        address = d.reserve(4 * size)
        one, two = d.physical(size), d.physical(size)
        assert d.used() == 2 * size
        d.map(address, size, one)
        d.write(address, b"one")
        d.cuMemUnmap(address, c_size_t(size))
        assert d.result("cuMemcpyDtoH_v2", ctypes.create_string_buffer(8), address, c_size_t(8)) == 1
        d.map(address, size, two)
        assert d.read(address, 3) == b"\\0\\0\\0", "a new handle is new memory"
        d.cuMemUnmap(address, c_size_t(size))
        d.map(address, size, one)
        assert d.read(address, 3) == b"one"
        d.cuMemRelease(one)
        assert d.read(address, 3) == b"one", "a mapping keeps its memory"
        assert d.used() == 2 * size
        d.cuMemUnmap(address, c_size_t(size))
        d.cuMemRelease(two)
        assert d.used() == 0
        d.cuMemAddressFree(address, c_size_t(4 * size))
    """)


def test_mapping_rules(run: Run) -> None:
    """Offsets, overlaps, parts of mappings and memory without access are errors."""
    run("""
        d, size = Driver(), 2 << 20
        address, handle = d.reserve(4 * size), d.physical(size)
        half, whole, none = c_size_t(size // 2), c_size_t(size), c_size_t(0)
        flags = c_uint64(0)
        assert d.result("cuMemMap", address, whole, c_size_t(4096), handle, flags) == 1
        assert d.result("cuMemMap", address, half, none, handle, flags) == 1
        assert d.result("cuMemMap", c_uint64(address.value + 4 * size), whole, none, handle, flags) == 1
        d.cuMemMap(address, whole, none, handle, flags)
        assert d.result("cuMemMap", address, whole, none, handle, flags) == 1
        assert d.result("cuMemsetD8_v2", address, 1, c_size_t(16)) == 1, "no access was given yet"
        access = AccessDesc(Location(1, 0), 3)
        assert d.result("cuMemSetAccess", address, half, byref(access), c_size_t(1)) == 1
        d.cuMemSetAccess(address, whole, byref(access), c_size_t(1))
        d.cuMemsetD8_v2(address, 1, c_size_t(16))
        assert d.result("cuMemUnmap", address, half) == 1
        assert d.result("cuMemAddressFree", address, c_size_t(4 * size)) == 1
        d.cuMemUnmap(address, whole)
        assert d.result("cuMemUnmap", address, whole) == 1
        assert d.result("cuMemCreate", byref(c_uint64()), c_size_t(4096), None, flags) == 1
    """)


def test_an_error_that_stays(run: Run) -> None:
    """Work on memory that was unmapped too early breaks the context, with the answers of driver 580 on an H200."""
    run("""
        d, size = Driver(), 2 << 20
        address, handle, s = d.reserve(2 * size), d.physical(size), d.stream()
        kept, again = d.physical(size), d.context
        event, other = c_void_p(), c_void_p()
        d.cuEventCreate(byref(event), 2)
        d.map(address, size, handle)
        second = c_uint64(address.value + size)
        d.map(second, size, kept)
        with d.held(s):
            d.cuMemsetD8Async(address, 1, c_size_t(16), s)
            d.cuMemUnmap(address, c_size_t(size))
        assert d.result("cuStreamSynchronize", s) == 700
        for name, *arguments in (
            ("cuStreamQuery", s), ("cuEventQuery", event), ("cuEventCreate", byref(other), 2), ("cuCtxSynchronize",),
            ("cuStreamCreate", byref(other), 1), ("cuStreamDestroy_v2", s), ("cuEventDestroy_v2", event),
            ("cuMemGetInfo_v2", byref(c_size_t()), byref(c_size_t())), ("cuMemFree_v2", c_uint64(address.value)),
            ("cuMemcpyDtoH_v2", byref(other), c_uint64(address.value), c_size_t(8)),
            ("cuMemsetD8_v2", c_uint64(address.value), 1, c_size_t(8)),
            ("cuCtxCreate_v2", byref(other), 0, 0),
        ):
            assert d.result(name, *arguments) == 700, name
        d.cuCtxPushCurrent_v2(again)
        d.cuCtxPopCurrent_v2(byref(other))
        d.cuMemUnmap(second, c_size_t(size))
        d.cuMemRelease(kept)
        d.cuMemRelease(handle)
        d.cuMemAddressFree(address, c_size_t(2 * size))
        d.cuDevicePrimaryCtxReset_v2(0)
        d.cuCtxSetCurrent(again)
        assert d.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(16)) == 709, "a reset does not clear the error"
        assert d.result("cuDevicePrimaryCtxRetain", byref(other), 0) == 700
    """)


def test_managed_memory_is_charged_where_it_is_resident(run: Run) -> None:
    """The managed mode plans by residency: an allocation is free; prefetch and kernels make it resident."""
    run(
        """
        d, mib = Driver(), 1 << 20
        f, s = d.kernel(), d.stream()
        p = d.managed(300 * mib)
        assert d.used() == 0
        def prefetch(device, size):
            d.cuMemPrefetchAsync(p, c_size_t(size), device, s)
            d.cuStreamSynchronize(s)
        prefetch(0, 64 * mib)
        assert d.used() == 64 * mib
        prefetch(-1, 300 * mib)
        assert d.used() == 0
        d.busy(f, s, 1000)
        d.cuStreamSynchronize(s)
        assert d.used() == 256 * mib, "no more than the card has"
        q = d.allocate(100 * mib)
        assert d.used() == 256 * mib, "a fixed allocation pages out managed memory"
        d.cuMemFree_v2(p)
        assert d.used() == 100 * mib
        location = Location(1, 0)
        r = d.managed(8 * mib)
        d.cuMemPrefetchAsync_v2(r, c_size_t(8 * mib), location, 0, s)
        d.cuStreamSynchronize(s)
        assert d.used() == 108 * mib
        assert d.result("cuMemPrefetchAsync", q, c_size_t(16), 0, s) == 1, "not managed"
        """,
        NVSHARE_SIMULATE="1x256MiB",
    )


def test_two_dimensional_copies_and_arrays(run: Run) -> None:
    """Ignored pitches and offsets would corrupt images silently."""
    run("""
        d = Driver()
        class Shape(ctypes.Structure):
            _fields_ = [(end + name, kind) for end in "sd" for name, kind in (
                ("x", c_size_t), ("y", c_size_t), ("t", c_int), ("h", c_void_p), ("d", c_uint64), ("a", c_void_p),
                ("p", c_size_t)
            )] + [("w", c_size_t), ("h", c_size_t)]
        class Array(ctypes.Structure):
            _fields_ = [("w", c_size_t), ("h", c_size_t), ("format", c_int), ("channels", c_uint)]
        p, pitch, array = c_uint64(), c_size_t(), c_void_p()
        d.cuMemAllocPitch_v2(byref(p), byref(pitch), c_size_t(10), c_size_t(4), 4)
        source = ctypes.create_string_buffer(bytes(range(40)), 40)
        host = ctypes.addressof(source)
        d.cuMemcpy2D_v2(byref(Shape(st=1, sh=host, sp=10, dt=2, dd=p.value, dp=pitch.value, w=10, h=4)))
        assert d.read(p, 10, pitch.value * 3) == bytes(range(30, 40))
        d.cuArrayCreate_v2(byref(array), byref(Array(10, 4, 1, 1)))
        d.cuMemcpy2D_v2(byref(Shape(st=2, sd=p.value, sp=pitch.value, dt=3, da=array, w=10, h=4)))
        target = ctypes.create_string_buffer(4)
        d.cuMemcpy2D_v2(byref(Shape(sx=3, sy=1, st=3, sa=array, dt=1, dh=ctypes.addressof(target), dp=2, w=2, h=2)))
        assert target.raw == bytes([13, 14, 23, 24])
    """)


# Access rights between GPUs: when they are checked, and when they end.

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


def test_an_integrated_card_and_page_locked_memory_share_one_budget(run: Run) -> None:
    """Broken: what freezes a machine with such a card passes here; or NVML says what the real one does not."""
    run(
        """
        import pynvml as n
        n.nvmlInit()
        card, size = n.nvmlDeviceGetHandleByIndex(0), 1 << 20
        d, integrated, pinned, host = Driver(), c_int(), c_void_p(), ctypes.create_string_buffer(size)
        d.cuDeviceGetAttribute(byref(integrated), 18, 0)
        assert integrated.value == 1
        d.cuMemAllocHost_v2(byref(pinned), c_size_t(2 * size))
        d.cuMemHostRegister_v2(host, c_size_t(size), 0)
        assert d.used() == 3 * size
        device = d.allocate(4 * size)
        assert d.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(2 * size)) == 2
        assert d.result("cuMemAllocHost_v2", byref(c_void_p()), c_size_t(2 * size)) == 2
        assert d.result("cuMemHostRegister_v2", ctypes.create_string_buffer(2 * size), c_size_t(2 * size), 0) == 2
        for version in (None, n.nvmlMemory_v2):
            try:
                raise AssertionError(n.nvmlDeviceGetMemoryInfo(card, version))
            except n.NVMLError_NotSupported:
                pass
        assert [each.usedGpuMemory for each in n.nvmlDeviceGetComputeRunningProcesses(card)] == [7 * size]
        n.nvmlDeviceGetUtilizationRates(card)
        d.cuMemHostUnregister(host)
        d.cuMemFreeHost(pinned)
        d.cuMemFree_v2(device)
        assert d.used() == 0
        """,
        NVSHARE_SIMULATE="1x8MiB",
        NVSHARE_SIM_INTEGRATED="1",
    )
