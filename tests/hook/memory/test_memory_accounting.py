"""Charged and moved memory of a program, to the byte: the hook over the simulated GPU.

Non-goals: calls of the driver that fail (test_fault_sweep.py); reservations (test_memory_process.py).
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from nvshare.simulated_gpu.trace import read_trace
from tests.conftest import Built
from tests.hook.compiled import SOURCE, compile_c
from tests.hook.memory.test_memory_process import (
    GIB,
    INVALID_VALUE,
    MIB,
    MODES,
    OUT_OF_MEMORY,
    Client,
    attached,
    reported,
    simulated,
    start,
    until,
)
from tests.hook.scripted import ScriptedCoordinator

PROGRAMS = Path(__file__).parent / "programs"

__all__ = ["simulated"]  # fixture
UNKNOWN = 999


@MODES
def test_a_limit_holds_to_the_byte(simulated: dict[str, str], mode: str) -> None:
    """Broken: a client exceeds its limit by one kind of memory, or by a sum that wraps, or cannot use all of it."""
    with start({**simulated, "NVSHARE_MEMORY": mode, "NVSHARE_MEMORY_LIMIT": "8MiB"}) as client:
        assert client.ask("start") == 0
        for size in (2**64 - 1, 2**64 - 511, 2**63):
            assert client.ask("alloc", size)[0] == OUT_OF_MEMORY
        held = [client.ask("async" if number % 2 else "alloc", MIB) for number in range(8)]
        assert [result for result, _ in held] == [0] * 8
        for kind in ("alloc", "async", "managed", "create"):
            assert client.ask(kind, 2 * MIB)[0] == OUT_OF_MEMORY
        assert client.ask("info")[1] == 0
        assert [client.ask("free", pointer) for _, pointer in held] == [0] * 8
        assert client.ask("synchronize") == 0
        assert client.ask("alloc", 8 * MIB)[0] == 0


@pytest.mark.parametrize(("mode", "free"), [("device", 14 * GIB), ("managed", 15 * GIB), ("swap", 15 * GIB)])
def test_the_virtual_card_is_consistent(
    coordinator: ScriptedCoordinator, simulated: dict[str, str], mode: str, free: int
) -> None:
    """Broken: cuMemGetInfo and cuDeviceTotalMem contradict each other or the limit, or promise what others have."""
    alone = {name: value for name, value in simulated.items() if name != "NVSHARE_SOCKET"}
    with start(alone) as other, start({**simulated, "NVSHARE_MEMORY": mode}) as client:
        assert other.ask("start") == other.ask("alloc", GIB)[0] == 0
        attached(client, coordinator, limit=4 * GIB, capacity_bytes=8 * GIB)
        assert client.ask("alloc", GIB)[0] == 0
        assert client.ask("info") == [0, 3 * GIB, 4 * GIB, 4 * GIB]
        coordinator.settings(capacity_bytes=8 * GIB)
        until(client, "info", [0, 7 * GIB, 8 * GIB, 8 * GIB])
        coordinator.settings(limit=64 * GIB)
        until(client, "info", [0, free, 16 * GIB, 16 * GIB])
        coordinator.settings(limit=MIB)
        until(client, "info", [0, 0, MIB, MIB])


@MODES
def test_what_the_driver_must_judge_reaches_it(simulated: dict[str, str], mode: str) -> None:
    """Broken: unknown pointers and double frees get another answer than the driver's, or change the figures."""
    with start({**simulated, "NVSHARE_MEMORY": mode, "NVSHARE_MEMORY_LIMIT": "1GiB"}) as client:
        assert client.ask("start") == 0
        result, pointer = client.ask("alloc", MIB)
        assert result == 0
        assert client.ask("free", 0x1234) == client.ask("free", pointer + 512) == INVALID_VALUE
        assert client.ask("info")[1] == GIB - MIB
        assert (client.ask("free", pointer), client.ask("free", pointer)) == (0, INVALID_VALUE)
        assert client.ask("info")[1] == GIB


def test_more_stream_ordered_allocations_than_places(simulated: dict[str, str]) -> None:
    """Broken: allocations that share a place in the book of pools are forgotten, charged twice or never given back."""
    with start({**simulated, "NVSHARE_MEMORY": "device", "NVSHARE_MEMORY_LIMIT": "1GiB"}) as client:
        assert client.ask("start") == 0
        pointers = [client.ask("async", 512)[1] for _ in range(3000)]
        assert client.ask("info")[1] == GIB - 3000 * 512
        for number, pointer in enumerate(pointers):
            assert client.ask("free" if number % 2 else "free_async", pointer) == 0
            assert client.ask("free_async", pointer) == INVALID_VALUE
        assert client.ask("info")[1] == GIB


def test_freed_memory_waits_for_its_stream(coordinator: ScriptedCoordinator, simulated: dict[str, str]) -> None:
    """Broken: memory that was freed in stream order is given back while work before the free still runs."""
    with start({**simulated, "NVSHARE_MEMORY": "managed"}) as client:
        attached(client, coordinator, limit=2 * MIB)
        coordinator.grant(1)
        result, pointer = client.ask("async", 2 * MIB)
        assert result == client.ask("busy", 300_000_000) == client.ask("free_async", pointer) == 0
        assert client.ask("alloc", 2 * MIB)[0] == 0, "which waits for the work"
        (kernel,) = (one for one in read_trace(Path(simulated["NVSHARE_SIM_STATE"])) if one.end_ns > one.start_ns)
        assert kernel.end_ns <= time.monotonic_ns()


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_short_lived_buffers_add_up_to_a_bound(simulated: dict[str, str], mode: str) -> None:
    """Broken: a program with much memory that frees short-lived buffers in stream order grows by them until they are
    as much again, with an event for each."""
    with start({**simulated, "NVSHARE_MEMORY": mode}) as client:
        assert client.ask("start") == client.ask("alloc", 8 * GIB)[0] == 0
        result, most = client.ask("short_lived", 2500)
        assert result == 0
        assert most < 10 * GIB, "1024 of up to 2 MiB"


def test_a_shared_pool_stays_the_drivers(coordinator: ScriptedCoordinator, simulated: dict[str, str]) -> None:
    """Broken: memory from a pool that other processes open is replaced by memory that they cannot open."""
    with start({**simulated, "NVSHARE_MEMORY": "managed"}) as client:
        attached(client, coordinator)
        coordinator.grant(1)
        for shared, pinned in ((0, 0), (1, 32 * MIB)):  # what a driver's pool reserves
            result, pool = client.ask("pool_make", shared)
            assert result == client.ask("pool_alloc", pool, 2 * MIB)[0] == 0
            report = reported(coordinator, resident=2 * MIB + pinned)
            assert report.pinned_bytes == pinned
        assert client.ask("pool_use", pool) == client.ask("pool_alloc_current", 31 * MIB)[0] == 0
        assert reported(coordinator, resident=66 * MIB).pinned_bytes == 64 * MIB, "also as the current pool"


def filled(client: Client, coordinator: ScriptedCoordinator, *sizes: int) -> list[int]:
    """Pointers of memory of a program that has given its lease back."""
    attached(client, coordinator)
    coordinator.grant(1)
    pointers = [client.ask("alloc", size)[1] for size in sizes]
    assert client.ask("held") == 0
    coordinator.revoke(1)
    return pointers


def test_no_more_is_moved_than_asked(coordinator: ScriptedCoordinator, simulated: dict[str, str]) -> None:
    """Broken: a small overflow moves a whole working set, or bytes of freed memory stay in the figures."""
    with start({**simulated, "NVSHARE_MEMORY": "managed"}) as client:
        big, _ = filled(client, coordinator, 200 * MIB, 10 * MIB)
        assert coordinator.evict(30 * MIB) == (30 * MIB, 0)
        assert coordinator.evict(171 * MIB) == (172 * MIB, 0), "whole pages"
        assert coordinator.state().host_bytes == 202 * MIB
        part = 50 * MIB + 1
        assert coordinator.restore(part) == (part, 0)
        assert client.ask("free", big) == 0
        assert reported(coordinator, resident=8 * MIB).allocated_bytes == 10 * MIB
        assert coordinator.restore(GIB) == (2 * MIB, 0)


def test_a_refusing_driver_is_reported(coordinator: ScriptedCoordinator, simulated: dict[str, str]) -> None:
    """Broken: bytes are claimed to be off the GPU that the driver has not moved."""
    faults = {"NVSHARE_SIM_FAULTS": "cuMemPrefetchAsync@1=719", "NVSHARE_MEMORY": "managed"}
    with start({**simulated, **faults}) as client:
        filled(client, coordinator, 10 * MIB)
        assert coordinator.evict(GIB) == (0, UNKNOWN)
        assert coordinator.state().host_bytes == 0
        assert coordinator.evict(GIB) == (10 * MIB, 0)


def test_a_driver_before_cuda_12_2_moves_memory(
    coordinator: ScriptedCoordinator, simulated: dict[str, str], built: Built, tmp_path: Path
) -> None:
    """Broken: a location is passed where that driver expects a device number."""
    older = tmp_path / "older"
    older.mkdir()
    driver = (built.sim_dir / "libcuda.so.1").read_bytes()
    (older / "libcuda.so.1").write_bytes(driver.replace(b"\0cuMemPrefetchAsync_v2", b"\0cuMemPrefetchAsync_vX"))
    with start({**simulated, "NVSHARE_MEMORY": "managed", "LD_LIBRARY_PATH": str(older)}) as client:
        (pointer,) = filled(client, coordinator, 10 * MIB)
        assert pointer != 0
        assert coordinator.evict(GIB) == (10 * MIB, 0)
        assert coordinator.restore(GIB) == (10 * MIB, 0)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_each_entry_of_the_book_of_pools_has_one_owner(tmp_path: Path, sanitizer: str) -> None:
    """Broken: two threads that free one address both give its quota back, or a context's end overlooks it."""
    sources = (PROGRAMS / "pool_book_check.c", SOURCE / "memory" / "pools.c")
    program = compile_c(tmp_path / "book", *sources, flags=(f"-fsanitize={sanitizer}",))
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "sound\n"), done.stdout + done.stderr
