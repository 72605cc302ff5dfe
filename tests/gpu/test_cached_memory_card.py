"""Memory that CuPy or PyTorch keeps unused on a real card: how much moves, with and without callback.

The capacity is 5 GiB; the programs have 5.5 GiB together, of which 2.5 GiB are cached.
"""

from __future__ import annotations

import importlib.util

import pytest

from nvshare.bench.harness.fixture import fixture
from tests.conftest import Built
from tests.end_to_end.memory.test_cached_memory import MIB, Sizes, moved_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_cached_memory_that_is_freed_does_not_move(built: Built, library: str) -> None:
    """Broken: a program that frees its caches under pressure makes the card move as much as before."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library} here")
    sizes = Sizes(kept=1024 * MIB, cached=2560 * MIB, rival=2048 * MIB)
    moved = {}
    for releases in (False, True):
        with fixture(simulate=None, more=["--capacity=5GiB"]) as stand:
            moved[releases], released = moved_bytes(stand, library, sizes, releases=releases)
            assert (released >= sizes.cached) is releases
    print(f"{library}: {moved[False] / MIB:.0f} MiB moved without the callback, {moved[True] / MIB:.0f} MiB with it")
    assert moved[False] > 0
    assert moved[True] == 0
