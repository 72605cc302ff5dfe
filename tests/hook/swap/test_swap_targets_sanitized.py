"""The scenes of test_swap_targets.py in which threads meet, with hook and simulated GPU under sanitizers.

All are watched for races, those in which memory goes away for its use afterwards too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_sanitized import complaints, under_sanitizer
from tests.hook.swap.test_swap_targets import (  # noqa: F401 - the tests
    test_a_context_may_end_meanwhile,
    test_a_lost_coordinator_ends_it,
    test_a_lost_device_comes_to_rest,
    test_a_lower_target_ends_the_waiting,
    test_a_target_that_rises_late,
    test_host_memory_is_asked_for_in_steps,
    test_it_goes_on_to_the_end_as_the_target_rises,
    test_memory_may_be_freed_meanwhile,
    test_targets_that_cross,
    test_who_is_at_rest_brings_nothing_in,
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
