"""Frameworks' own counters of the asynchronous pool on the card, under the hook and without it.

What the driver's calls say, step by step, is compared in tests/hook/memory/test_pool_figures.py, on the card too.
No program has more than 256 MiB.
"""

from __future__ import annotations

import importlib.util

import pytest

from nvshare.bench.harness.fixture import fixture
from tests.conftest import Built
from tests.end_to_end.memory.test_pool_counters import MODES, counters

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_counters_are_those_without_the_hook(built: Built, framework: str) -> None:
    """Broken: in a mode that moves memory a framework says that nothing is used, or its high marks never go down."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"no {framework} here")
    with fixture(simulate=None) as stand:
        wanted = counters(stand, framework, None)
        assert {mode: counters(stand, framework, mode) for mode in MODES} == dict.fromkeys(MODES, wanted)
