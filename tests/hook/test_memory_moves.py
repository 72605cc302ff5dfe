"""Evicting and restoring managed memory: what is asked of the driver, in which pieces, and what is remembered."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hook.memory_library import DEVICE, MANAGED, MIB, Memory, compile_c, memory_sources

OK, CUDA_FAILED = 0, 6
PIECE = 64 * MIB


def cover(moves: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """The moved ranges, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, size, _ in sorted(moves):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], start + size)
        else:
            assert not joined or joined[-1][1] < start, "no byte is moved twice"
            joined.append((start, start + size))
    return joined


def test_all_goes_out_and_comes_back(fresh: Callable[[int], Memory]) -> None:
    """Broken: bytes are forgotten, moved twice, or the figures do not follow."""
    memory = fresh(MANAGED)
    sizes = [3 * MIB + 5, 200 * MIB, 70 * MIB, 4096]
    pointers = [memory.alloc(size)[1] for size in sizes]
    charged = memory.usage().allocated
    whole = sorted((pointer, pointer + size) for pointer, size in zip(pointers, sizes, strict=True))
    assert memory.move(True, 2**60) == (OK, charged)
    moves = memory.prefetches()
    assert all(out for _, _, out in moves)
    assert all(size <= PIECE for _, size, _ in moves)
    assert cover(moves) == whole
    usage = memory.usage()
    assert (usage.resident, usage.host, usage.allocated) == (0, charged, charged)
    assert memory.move(True, MIB) == (OK, 0), "nothing is left to move"
    assert memory.move(False, 2**60) == (OK, charged)
    moves = memory.prefetches()
    assert not any(out for _, _, out in moves)
    assert cover(moves) == whole
    assert memory.usage().resident == charged


def test_no_more_is_moved_than_asked(fresh: Callable[[int], Memory]) -> None:
    """Broken: a small overflow moves a whole working set."""
    memory = fresh(MANAGED)
    big = memory.alloc(200 * MIB)[1]
    small = memory.alloc(10 * MIB)[1]
    assert memory.move(True, 30 * MIB) == (OK, 30 * MIB)
    assert cover(memory.prefetches()) == [(big, big + 30 * MIB)], "the largest, and only a part of it"
    assert memory.move(True, 171 * MIB) == (OK, 172 * MIB), "at least what was asked for, in pages of 2 MiB"
    assert cover(memory.prefetches()) == [(big + 30 * MIB, big + 200 * MIB), (small, small + 2 * MIB)]
    assert memory.usage().host == 202 * MIB
    assert memory.move(False, 50 * MIB + 1) == (OK, 50 * MIB + 1), "up to what was asked for"
    assert cover(memory.prefetches()) == [(big + 150 * MIB - 1, big + 200 * MIB)]
    assert memory.usage().host == 152 * MIB - 1
    status, moved = memory.move(False, 2**60)
    assert (status, moved) == (OK, 152 * MIB - 1)
    assert memory.usage().host == 0


def test_a_free_takes_its_evicted_bytes_along(fresh: Callable[[int], Memory]) -> None:
    """Broken: evicted figures outlive the allocation, and `resident` goes wrong for ever."""
    memory = fresh(MANAGED)
    gone, stays = memory.alloc(64 * MIB)[1], memory.alloc(32 * MIB)[1]
    memory.move(True, 2**60)
    assert memory.free(gone) == 0
    usage = memory.usage()
    assert (usage.allocated, usage.resident, usage.host) == (32 * MIB, 0, 32 * MIB)
    assert memory.free(stays) == 0
    assert memory.usage().host == 0


def test_an_old_driver_is_asked_in_its_own_way(fresh: Callable[[int], Memory]) -> None:
    """Broken: before CUDA 12.2 a location is passed where a device number is expected."""
    memory = fresh(MANAGED)
    memory.c.fake_set_old_driver(True)
    pointer = memory.alloc(MIB)[1]
    assert memory.move(True, MIB) == (OK, MIB)
    assert memory.move(False, MIB) == (OK, MIB)
    assert memory.prefetches() == [(pointer, MIB, True), (pointer, MIB, False)]


def test_a_refusing_driver_is_reported(fresh: Callable[[int], Memory]) -> None:
    """Broken: bytes are claimed to be off the GPU that the driver has not moved."""
    memory = fresh(MANAGED)
    memory.alloc(10 * MIB)
    memory.fail(0)
    memory.move(True, 2**60)
    calls = memory.calls()
    memory.move(False, 2**60)
    seen = set()
    for number in range(1, calls + 1):
        memory.fail(number)
        status, moved = memory.move(True, 2**60)
        memory.fail(0)
        seen.add(status)
        assert (status == OK) == (moved == 10 * MIB) or moved == 0
        assert memory.usage().host == moved
        memory.move(False, 2**60)
        assert memory.usage().host == 0
    assert CUDA_FAILED in seen


def test_a_destroyed_context_is_survived(fresh: Callable[[int], Memory]) -> None:
    """Broken: an eviction stops, or crashes, because one of the contexts is gone."""
    memory = fresh(MANAGED)
    memory.alloc(10 * MIB)
    memory.context(0x200)
    memory.alloc(20 * MIB)
    memory.context(0x100)
    memory.move(True, 2**60)
    memory.destroy_context(0x200)
    memory.prefetches()
    assert memory.move(False, 2**60) == (OK, 10 * MIB)
    assert memory.usage().allocated == memory.usage().resident == 10 * MIB


def test_device_memory_stays(fresh: Callable[[int], Memory]) -> None:
    """Broken: `--memory device` claims that it can make room."""
    memory = fresh(DEVICE)
    memory.alloc(10 * MIB)
    memory.alloc_managed(6 * MIB)
    usage = memory.usage()
    assert usage.pinned == usage.resident == usage.allocated == 16 * MIB
    assert memory.move(True, 2**60) == (OK, 0)
    assert memory.prefetches() == []


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_many_threads(tmp_path: Path, sanitizer: str) -> None:
    """Broken: a race or a use after free between allocating threads and the mover, or bytes lost between them."""
    source = Path(__file__).parent / "c" / "memory_stress.c"
    options = (f"-fsanitize={sanitizer}", "-Wno-tsan", "-fno-omit-frame-pointer")
    program = compile_c(tmp_path / "stress", source, *memory_sources(), options=options)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact" in done.stdout
