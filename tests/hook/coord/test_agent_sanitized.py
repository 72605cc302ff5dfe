"""Tests of the agent in which threads share memory, once more with hook and simulated GPU under sanitizers.

All are watched for races, those with losses and odd frames for errors of memory too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_sanitized import complaints, under_sanitizer
from tests.hook.coord.test_agent import (  # noqa: F401 - the tests
    test_all_work_lies_within_leases,
    test_bursts_lie_within_leases,
    test_exit_while_threads_wait,
    test_paced_work_and_captures,
    test_two_gpus,
)
from tests.hook.coord.test_agent_faults import (  # noqa: F401 - the tests
    test_holder_goes_on_and_claims,
    test_random_frames,
    test_reservation_is_asked_again_after_a_loss,
)

pytestmark = pytest.mark.sanitizer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The sanitizers of each test."""
    faults = metafunc.function.__module__.endswith("_faults")
    metafunc.parametrize("sanitizer", ["thread", "address,undefined"] if faults else ["thread"])


@pytest.fixture
def hook_env(sanitizer: str, hook_env: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Broken if anything is complained of: agent, transport, gate or pacing race, or touch freed memory."""
    environment = under_sanitizer(hook_env, sanitizer, tmp_path)
    environment["TSAN_OPTIONS"] += ":report_thread_leaks=0"  # exit() cuts the program's own threads short
    yield environment
    assert complaints(tmp_path) == []
