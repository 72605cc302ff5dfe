"""Stream capture and graphs: recording, forbidden calls, replay."""

from __future__ import annotations

from tests.simulated_gpu.conftest import Run


def test_capture_joins_streams_by_events(run: Run) -> None:
    """Frameworks capture side streams with fork and join."""
    run("""
        d = Driver()
        one, two, fork, join, p, graph = d.stream(), d.stream(), d.event(), d.event(), d.allocate(64), c_void_p()
        d.cuStreamBeginCapture_v2(one, 0)
        d.cuEventRecord(fork, one)
        d.cuStreamWaitEvent(two, fork, 0)
        d.cuMemsetD8Async(p, 1, c_size_t(64), two)
        status = c_int()
        d.cuStreamIsCapturing(two, byref(status))
        assert status.value == 1
        assert d.result("cuEventQuery", fork) == 907
        d.cuEventRecord(join, two)
        d.cuStreamWaitEvent(one, join, 0)
        d.cuMemsetD8Async(p, 2, c_size_t(8), one)
        d.cuStreamEndCapture(one, byref(graph))
        number = c_size_t()
        d.cuGraphGetNodes(graph, None, byref(number))
        assert number.value == 2
        d.cuGraphGetEdges(graph, None, None, byref(number))
        assert number.value == 1
        d.cuGraphLaunch(d.instantiate(graph), two)
        d.cuStreamSynchronize(two)
        assert d.read(p, 16) == b"\\2" * 8 + b"\\1" * 8
        d.cuStreamBeginCapture_v2(one, 0)
        d.cuEventRecord(fork, one)
        d.cuStreamWaitEvent(two, fork, 0)
        d.cuMemsetD8Async(p, 1, c_size_t(64), two)
        assert d.result("cuStreamEndCapture", one, byref(graph)) == 904, "work of the side stream would be lost"
        assert graph.value is None
        d.cuStreamSynchronize(two)
    """)


def test_forbidden_calls_invalidate_by_mode(run: Run) -> None:
    """A drain that synchronises a capturing stream, or allocates in global mode, must fail here."""
    run("""
        d = Driver()
        s, other, blocking = d.stream(), d.stream(), d.stream(0)
        def attempt(mode, function, *arguments, stream=s):
            graph = c_void_p()
            d.cuStreamBeginCapture_v2(stream, mode)
            first = d.result(function, *arguments)
            return first, d.result("cuStreamEndCapture", stream, byref(graph))
        pointer, event = c_uint64(), d.event()
        for mode, expected in ((0, (900, 901)), (1, (900, 901)), (2, (0, 0))):
            assert attempt(mode, "cuMemAlloc_v2", byref(pointer), c_size_t(64)) == expected, mode
            assert attempt(mode, "cuEventQuery", event) == expected, mode
        for mode in (0, 1, 2):
            assert attempt(mode, "cuStreamSynchronize", s) == (900, 901)
            assert attempt(mode, "cuCtxSynchronize") == (900, 901)
            assert attempt(mode, "cuStreamSynchronize", other) == (0, 0)
            assert attempt(mode, "cuStreamSynchronize", None, stream=blocking) == (906, 901)
    """)


def test_other_threads_and_their_mode(run: Run) -> None:
    """The agent's drain relies on the relaxed mode of its own thread while the application captures."""
    run("""
        d = Driver()
        s, event, results = d.stream(), d.event(), []
        def query(mode):
            d.cuCtxSetCurrent(d.context)
            value = c_int(mode)
            d.cuThreadExchangeStreamCaptureMode(byref(value))
            assert value.value == 0
            results.append(d.result("cuEventQuery", event))
        def capture(capture_mode, thread_mode):
            graph = c_void_p()
            d.cuStreamBeginCapture_v2(s, capture_mode)
            thread = threading.Thread(target=query, args=(thread_mode,))
            thread.start()
            thread.join()
            return results.pop(), d.result("cuStreamEndCapture", s, byref(graph))
        assert capture(0, 2) == (0, 0)
        assert capture(0, 1) == (0, 0)
        assert capture(0, 0) == (900, 901)
        assert capture(1, 0) == (0, 0)
        graph = c_void_p()
        def end():
            d.cuCtxSetCurrent(d.context)
            results.append(d.result("cuStreamEndCapture", s, byref(graph)))
        for mode, expected in ((0, 908), (2, 0)):
            d.cuStreamBeginCapture_v2(s, mode)
            thread = threading.Thread(target=end)
            thread.start()
            thread.join()
            assert results.pop() == expected, "only a relaxed capture may end on another thread"
            if expected:
                d.cuStreamEndCapture(s, byref(graph))
    """)


def test_a_context_ends_with_its_captures(run: Run) -> None:
    """As on a card: afterwards no call fails, and a stream that joined from another context is free again."""
    run("""
        d = Driver()
        primary, second, kept = c_void_p(), c_void_p(), d.stream()
        d.cuCtxGetCurrent(byref(primary))
        for joins in (False, True):
            d.cuCtxCreate_v2(byref(second), 0, 0)
            s, fork = d.stream(), d.event()
            d.cuStreamBeginCapture_v2(s, 0)
            if joins:
                d.cuEventRecord(fork, s)
                d.cuStreamWaitEvent(kept, fork, 0)
            else:
                assert d.result("cuMemAlloc_v2", byref(c_void_p()), c_size_t(64)) == 900
            d.cuCtxDestroy_v2(second)
            d.cuCtxSetCurrent(primary)
            d.allocate(64)
            d.cuStreamSynchronize(kept)
            d.cuCtxSynchronize()
        """)
