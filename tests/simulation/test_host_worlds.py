"""Host memory that several users compete for, and processes that stop: seeded worlds with every check on.

The rule by which shares grow is checked by invariants.py, that everybody is served in the end by the world.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.bench.virtual_node.world import Plan, core_settings
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.scheduler_policies.registry import BUILT_IN
from tests.harness import SEEDS, live

PLAN = Plan(memory_bytes=600, swap_share=1.0, users=3, duration_ns=6 * SECOND_NS)
core = partial(core_settings, drain_deadline_ns=SECOND_NS)


@settings(max_examples=6 * SEEDS, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(BUILT_IN)),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([400, 1_500, 4_000]),
    st.builds(
        Plan,
        gpus=st.integers(1, 3),
        processes=st.integers(2, 9),
        users=st.integers(1, 4),
        memory_bytes=st.sampled_from([300, 600, 900]),
        duration_ns=st.just(4 * SECOND_NS),
        swap_share=st.sampled_from([0.6, 1.0]),
        stop_chance=st.sampled_from([0.0, 0.02]),
        hang_chance=st.sampled_from([0.0, 0.05]),
        death_chance=st.sampled_from([0.0, 0.05]),
        drop_chance=st.sampled_from([0.0, 0.05]),
        crash_every_ns=st.sampled_from([0, 2 * SECOND_NS]),
        admin_every_ns=st.sampled_from([0, 100 * MILLISECOND_NS]),
    ),
)
def test_any_world_with_little_host_memory(seed: int, policy: str, times: int, budget: int, plan: Plan) -> None:
    """Broken: shares beyond the rule or forgotten, or somebody whose memory cannot move though it was admitted."""
    live(seed, plan, core(policy=policy, host_fair_times=times, host_budget_bytes=budget))


def test_users_are_refused_in_these_worlds() -> None:
    """Broken: the worlds above have so much host memory that they show nothing."""
    assert all(live(seed, PLAN, core(host_budget_bytes=2_000)).checks.host_refused > 5 for seed in range(3))


def test_while_nothing_changes_nothing_is_tried_again_and_again() -> None:
    """Broken: beside a process that was stopped, those who lack its room are granted and refused all the time."""
    plan = replace(PLAN, gpus=1, processes=5, memory_bytes=900, stop_chance=0.2)
    worlds = [live(seed, plan, core(host_budget_bytes=9_000)) for seed in range(10 * SEEDS)]
    assert sum(world.checks.unschedulable for world in worlds) > 3, "some were refused room, and had to wait"
    most = max(world.checks.refused_in_calm for world in worlds)
    assert most <= 15 * plan.processes, "in the 30 s for which processes stop"
