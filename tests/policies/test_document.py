"""The policies' documents: the example is a whole policy that works, and the tables are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import JobView, Rank, State, Turn, TurnEnded
from nvshare.scheduler_policies.fair_share import FairShare
from nvshare.scheduler_policies.priority import Priority
from nvshare.scheduler_policies.round_robin import RoundRobin
from tests.policies.virtual_gpu import GPU, SECOND, VirtualGpu

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "policies.md").read_text()
EXPLANATION = (ROOT / "docs" / "explanation" / "policies.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "write-a-policy.md").read_text(), re.DOTALL)[0]


def test_the_example_schedules_as_it_says() -> None:
    """Broken: people would copy a policy that does not work."""
    names: dict[str, Any] = {}
    exec(EXAMPLE, names)
    world = VirtualGpu(names["FairByPriority"]())
    light, heavy = world.job(priority=0), world.job(priority=2)
    world.play(8_000)
    assert world.used_ns(heavy) / world.used_ns(light) == pytest.approx(3.0, rel=0.1)
    world.leave(light)
    assert light.client not in world.policy.served  # type: ignore[attr-defined]


def test_the_tables_of_policies_are_true() -> None:
    """Broken: the documents would name policies or bounds that are not so."""
    for name in registry.BUILT_IN:
        assert f"| `{name}`" in REFERENCE
        assert f"## `{name}`" in EXPLANATION
    for clients in (1, 2, 10):
        robin = RoundRobin()
        for client in range(clients):
            robin.observe(TurnEnded(JobView(client, "", State.WAITING, Turn(client, 0)), 1))
        assert robin.wait_bound_ns(clients, GPU) == (clients - 1) * GPU.quantum_ns
        assert Priority().wait_bound_ns(clients, GPU) == 60 * SECOND + clients * GPU.quantum_ns
    fair = FairShare()
    for weight in (1, 2, 4):
        job = JobView(weight, "", State.WAITING, Turn(weight, 0, used_ns=GPU.quantum_ns), Rank(weight=weight))
        fair.observe(TurnEnded(job, SECOND))
    assert fair.wait_bound_ns(3, GPU) == GPU.quantum_ns * (3 - 1) * (1 + 5.5 * 4)
