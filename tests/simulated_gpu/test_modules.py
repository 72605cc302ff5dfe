"""Questions about images, functions and launches, which libraries of NVIDIA ask before they start a kernel."""

from __future__ import annotations

from pathlib import Path

from tests.simulated_gpu.conftest import Run

TWO = """
    PTX = b'''.version 8.0
    .target sm_90
    .visible .entry first(.param .u64 p, .param .u32 n, .param .align 8 .b8 s[24]) { ret; }
    .visible .entry second() { ret; }
    '''
    d = Driver()
    module = c_void_p()
    d.cuModuleLoadData(byref(module), PTX + b"\\0")
"""


def test_an_image_is_read_from_a_file(run: Run, tmp_path: Path) -> None:
    """Broken: inductor's launcher, which loads its kernels so, fails; a missing file must be told from a bad one."""
    run(f"""
        d = Driver()
        module, library, name = c_void_p(), c_void_p(), b"{tmp_path}/one.ptx"
        assert d.result("cuModuleLoad", byref(module), name) == 301
        with open(name, "wb") as file:
            file.write(b"neither PTX nor a cubin")
        assert d.result("cuModuleLoad", byref(module), name) == 200
        with open(name, "wb") as file:
            file.write(PTX)
        d.cuModuleLoad(byref(module), name)
        d.cuModuleGetFunction(byref(c_void_p()), module, b"nvs_busy")
        d.cuLibraryLoadFromFile(byref(library), name, None, None, 0, None, None, 0)
        d.cuLibraryGetKernel(byref(c_void_p()), library, b"nvs_busy")
    """)


def test_functions_are_listed_with_their_parameters(run: Run) -> None:
    """Broken: a server for remote programs does not know how many bytes of arguments to send."""
    run(
        TWO
        + """
    count, functions, name, back = c_uint(), (c_void_p * 2)(), ctypes.c_char_p(), c_void_p()
    d.cuModuleGetFunctionCount(byref(count), module)
    assert count.value == 2
    d.cuModuleEnumerateFunctions(functions, 2, module)
    known = {}
    for one in map(c_void_p, functions):
        d.cuFuncGetName(byref(name), one)
        d.cuFuncGetModule(byref(back), one)
        assert back.value == module.value
        known[name.value] = one
    assert set(known) == {b"first", b"second"}
    def parameters(function):
        offset, size, found = c_size_t(), c_size_t(), []
        while d.result("cuFuncGetParamInfo", function, c_size_t(len(found)), byref(offset), byref(size)) == 0:
            found.append((offset.value, size.value))
        return found
    assert parameters(known[b"first"]) == [(0, 8), (8, 4), (16, 24)]
    assert parameters(known[b"second"]) == []
    number = c_size_t()
    d.cuFuncGetParamCount(known[b"first"], byref(number))
    assert number.value == 3
    """
    )


def test_occupancy_is_that_of_an_h100(run: Run) -> None:
    """Broken: cublasCreate fails, so every product does; a cluster of 16 blocks passes here and fails on a card."""
    run("""
        class Attribute(ctypes.Structure):
            _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]
        class Config(ctypes.Structure):
            _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                        ("attributes", ctypes.POINTER(Attribute)), ("count", c_uint)]
        d = Driver()
        f, shared, number = d.kernel(b"other"), c_size_t(), c_int()
        d.cuOccupancyAvailableDynamicSMemPerBlock(byref(shared), f, 1, 128)
        assert shared.value == 232448
        assert d.result("cuOccupancyAvailableDynamicSMemPerBlock", byref(shared), f, 3, 1024) == 1, "2048 threads"
        def config(blocks, grid=16):
            attribute = Attribute(4, 0, (c_uint * 16)(blocks, 1, 1))
            return Config((grid, 1, 1), (128, 1, 1), 0, None, ctypes.pointer(attribute), 1)
        d.cuOccupancyMaxActiveClusters(byref(number), f, byref(config(4)))
        assert number.value == 16 * 16 // 4
        d.cuOccupancyMaxPotentialClusterSize(byref(number), f, byref(config(1)))
        assert number.value == 8
        assert d.result("cuLaunchKernelEx", byref(config(8)), f, None, None) == 0
        assert d.result("cuLaunchKernelEx", byref(config(16)), f, None, None) == 912, "more than 8 is not portable"
        assert d.result("cuLaunchKernelEx", byref(config(8, grid=12)), f, None, None) == 912, "the grid has a remainder"
        assert d.result("cuOccupancyMaxActiveClusters", byref(number), f, byref(config(16))) == 912
        d.cuFuncSetAttribute(f, 14, 1)
        assert d.result("cuLaunchKernelEx", byref(config(16)), f, None, None) == 0
        assert d.result("cuLaunchKernelEx", byref(config(20, grid=20)), f, None, None) == 912
        d.cuOccupancyMaxActiveClusters(byref(number), f, byref(config(20, grid=20)))
        assert number.value == 0, "cuBLAS asks for up to 32, and takes an error as one of its next launch"
    """)


def test_tensor_maps_follow_the_rules_of_the_header(run: Run) -> None:
    """Broken: FlashAttention 3 does not start here, or a misaligned tensor passes here and fails on a card."""
    run("""
        d = Driver()
        room, p = ctypes.create_string_buffer(256), d.allocate(1 << 20)
        at = c_void_p((ctypes.addressof(room) + 63) // 64 * 64)
        sizes, strides, ones = (c_uint64 * 5)(*[64] * 5), (c_uint64 * 4)(*[256] * 4), (c_uint * 5)(*[1] * 5)
        def encode(address=p.value, rank=2, box=32, out=at):
            boxes = (c_uint * 5)(*[box] * 5)
            shape = (c_void_p(address), sizes, strides, boxes, ones)
            return d.result("cuTensorMapEncodeTiled", out, 7, rank, *shape, 0, 0, 0, 0)
        assert encode() == 0
        assert d.result("cuTensorMapReplaceAddress", at, c_void_p(p.value + 64)) == 0
        assert d.result("cuTensorMapReplaceAddress", at, c_void_p(p.value + 8)) == 1
        bad = [encode(address=p.value + 8), encode(rank=6), encode(rank=0), encode(box=257), encode(box=1),
               encode(out=c_void_p(at.value + 32))]
        assert bad == [1] * len(bad)
    """)


def test_tables_of_the_runtime_answer(run: Run) -> None:
    """Broken: cuBLASLt finds no kernel, as it asks an undocumented table for the current context and its number."""
    run("""
        def slot(identity, number):
            table = c_void_p()
            d.cuGetExportTable(byref(table), bytes.fromhex(identity))
            return ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)(ctypes.cast(table, ctypes.POINTER(c_void_p))[number])
        d = Driver()
        current, number, same = c_void_p(), c_uint64(), c_uint64()
        assert slot("42d85a8123f6cb478298f6e78a3aecdc", 2)(byref(current), None) == 0
        assert current.value == d.context.value
        assert slot("21318c60971432488ca641ff7324c8f2", 4)(current, byref(number)) == 0
        d.cuCtxGetId(d.context, byref(same))
        assert number.value == same.value
        assert slot("1734dc26800d47458726c0f1e7dd8bca", 4)(None, None) == 801
    """)


def test_streams_wait_for_values_and_keep_attributes(run: Run) -> None:
    """Broken: a program that passes flags between streams and the host hangs here, or goes on too early."""
    run("""
        d = Driver()
        s, flag, p = d.stream(), d.allocate(64), d.allocate(64)
        d.write(flag, bytes(64))
        d.write(p, bytes(64))
        d.cuStreamWaitValue32_v2(s, flag, 3, 0)
        d.cuMemsetD8Async(p, 7, c_size_t(64), s)
        assert d.result("cuStreamQuery", s) == 600
        d.cuStreamWriteValue32_v2(None, flag, 2, 0)
        d.cuStreamSynchronize(None)
        assert (d.result("cuStreamQuery", s), d.read(p, 1)) == (600, b"\\0"), "2 is less than 3"
        ctypes.memset(flag.value, 5, 1)
        d.cuStreamSynchronize(s)
        assert d.read(p, 1) == b"\\7"
        assert d.result("cuStreamWaitValue32_v2", s, c_uint64(flag.value + 2), 3, 0) == 1
        value, back = (c_uint * 16)(1), (c_uint * 16)()
        d.cuStreamSetAttribute(s, 3, value)
        d.cuStreamGetAttribute(s, 3, back)
        assert back[0] == 1
        assert d.result("cuStreamSetAttribute", s, 4, value) == 1, "clusters are of launches"
    """)


def test_graphs_can_be_read_and_hold_objects(run: Run) -> None:
    """Broken: a library that walks a captured graph stops; NCCL's objects are destroyed while a graph uses them."""
    run("""
        d = Driver()
        graph, one, two, clone, event = (c_void_p() for _ in range(5))
        ended = threading.Event()
        destroy = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: ended.set())
        held = c_void_p()
        d.cuUserObjectCreate(byref(held), None, destroy, 1, 1)
        d.cuGraphCreate(byref(graph), 0)
        d.cuGraphRetainUserObject(graph, held, 1, 1)
        event = d.event()
        d.cuGraphAddEmptyNode(byref(one), graph, None, c_size_t(0))
        d.cuGraphAddEventRecordNode(byref(two), graph, None, c_size_t(0), event)
        d.cuGraphAddDependencies(graph, byref(one), byref(two), c_size_t(1))
        assert d.result("cuGraphAddDependencies", graph, byref(one), byref(two), c_size_t(1)) == 1, "it is there"
        count, found = c_size_t(1), c_void_p()
        d.cuGraphNodeGetDependencies(two, byref(found), byref(count))
        assert (count.value, found.value) == (1, one.value)
        d.cuGraphNodeGetDependentNodes(one, byref(found), byref(count))
        assert (count.value, found.value) == (1, two.value)
        d.cuGraphGetRootNodes(graph, None, byref(count))
        assert count.value == 1
        d.cuGraphEventRecordNodeGetEvent(two, byref(found))
        assert found.value == event.value
        d.cuGraphClone(byref(clone), graph)
        d.cuGraphNodeFindInClone(byref(found), one, clone)
        assert found.value not in (None, one.value)
        ready, on = d.instantiate(graph), c_uint()
        d.cuGraphNodeGetEnabled(ready, two, byref(on))
        assert on.value == 1
        for destroyed in (graph, clone):
            d.cuGraphDestroy(destroyed)
        assert not ended.is_set(), "the executable has a reference"
        d.cuGraphExecDestroy(ready)
        assert ended.wait(30)
    """)
