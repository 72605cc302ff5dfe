"""The scenes of test_swap_orders.py with hook and simulated GPU under sanitizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.test_sanitized import complaints, under_sanitizer
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.swap import test_swap_orders as orders
from tests.hook.swap.test_swap_orders import environment

__all__ = ["environment"]
pytestmark = pytest.mark.sanitizer
Scene = Callable[[ScriptedCoordinator, dict[str, str], Path], None]
SCENES: tuple[Scene, ...] = (
    orders.test_credit_lets_it_go_on_to_the_end,
    orders.test_another_order_ends_the_waiting,
    orders.test_a_lost_coordinator_ends_it,
    orders.test_a_context_may_end_meanwhile,
    orders.test_memory_may_be_freed_meanwhile,
    orders.test_forks_and_exits_meanwhile,
    orders.test_a_lost_device_ends_every_order,
    orders.test_host_memory_is_asked_for_in_steps,
)

FORKING = frozenset({orders.test_forks_and_exits_meanwhile})
"""Not under ThreadSanitizer: it ends a child whose first thread gets the pthread_t of one that the parent has."""


@pytest.mark.parametrize(
    ("kind", "scene"),
    [
        *(("address,undefined", scene) for scene in SCENES),
        *(("thread", scene) for scene in SCENES if scene not in FORKING),
    ],
)
def test_orders_under_sanitizers(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path, kind: str, scene: Scene
) -> None:
    """Broken: a race or a use after free between agent, movers, the stages of a move and the program's threads."""
    scene(coordinator, under_sanitizer(environment, kind, tmp_path), tmp_path)
    assert complaints(tmp_path) == []
