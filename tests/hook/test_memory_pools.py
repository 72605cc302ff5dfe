"""The driver's stream-ordered pools: the book of what they gave out, by itself and beside the registry."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hook.compiled import PROGRAMS, SOURCE, compile_c
from tests.hook.memory_library import DEVICE, INVALID_VALUE, MIB, OUT_OF_MEMORY, Memory
from tests.hook.test_memory_accounting import exact

BUCKET_BITS, PLACES = 13, 2
"""Of pool_book.h."""


def crowd(count: int) -> list[int]:
    """So many addresses of one bucket."""
    found: dict[int, list[int]] = {}
    for address in range(0x7000_0000_0000, 0x7800_0000_0000, 2 * MIB):
        bucket = (address * 0x9E37_79B9_7F4A_7C15) % 2**64 >> 64 - BUCKET_BITS
        found.setdefault(bucket, []).append(address)
        if len(found[bucket]) == count:
            return found[bucket]
    raise AssertionError("no such bucket")


def allocate_at(memory: Memory, addresses: list[int]) -> None:
    """One MiB at each of them."""
    for address in addresses:
        memory.c.fake_set_next_key(ctypes.c_uint64(address))
        assert memory.alloc_async(MIB) == (0, address)


@pytest.mark.parametrize("in_order", [True, False])
def test_more_than_the_book_has_places_for(fresh: Callable[[int], Memory], in_order: bool) -> None:
    """Broken: allocations that share a place in the table are forgotten, charged twice or never given back."""
    memory = fresh(DEVICE)
    addresses = crowd(PLACES + 3)
    allocate_at(memory, addresses)
    exact(memory)
    assert memory.usage().pinned == memory.usage().allocated == len(addresses) * MIB
    for number, address in enumerate(addresses if in_order else reversed(addresses), 1):
        assert (memory.free_async if number % 2 else memory.free)(address) == 0
        exact(memory)
        assert memory.free_async(address) == INVALID_VALUE, "freed twice"
        assert memory.usage().allocated == (len(addresses) - number) * MIB
    assert memory.usage().pinned == 0


def test_memory_that_went_behind_our_back_is_not_charged_twice(fresh: Callable[[int], Memory]) -> None:
    """Broken: after memory ended in a way that nobody saw, its quota is lost for good."""
    memory = fresh(DEVICE)
    (address,) = crowd(1)
    allocate_at(memory, [address])
    memory.c.fake_forget(ctypes.c_uint64(address))
    allocate_at(memory, [address])
    exact(memory)
    assert memory.usage().allocated == MIB


def test_a_refused_free_changes_nothing(fresh: Callable[[int], Memory]) -> None:
    """Broken: memory that the driver keeps is not counted any more."""
    memory = fresh(DEVICE)
    addresses = crowd(PLACES + 1)
    allocate_at(memory, addresses)
    for address in addresses:
        for free in (memory.free_async, memory.free):
            memory.fail(1, 999)
            assert free(address) == 999
            exact(memory)
    assert [memory.free_async(address) for address in addresses] == [0, 0, 0]
    assert memory.usage().allocated == 0


def test_a_context_takes_its_pooled_memory_with_it(fresh: Callable[[int], Memory]) -> None:
    """Broken: after a device reset the quota stays charged with what pools had given out."""
    memory = fresh(DEVICE)
    memory.limits(limit=8 * MIB)
    assert memory.alloc_async(MIB)[0] == 0
    memory.context(0x200)
    for _ in range(7):
        assert memory.alloc_async(MIB)[0] == 0
    assert memory.alloc_async(1)[0] == OUT_OF_MEMORY
    memory.context(0x100)
    memory.destroy_context(0x200)
    exact(memory)
    assert memory.usage().allocated == memory.usage().pinned == MIB
    assert memory.alloc_async(7 * MIB)[0] == 0


def test_the_short_way_ends_where_it_must(fresh: Callable[[int], Memory]) -> None:
    """Broken: each allocation asks whose context is current; or one that goes without asking passes a limit, or takes
    memory of the host for the GPU's."""
    memory = fresh(DEVICE)

    def allocate() -> tuple[int, int]:
        """What the driver said, and how many more may go the short way."""
        return memory.alloc_async(MIB)[0], memory.c.fake_short_left()

    assert [allocate() for _ in range(6)] == [(0, 3), (0, 2), (0, 1), (0, 0), (0, 3), (0, 2)]
    memory.limits(limit=7 * MIB)
    assert [allocate() for _ in range(2)] == [(0, 1), (OUT_OF_MEMORY, 1)]
    memory.limits(reserve=True)
    memory.c.nvs_memory_set_reserved(0, ctypes.c_uint64(8 * MIB))
    assert allocate() == (0, 0)
    assert memory.reserves_asked() == []
    assert allocate() == (0, 3)
    assert len(memory.reserves_asked()) == 1, "beyond what is reserved there is a question"
    memory.limits()
    memory.c.fake_set_capturing(ctypes.c_bool(True))
    assert allocate() == (0, 3), "it is the graph's"
    memory.c.fake_set_capturing(ctypes.c_bool(False))
    memory.fail(1, 999)
    assert allocate() == (999, 2)
    exact(memory)
    charged = memory.usage().allocated
    host = memory.pool(location_type=2)
    assert memory.alloc_from(host, MIB)[0] == 0
    assert memory.usage().allocated == charged
    assert [allocate() for _ in range(3)] == [(0, 3)] * 3, "from then on each pool is looked at"


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_each_entry_has_one_owner(tmp_path: Path, sanitizer: str) -> None:
    """Broken: two threads that free one address both give its quota back, or a context's end overlooks it."""
    program = compile_c(
        tmp_path / "book",
        PROGRAMS / "pool_book_check.c",
        SOURCE / "memory/records/pool_book.c",
        flags=(f"-fsanitize={sanitizer}",),
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "sound\n"), done.stdout + done.stderr
