"""Strict priorities: preemption, turns within a priority, and nobody starves."""

from __future__ import annotations

from nvshare.scheduler_policies.parts.levels import PATIENCE_NS
from nvshare.scheduler_policies.priority import Priority
from tests.policies.virtual_gpu import GPU, SECOND, VirtualGpu


def test_a_higher_priority_preempts_at_once() -> None:
    """Broken: an urgent client would wait for a quantum of a batch job."""
    world = VirtualGpu(Priority())
    world.job(priority=0)
    world.play(1)
    high = world.job(priority=1)
    world.play(0)
    assert world.holder() is high


def test_the_same_or_a_lower_priority_does_not_preempt() -> None:
    """Broken: two clients could preempt each other in turn."""
    world = VirtualGpu(Priority())
    holder = world.job(priority=1)
    world.job(priority=1)
    world.job(priority=0)
    world.play(99)
    assert world.holder() is holder
    assert holder.leases == 1


def test_the_highest_priority_keeps_the_gpu_while_only_lower_ones_wait() -> None:
    """Broken: each quantum would end in a drain for nothing."""
    world = VirtualGpu(Priority())
    high = world.job(priority=5)
    world.job(priority=0)
    world.until(PATIENCE_NS - SECOND)
    assert (world.holder(), high.leases) == (high, 1)


def test_nobody_starves_and_the_highest_keeps_its_share() -> None:
    """Broken: a low priority would never run, or many low ones would take the GPU from the high one."""
    world = VirtualGpu(Priority())
    high = world.job(priority=5)
    lows = [world.job(priority=0) for _ in range(4)]
    world.until(4 * PATIENCE_NS)
    assert world.used_ns(high) / world.now_ns >= 0.98
    assert all(world.used_ns(low) for low in lows)


def test_the_turn_of_a_starved_job_is_not_preempted() -> None:
    """Broken: a job would get its turn through age and lose it in the same moment; long drains are no exception."""
    world = VirtualGpu(Priority())
    world.job(priority=5, drain_ns=250_000_000)
    low = world.job(priority=0)
    while world.holder() is not low:
        world.play(1)
    world.job(priority=9)
    world.play(98)
    assert world.holder() is low
    world.play(300)
    assert world.holder() is not low


def test_a_changed_priority_counts_at_once() -> None:
    """Broken: `set priority` would wait for the next decision."""
    world = VirtualGpu(Priority())
    world.job(priority=0)
    waiting = world.job(priority=0)
    world.play(1_000)
    holder = next(job for job in world.jobs.values() if job is not world.holder())
    world.change(holder, priority=1)
    world.play(0)
    assert world.holder() is holder
    assert waiting.leases


def test_the_lowest_runs_within_the_bound_under_full_load() -> None:
    """Broken: the bound would not hold for the one that needs it."""
    world = VirtualGpu(Priority())
    jobs = [world.job(priority=10 - number) for number in range(5)]
    world.until(4 * PATIENCE_NS)
    bound_ns = world.policy.wait_bound_ns(5, GPU)  # type: ignore[attr-defined]
    assert all(job.leases and job.max_wait_ns <= bound_ns for job in jobs)
    assert bound_ns < PATIENCE_NS + SECOND
