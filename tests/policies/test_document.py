"""The policies' documents: the example is a whole policy that works, and the table is true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvshare.coordinator.simulation.harness import Harness
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import ClientView, GpuView, Policy
from nvshare.scheduler_policies.fair_share import FairShare
from nvshare.scheduler_policies.priority import Priority
from nvshare.scheduler_policies.round_robin import RoundRobin

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLE = (DOCS / "reference" / "policies.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", (DOCS / "how-to" / "write-a-policy.md").read_text(), re.DOTALL)


def run_examples() -> dict[str, Any]:
    """The document's Python, top to bottom; it ends with worlds in which every invariant is checked."""
    assert len(EXAMPLES) == 2
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        exec(example, names)
    return names


def test_the_example_schedules_as_it_says() -> None:
    """Broken: people would copy a policy that does not work."""
    names = run_examples()
    made: list[Policy] = []

    def make(name: str, uuid: str) -> Policy:
        if name != "fair_by_priority":
            return registry.create(name, uuid)
        made.append(names["FairByPriority"]())
        return made[-1]

    harness = Harness(make, policy="fair_by_priority")
    harness.gpu()
    light = harness.client(wanted=True, priority=0)
    heavy = harness.client(wanted=True, priority=2)
    for _ in range(80):
        (holder,) = harness.gpu_snapshot().leases.holders
        harness.until(lambda h=holder: harness.clients[h].seat().phase == "revoking")  # type: ignore[misc]
        harness.clients[holder].release(wanted=True)
    assert harness.gpu_snapshot().rules.policy_failures == 0
    assert 2.8 <= heavy.seat().statistics.used_ns / light.seat().statistics.used_ns <= 3.2
    light.die()
    assert light.client not in made[0].start  # type: ignore[attr-defined]


def test_the_table_of_policies_is_true() -> None:
    """Broken: the document would name policies or bounds that are not so."""
    gpu = GpuView("GPU-0", 0, 1, True)
    for name in registry.BUILT_IN:
        assert f"| `{name}`" in TABLE
    for clients in (1, 2, 10):
        assert RoundRobin().wait_bound_ns(clients, gpu) == clients - 1
        assert Priority().wait_bound_ns(clients, gpu) == 20 + 21 * clients
    policy = FairShare()
    views = [ClientView(n, "", 0, 0, 1, None, None, 0, 0, 0, 0, 0, weight=n) for n in (1, 2, 4)]
    policy.choose(views, gpu, 1)
    assert policy.wait_bound_ns(3, replace(gpu, quantum_ns=10)) == 10 * (3 - 1) * (1 + 5.5 * 4)
