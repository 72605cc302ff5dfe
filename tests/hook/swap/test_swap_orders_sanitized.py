"""The scenes of test_swap_orders.py in which threads meet, with hook and simulated GPU under sanitizers.

All are watched for races, those in which memory goes away for its use afterwards too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_sanitized import complaints, under_sanitizer
from tests.hook.swap.test_swap_orders import (  # noqa: F401 - the tests
    test_a_context_may_end_meanwhile,
    test_a_lost_coordinator_ends_it,
    test_a_lost_device_ends_every_order,
    test_another_order_ends_the_waiting,
    test_credit_lets_it_go_on_to_the_end,
    test_credit_that_comes_late,
    test_host_memory_is_asked_for_in_steps,
    test_memory_may_be_freed_meanwhile,
    test_orders_that_cross,
)

pytestmark = pytest.mark.sanitizer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The sanitizers of each scene."""
    goes = metafunc.function in (test_a_context_may_end_meanwhile, test_memory_may_be_freed_meanwhile)
    metafunc.parametrize("sanitizer", ["thread", "address,undefined"] if goes else ["thread"])


@pytest.fixture
def environment(sanitizer: str, environment: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Broken: a race or a use after free between agent, movers, the stages of a move and the program's threads."""
    yield under_sanitizer(environment, sanitizer, tmp_path)
    assert complaints(tmp_path) == []
