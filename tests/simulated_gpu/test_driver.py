"""The simulated driver follows CUDA's rules: contents, order, errors, streams, faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import read_trace
from tests.simulated_gpu.conftest import Run


def test_calls_need_init_and_context(run: Run) -> None:
    """Applications handle the errors of calls before cuInit and without a context."""
    run("""
        d = Driver(init=False)
        count = c_int()
        assert d.result("cuDeviceGetCount", byref(count)) == 3
        d.cuInit(0)
        assert d.result("cuInit", 1) == 1
        assert d.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(64)) == 201
        assert d.result("cuCtxSynchronize") == 201
        assert d.result("cuDeviceGet", byref(count), 5) == 101
    """)


def test_compute_capability_by_the_old_call(run: Run) -> None:
    """Broken: tinygrad, which still asks so, would not start."""
    run("""
        d = Driver()
        old, new = (c_int(), c_int()), (c_int(), c_int())
        d.cuDeviceComputeCapability(byref(old[0]), byref(old[1]), 0)
        for value, attribute in zip(new, (75, 76)):
            d.cuDeviceGetAttribute(byref(value), attribute, 0)
        assert [one.value for one in old] == [one.value for one in new] != [0, 0]
        assert d.result("cuDeviceComputeCapability", byref(old[0]), byref(old[1]), 7) == 101
    """)


def test_bad_arguments_are_refused(run: Run) -> None:
    """Applications and hooks rely on an error instead of a crash."""
    run("""
        d = Driver()
        p = d.allocate(4096)
        assert d.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(0)) == 1
        assert d.result("cuMemFree_v2", c_uint64(p.value + 8)) == 1
        assert d.result("cuMemFree_v2", c_uint64(0)) == 0
        assert d.result("cuMemsetD8_v2", p, 1, c_size_t(5000)) == 1
        assert d.result("cuMemcpyHtoD_v2", p, b"x" * 5000, c_size_t(5000)) == 1
        assert d.result("cuStreamSynchronize", d.stream()) == 0
        assert d.result("cuModuleLoadData", byref(c_void_p()), b"no image at all, but long enough" * 4) == 200
        f = d.kernel()
        assert d.result("cuLaunchKernel", f, 0, 1, 1, 1, 1, 1, 0, None, None, None) == 1
        assert d.result("cuLaunchKernel", f, 1, 1, 1, 2048, 1, 1, 0, None, None, None) == 1
        s = d.stream()
        d.cuStreamDestroy_v2(s)
        assert d.result("cuStreamQuery", s) == 400
        assert d.result("cuModuleGetFunction", byref(c_void_p()), c_void_p(0), b"x") == 400
    """)


@pytest.mark.parametrize("call", ["cuCtxGetDevice", "cuCtxPopCurrent_v2"])
def test_a_destroyed_current_context_crashes_as_on_the_card(run: Run, call: str) -> None:
    """A hook that makes a dead context current would crash programs on a real driver."""
    run(f"""
        import signal
        d = Driver()
        own = c_void_p()
        d.cuCtxCreate_v2(byref(own), 0, 0)
        d.cuCtxDestroy_v2(own)
        assert d.result("cuCtxPushCurrent_v2", own) == 0, "driver 580 accepts it"
        assert d.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(64)) == 709
        crashed = []
        signal.signal(signal.SIGSEGV, lambda *_: crashed.append(1))
        d.result("{call}", byref(c_void_p()))
        assert crashed
    """)


@pytest.mark.parametrize("call", ["cuStreamGetId", "cuStreamGetDevice", "cuGraphLaunch"])
def test_calls_that_invalidate_a_capture_on_the_card_do_so_here(run: Run, call: str) -> None:
    """A hook that asks a capturing stream for its device would break captures on a real driver."""
    run(f"""
        d = Driver()
        s, graph, ready = d.stream(), c_void_p(), c_void_p()
        d.cuGraphCreate(byref(graph), 0)
        d.cuGraphInstantiateWithFlags(byref(ready), graph, c_uint64(0))
        d.cuStreamBeginCapture_v2(s, 2)
        arguments = (ready, s) if "{call}" == "cuGraphLaunch" else (s, byref(c_uint64()))
        assert d.result("cuStreamGetCtx", s, byref(c_void_p())) == 0
        assert d.result("{call}", *arguments) == 900
        assert d.result("cuStreamEndCapture", s, byref(graph)) == 901
    """)


def test_effects_happen_when_work_ends(run: Run) -> None:
    """If a copy took effect at submission, eviction without a drain would go unnoticed."""
    run("""
        d = Driver()
        f, s, p = d.kernel(), d.stream(), d.allocate(64)
        d.cuMemsetD8_v2(p, 0, c_size_t(64))
        d.cuCtxSynchronize()
        with d.held(s):
            d.cuMemsetD8Async(p, 7, c_size_t(64), s)
            assert ctypes.string_at(p.value, 1) == b"\\0", "the fill ran before earlier work"
            assert d.result("cuStreamQuery", s) == 600
        d.cuStreamSynchronize(s)
        assert ctypes.string_at(p.value, 1) == b"\\7"
    """)


def test_a_pageable_source_may_be_reused_at_once(run: Run) -> None:
    """An asynchronous copy of pageable memory copies the bytes at the call."""
    run("""
        d = Driver()
        f, s, p = d.kernel(), d.stream(), d.allocate(64)
        source = ctypes.create_string_buffer(b"A" * 64, 64)
        with d.held(s):
            d.cuMemcpyHtoDAsync_v2(p, source, c_size_t(64), s)
            ctypes.memset(source, ord("B"), 64)
        d.cuStreamSynchronize(s)
        assert d.read(p, 64) == b"A" * 64
        pinned = c_void_p()
        d.cuMemHostAlloc(byref(pinned), c_size_t(64), 0)
        ctypes.memset(pinned, ord("C"), 64)
        with d.held(s):
            d.cuMemcpyHtoDAsync_v2(p, pinned, c_size_t(64), s)
            ctypes.memset(pinned, ord("D"), 64)
        d.cuStreamSynchronize(s)
        assert d.read(p, 64) == b"D" * 64, "pinned memory is read when the copy runs"
    """)


def test_events_order_and_time_streams(run: Run, state: Path) -> None:
    """An ignored wait would let dependent kernels overlap; applications time kernels by events."""
    run("""
        d = Driver()
        f, one, two, begin, end, ms = d.kernel(), d.stream(), d.stream(), d.event(), d.event(), c_float()
        d.cuEventRecord(begin, one)
        with d.held(one):
            d.busy(f, one, 5_000_000)
            d.cuEventRecord(end, one)
            d.cuStreamWaitEvent(two, end, 0)
            d.busy(f, two, 3_000_000)
            assert d.result("cuEventQuery", end) == 600
            assert d.result("cuEventElapsedTime", byref(ms), begin, end) == 600
        d.cuEventSynchronize(end)
        d.cuEventElapsedTime(byref(ms), begin, end)
        assert ms.value > 4.99, ms.value
        d.cuCtxSynchronize()
        assert d.result("cuEventQuery", end) == 0
    """)
    first, second = read_trace(state)
    assert first.end_ns - first.start_ns == 5_000_000
    assert second.start_ns >= first.end_ns
    assert second.stream != first.stream


def test_streams_overlap_and_the_legacy_stream_does_not(run: Run, state: Path) -> None:
    """The default stream and blocking streams wait for each other; non-blocking streams do not."""
    run("""
        d = Driver()
        f, blocking, free, other, go = d.kernel(), d.stream(0), d.stream(1), d.stream(1), d.event()
        with d.held(other):  # all is submitted before any of it may begin
            d.cuEventRecord(go, other)
            d.cuStreamWaitEvent(blocking, go, 0)
            d.cuStreamWaitEvent(free, go, 0)
            d.busy(f, blocking, 3_000_000)
            d.busy(f, free, 4_000_000)
            d.busy(f, None, 1_000_000)
            d.busy(f, blocking, 2_000_000)
        d.cuCtxSynchronize()
    """)
    by_duration = {busy.end_ns - busy.start_ns: busy for busy in read_trace(state)}
    legacy, later, blocking, free = (by_duration[ms * 1_000_000] for ms in (1, 2, 3, 4))
    assert free.start_ns == blocking.start_ns, "two streams of a process must be able to overlap"
    assert legacy.start_ns >= blocking.end_ns
    assert later.start_ns >= legacy.end_ns


def test_a_full_launch_queue_blocks_the_launch(run: Run) -> None:
    """A driver with an unbounded queue would hide that pacing is missing."""
    run(
        """
        d = Driver()
        f, s = d.kernel(), d.stream()
        begun, launched = [], []
        def work():
            d.cuCtxSetCurrent(d.context)
            for i in range(5):
                begun.append(i)
                d.busy(f, s, 1000)
                launched.append(i)
        thread = threading.Thread(target=work)
        def sleeps():
            with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "S"
        with d.held(s):
            thread.start()
            while len(begun) < 5:
                thread.join(0.001)
            while not (all(sleeps() for _ in range(50)) or len(launched) == 5):
                thread.join(0.001)
            assert launched == [0, 1, 2, 3], "the fifth launch must wait for a place"
        thread.join()
        assert len(launched) == 5
        """,
        NVSHARE_SIM_LAUNCH_QUEUE="4",
    )


def test_faults_and_an_older_driver(run: Run) -> None:
    """Faults must hit the named calls; the hook must work with drivers that lack functions of its table."""
    run(
        """
        d = Driver()
        pointer = c_uint64()
        def allocate():
            return d.result("cuMemAlloc_v2", byref(pointer), c_size_t(64))
        assert [allocate() for _ in range(3)] == [0, 2, 0]
        s = d.stream()
        assert [d.result("cuStreamQuery", s) for _ in range(4)] == [0, 0, 700, 700]
        d.library.nvs_sim_fail(b"cuMemAlloc", c_uint64(1), 999)
        assert [allocate() for _ in range(2)] == [999, 0]
        found, status = c_void_p(), c_int()
        d.library.nvs_sim_clear_faults()
        assert d.result("cuStreamQuery", s) == 0
        version = c_int()
        d.cuDriverGetVersion(byref(version))
        assert version.value == 12040
        d.cuGetProcAddress_v2(b"cuCtxSynchronize", byref(found), 13000, c_uint64(0), byref(status))
        assert found.value == ctypes.cast(d.library["cuCtxSynchronize"], c_void_p).value, "not that of version 13"
        """,
        NVSHARE_SIM_FAULTS="cuMemAlloc@2=2,cuStreamQuery@3-=700",
        NVSHARE_SIM_DRIVER_VERSION="12040",
    )
