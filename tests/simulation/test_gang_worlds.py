"""Gain of gangs, and turns of the others beside them: seeded worlds, every invariant after every event.

The same worlds with gangs that nobody tells the core of are the comparison.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.bench.virtual_node.world import Plan, core_settings
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Sharing
from nvshare.scheduler_policies.registry import BUILT_IN
from tests.harness import SEEDS, live

PLAN = Plan(gpus=3, processes=12, gangs=2, duration_ns=6 * SECOND_NS)


def share_together(plan: Plan, policy: str) -> float:
    """Share of the time in which a member worked and another one worked or waited on another GPU."""
    together = apart = 0
    for seed in range(SEEDS):
        world = live(seed, plan, core_settings(check_invariants=False, policy=policy, drain_deadline_ns=SECOND_NS))
        together += world.checks.together_ns
        apart += world.checks.apart_ns
    return together / (together + apart)


@pytest.mark.parametrize("policy", ["fair_share", "round_robin"])
def test_members_work_at_the_same_time(policy: str) -> None:
    """Broken: members would compute while others of their gang wait.  79 to 84 % of the time here, 36 % by chance."""
    assert share_together(PLAN, policy) > 0.7
    assert share_together(replace(PLAN, gangs_are_told=False), policy) < 0.5


@settings(max_examples=3 * SEEDS, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(BUILT_IN)),
    st.sampled_from([None, 20 * MILLISECOND_NS, 100 * MILLISECOND_NS]),
    st.builds(
        Plan,
        gpus=st.integers(2, 4),
        processes=st.integers(3, 12),
        gangs=st.integers(1, 4),
        duration_ns=st.just(4 * SECOND_NS),
        memory_bytes=st.sampled_from([0, 600]),
        swap_share=st.sampled_from([0.5, 1.0]),
        hang_chance=st.sampled_from([0.0, 0.05]),
        death_chance=st.sampled_from([0.0, 0.05]),
        drop_chance=st.sampled_from([0.0, 0.02]),
        crash_every_ns=st.sampled_from([0, 2 * SECOND_NS]),
        admin_every_ns=st.sampled_from([0, 100 * MILLISECOND_NS]),
    ),
)
def test_any_world_with_gangs(seed: int, policy: str, quantum_ns: int | None, plan: Plan) -> None:
    """Broken: a gang could lock others or itself out, keep a GPU for nobody, or put two holders on one."""
    live(
        seed,
        plan,
        core_settings(check_invariants=False, policy=policy, quantum_ns=quantum_ns, drain_deadline_ns=SECOND_NS),
    )


STOPS = replace(PLAN, processes=4, memory_bytes=600, swap_share=1.0, stop_chance=0.1, duration_ns=2 * SECOND_NS)
CRASHES = replace(STOPS, gangs=3, stop_chance=0.0, crash_every_ns=SECOND_NS)


@pytest.mark.parametrize(
    ("seed", "plan", "quantum_ns", "sharing"),
    [
        (3, STOPS, 2 * MILLISECOND_NS, Sharing.EXCLUSIVE),  # switches that would cost too much
        (31, STOPS, 2 * MILLISECOND_NS, Sharing.EXCLUSIVE),  # moves on another GPU
        (1066082176735, CRASHES, 20 * MILLISECOND_NS, Sharing.CONCURRENT),  # recovery of another GPU
    ],
)
def test_what_a_wait_does_not_count(seed: int, plan: Plan, quantum_ns: int, sharing: Sharing) -> None:
    """Broken: the check of waits would count time in which a gang cannot have its GPUs."""
    live(seed, plan, core_settings(quantum_ns=quantum_ns, sharing=sharing, drain_deadline_ns=50 * MILLISECOND_NS))
