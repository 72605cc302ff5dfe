"""What the hook charges is what the driver holds: after any sequence of calls, and after any of them has failed.

Each test runs in a process image of its own copy of the library, so no state leaks between tests.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hook.memory_library import (
    DEVICE,
    GIB,
    INVALID_CONTEXT,
    INVALID_VALUE,
    MANAGED,
    MIB,
    OUT_OF_MEMORY,
    Memory,
)

REFUSED, UNAVAILABLE = 2, 3


def exact(memory: Memory) -> None:
    """The hook's figure is the driver's."""
    usage = memory.usage()
    assert usage.allocated == memory.held()
    assert usage.resident + usage.host == usage.allocated
    assert usage.pinned <= usage.resident


@pytest.mark.parametrize("mode", [DEVICE, MANAGED])
def test_a_limit_holds_at_once_and_to_the_byte(fresh: Callable[[int], Memory], mode: int) -> None:
    """Broken: a client exceeds its limit, or cannot use all of it."""
    memory = fresh(mode)
    memory.limits(limit=4 * GIB)
    result, first = memory.alloc(3 * GIB)
    assert result == 0
    assert memory.alloc(GIB + 1)[0] == OUT_OF_MEMORY
    result, second = memory.alloc(GIB)
    assert result == 0
    assert memory.alloc(1)[0] == OUT_OF_MEMORY
    exact(memory)
    assert memory.free(first) == 0
    assert memory.alloc(3 * GIB)[0] == 0
    memory.limits(limit=GIB)
    assert memory.free(second) == 0
    assert memory.alloc(512)[0] == OUT_OF_MEMORY, "a limit below what is in use lets nothing more in"
    exact(memory)


@pytest.mark.parametrize("size", [2**64 - 1, 2**64 - 511, 2**63])
def test_absurd_sizes_are_out_of_memory(fresh: Callable[[int], Memory], size: int) -> None:
    """Broken: a sum that wraps lets an allocation past the limit."""
    memory = fresh(DEVICE)
    memory.limits(limit=GIB)
    assert memory.alloc(MIB)[0] == 0
    assert memory.alloc(size)[0] == OUT_OF_MEMORY
    exact(memory)


@pytest.mark.parametrize("mode", [DEVICE, MANAGED])
def test_the_virtual_card_is_consistent(fresh: Callable[[int], Memory], mode: int) -> None:
    """Broken: cuMemGetInfo and cuDeviceTotalMem contradict each other or the limit."""
    memory = fresh(mode)
    assert memory.info() == (0, 15 * GIB, 16 * GIB), "with no limit: the real figures"
    memory.limits(limit=4 * GIB, capacity=8 * GIB)
    result, pointer = memory.alloc(GIB)
    assert result == 0
    assert memory.info() == (0, 3 * GIB, 4 * GIB)
    assert memory.device_total() == 4 * GIB
    memory.limits(capacity=8 * GIB)
    assert memory.info() == (0, 7 * GIB, 8 * GIB)
    memory.limits(limit=64 * GIB)
    assert memory.info()[2] == memory.device_total() == 16 * GIB
    # 14 GiB are really free.  Device memory cannot promise more; managed memory can, for others make room.
    assert memory.info()[1] == (14 * GIB if mode == DEVICE else 15 * GIB)
    memory.limits(limit=MIB)
    assert memory.info() == (0, 0, MIB)
    assert memory.free(pointer) == 0


@pytest.mark.parametrize("mode", [DEVICE, MANAGED])
def test_steps_of_reservations_are_small_on_a_small_gpu(fresh: Callable[[int], Memory], mode: int) -> None:
    """Broken: the unused part of a reservation is most of the GPU, and allocations of other programs fail for it."""
    memory = fresh(mode)
    memory.limits(capacity=128 * MIB, reserve=True)
    assert memory.alloc(MIB)[0] == 0
    assert memory.reserves_asked() == [2 * MIB]
    exact(memory)


def test_growth_asks_for_reservations_in_steps(fresh: Callable[[int], Memory]) -> None:
    """Broken: the coordinator is asked for every small allocation, or not at all, or its no is ignored."""
    memory = fresh(MANAGED)
    memory.limits(limit=100 * MIB, reserve=True)
    for _ in range(64):
        assert memory.alloc(MIB)[0] == 0
    assert memory.reserves_asked() == [64 * MIB]
    assert memory.alloc(MIB)[0] == 0
    assert memory.reserves_asked() == [64 * MIB, 100 * MIB], "never more than the limit"
    memory.limits(capacity=GIB, reserve=True)
    memory.c.fake_set_reserve_answer(REFUSED)
    assert memory.alloc(100 * MIB)[0] == OUT_OF_MEMORY
    assert memory.reserves_asked() == [176 * MIB, 165 * MIB], "the exact need is asked for before giving up"
    exact(memory)
    memory.c.fake_set_reserve_answer(UNAVAILABLE)
    assert memory.alloc(100 * MIB)[0] == 0, "nobody to ask: the local limit decides"
    exact(memory)


def test_what_the_driver_must_judge_reaches_it(fresh: Callable[[int], Memory]) -> None:
    """Broken: unknown pointers, double frees and calls without a context get another answer than the driver's."""
    memory = fresh(MANAGED)
    assert memory.free(0x1234) == INVALID_VALUE
    result, pointer = memory.alloc(MIB)
    assert result == 0
    assert memory.free(pointer + 512) == INVALID_VALUE, "only the whole allocation can be freed"
    exact(memory)
    assert memory.free(pointer) == 0
    assert memory.free(pointer) == INVALID_VALUE
    memory.context(0)
    assert memory.alloc(MIB)[0] == INVALID_CONTEXT
    exact(memory)


def test_stream_ordered_free_waits_for_its_stream(fresh: Callable[[int], Memory]) -> None:
    """Broken: memory is given back while queued work still uses it, or is never given back."""
    memory = fresh(MANAGED)
    memory.limits(limit=2 * MIB)
    result, pointer = memory.alloc_async(2 * MIB)
    assert result == 0
    memory.c.fake_set_events_done(False)
    assert memory.free_async(pointer) == 0
    assert memory.free_async(pointer) == INVALID_VALUE
    assert memory.free(pointer) == INVALID_VALUE
    assert not memory.reap()
    assert memory.held() == 2 * MIB, "work that was queued before the free may still use it"
    assert memory.alloc(MIB)[0] == OUT_OF_MEMORY, "and waiting for it is bounded"
    exact(memory)
    memory.c.fake_set_events_done(True)
    assert memory.alloc(2 * MIB)[0] == 0, "pressure collects what is done"
    exact(memory)


def test_a_stream_has_its_own_freed_memory_again_at_once(fresh: Callable[[int], Memory]) -> None:
    """Broken: each step of a loop waits for the driver, or one stream gets memory that another still uses."""
    memory = fresh(MANAGED)
    memory.limits(limit=2 * MIB)
    memory.c.fake_set_events_done(False)
    result, pointer = memory.alloc_async(2 * MIB, stream=16)
    assert result == 0
    assert memory.free_async(pointer, stream=16) == 0
    assert memory.alloc_async(2 * MIB, stream=32)[0] == OUT_OF_MEMORY, "another stream is in no order with it"
    assert memory.alloc_async(2 * MIB, stream=16) == (0, pointer)
    exact(memory)
    assert memory.free_async(pointer, stream=32) == 0
    assert memory.free_async(pointer, stream=32) == INVALID_VALUE
    assert memory.alloc_async(2 * MIB, stream=16)[0] == OUT_OF_MEMORY
    memory.c.fake_set_events_done(True)
    assert memory.alloc_async(MIB, stream=16)[0] == 0
    exact(memory)


def test_freed_memory_is_not_hoarded(fresh: Callable[[int], Memory]) -> None:
    """Broken: what was freed in stream order stays with a client that never needs it again."""
    memory = fresh(MANAGED)
    pointers = [memory.alloc_async(10 * MIB)[1] for _ in range(10)]
    for pointer in pointers:
        assert memory.free_async(pointer) == 0
    assert memory.held() == 100 * MIB
    assert memory.alloc(MIB)[0] == 0
    assert memory.held() == MIB
    exact(memory)
    result, pointer = memory.alloc_async(10 * MIB)
    assert result == 0
    assert memory.free_async(pointer) == 0
    assert memory.move(True, 5 * MIB) == (0, 10 * MIB)
    assert memory.held() == memory.usage().resident == MIB, "who must make room gives up first what nobody uses"
    exact(memory)


def test_shared_and_host_pools_stay_the_drivers(fresh: Callable[[int], Memory]) -> None:
    """Broken: memory from a pool that other processes open is replaced by memory that they cannot open, or host memory
    is charged to the GPU."""
    memory = fresh(MANAGED)
    plain, shared, host = memory.pool(), memory.pool(handle_types=1), memory.pool(location_type=2)
    assert memory.alloc_from(plain, MIB)[0] == 0
    assert (memory.usage().allocated, memory.usage().pinned) == (MIB, 0)
    result, pointer = memory.alloc_from(shared, 2 * MIB)
    assert result == 0
    assert (memory.usage().allocated, memory.usage().pinned) == (3 * MIB, 2 * MIB)
    assert memory.alloc_from(host, 4 * MIB)[0] == 0
    assert memory.usage().allocated == 3 * MIB
    memory.c.fake_set_current_pool(ctypes.c_uint64(shared))
    assert memory.alloc_async(MIB)[0] == 0
    assert memory.usage().pinned == 3 * MIB, "also as the device's current pool"
    assert memory.free_async(pointer) == 0
    assert memory.usage().pinned == MIB
    assert memory.c.cuMemPoolDestroy(ctypes.c_uint64(shared)) == 0
    assert memory.alloc_async(MIB)[0] == 0
    assert memory.usage().pinned == MIB, "a handle that is used again is judged anew"


def test_vmm_memory_is_charged_until_the_driver_gives_it_up(fresh: Callable[[int], Memory]) -> None:
    """Broken: JAX's or PyTorch's own VMM memory escapes the quota, or stays charged for ever."""
    memory = fresh(MANAGED)
    base = 0x10_0000_0000
    result, handle = memory.create(20 * MIB)
    assert result == 0
    assert memory.map(base, 20 * MIB, handle) == 0
    assert memory.map(base + 20 * MIB, 20 * MIB, handle) == 0
    assert memory.release(handle) == 0
    assert memory.usage().pinned == memory.held() == 20 * MIB, "mapped memory outlives its handle"
    assert memory.release(handle) == INVALID_VALUE
    assert memory.retain(base) == (0, handle)
    assert memory.unmap(base, 40 * MIB) == 0
    assert memory.usage().allocated == memory.held() == 20 * MIB, "a retained handle outlives its mappings"
    assert memory.release(handle) == 0
    exact(memory)
    assert memory.usage().allocated == 0
    assert memory.create(MIB, location_type=3)[0] == 0
    assert memory.usage().allocated == 0, "host memory is no concern of the quota"


def test_a_context_takes_its_memory_with_it(fresh: Callable[[int], Memory]) -> None:
    """Broken: after cuCtxDestroy or a primary reset the quota stays charged with memory that is gone."""
    memory = fresh(MANAGED)
    assert memory.alloc(MIB)[0] == 0
    memory.context(0x200)
    assert memory.alloc(2 * MIB)[0] == 0
    assert memory.array(64, 64)[0] == 0
    result, pointer = memory.alloc_async(MIB)
    assert result == 0
    memory.c.fake_set_events_done(False)
    assert memory.free_async(pointer) == 0
    assert memory.create(MIB)[0] == 0
    memory.context(0x100)
    memory.destroy_context(0x200)
    exact(memory)
    assert memory.usage().allocated == 2 * MIB, "the other context's memory and the VMM handle stay"
    assert not memory.reap()
    assert memory.free(pointer) == INVALID_VALUE


def test_redirected_memory_looks_like_device_memory(fresh: Callable[[int], Memory]) -> None:
    """Broken: a framework sees managed memory where it asked for device memory, and takes another path."""
    memory = fresh(MANAGED)
    is_managed, memory_type, host_pointer = 8, 2, 4
    result, pointer = memory.alloc(MIB)
    assert result == 0
    value = ctypes.c_uint(77)

    def ask(attribute: int, at: int) -> int:
        return int(memory.c.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(at)))

    assert (ask(is_managed, pointer + 5), value.value) == (0, 0)
    assert (ask(memory_type, pointer), value.value) == (0, 2)
    assert ask(host_pointer, pointer) == INVALID_VALUE
    result, own = memory.alloc_managed(MIB)
    assert result == 0
    assert (ask(is_managed, own), value.value) == (0, 1), "the application's own managed memory stays what it is"
    result, pointer, pitch = memory.alloc_pitch(1000, 16)
    assert (result, pitch) == (0, 1024)
    assert (ask(is_managed, pointer + 1024 * 15), value.value) == (0, 0)
    exact(memory)


def scenario(memory: Memory) -> None:
    """Every kind of memory, there and back; goes on whatever fails."""
    base = 0x20_0000_0000
    pointers = [memory.alloc(3 * MIB)[1], memory.alloc_managed(5 * MIB + 1)[1], memory.alloc_pitch(100, 100)[1]]
    ordered = [memory.alloc_async(MIB)[1], memory.alloc_async(7 * MIB)[1]]
    array = memory.array(100, 10)[1]
    handle = memory.create(2 * MIB)[1]
    memory.map(base, 2 * MIB, handle)
    memory.retain(base)
    memory.move(True, 6 * MIB)
    memory.move(False, 100 * MIB)
    memory.free_async(ordered[0])
    memory.release(handle)
    memory.unmap(base, 2 * MIB)
    memory.info()
    memory.free(pointers[0])
    memory.array_destroy(array)
    memory.alloc(MIB)


@pytest.mark.parametrize("mode", [DEVICE, MANAGED])
def test_any_failing_inner_call_leaves_the_accounting_exact(fresh: Callable[[int], Memory], mode: int) -> None:
    """Broken: a driver error leaks quota, or gives back quota for memory that is still there."""
    memory = fresh(mode)
    memory.fail(0)
    scenario(memory)
    exact(memory)
    calls = memory.calls()
    assert calls > 15
    for number in range(1, calls + 1):
        memory = fresh(mode)
        memory.fail(number, OUT_OF_MEMORY if number % 2 else 999)
        scenario(memory)
        usage, held = memory.usage(), memory.held()
        assert usage.allocated == held, f"inner call {number} of {calls} failed"
        assert usage.resident + usage.host == usage.allocated


OPERATION = st.one_of(
    st.tuples(st.sampled_from(["alloc", "managed", "async", "create"]), st.integers(1, 4 * MIB)),
    st.tuples(st.sampled_from(["free", "free_async", "again"]), st.integers(0, 50)),
    st.tuples(st.sampled_from(["evict", "restore"]), st.integers(1, 16 * MIB)),
    st.tuples(st.just("done"), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATION, max_size=60), mode=st.sampled_from([DEVICE, MANAGED]))
def test_any_sequence_keeps_the_accounting_exact(
    memory_library: Path, tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]], mode: int
) -> None:
    """Broken: some interleaving of allocations, frees and moves makes the figures drift."""
    copy = tmp_path_factory.mktemp("sequence") / "memory.so"
    shutil.copy(memory_library, copy)
    memory = Memory(copy, mode)
    memory.limits(limit=32 * MIB)
    pointers: list[int] = []
    handles: list[int] = []
    for name, number in operations:
        if name in {"alloc", "managed", "async"}:
            call = {"alloc": memory.alloc, "managed": memory.alloc_managed, "async": memory.alloc_async}[name]
            result, pointer = call(number)
            assert result in {0, OUT_OF_MEMORY}
            pointers += [pointer] if result == 0 else []
        elif name == "create":
            result, handle = memory.create(number)
            handles += [handle] if result == 0 else []
        elif name in {"free", "free_async"} and pointers:
            pointer = pointers.pop(number % len(pointers))
            assert (memory.free if name == "free" else memory.free_async)(pointer) == 0
        elif name == "again" and handles:
            assert memory.release(handles.pop(number % len(handles))) == 0
        elif name in {"evict", "restore"}:
            assert memory.move(name == "evict", number)[0] == 0
        elif name == "done":
            memory.c.fake_set_events_done(bool(number))
        exact(memory)
        assert memory.usage().allocated <= 32 * MIB
    memory.c.fake_set_events_done(True)
    for pointer in pointers:
        assert memory.free(pointer) == 0
    for handle in handles:
        assert memory.release(handle) == 0
    memory.reap()
    usage = memory.usage()
    assert (usage.allocated, usage.resident, usage.pinned, usage.host, memory.held()) == (0, 0, 0, 0, 0)
