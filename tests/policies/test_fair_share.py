"""Time in proportion to weights, guarantees and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvshare.scheduler_policies.api import TurnEnded
from nvshare.scheduler_policies.fair_share import REST, SHORTEST_NS, FairShare
from nvshare.scheduler_policies.parts.fair_queue import DEBT
from tests.policies.virtual_gpu import GPU, MS, Job, VirtualGpu

QUANTUM_NS = GPU.quantum_ns


def gains(world: VirtualGpu, jobs: list[Job], milliseconds: float) -> list[int]:
    """GPU time of each over the next time."""
    before = [world.used_ns(job) for job in jobs]
    world.play(milliseconds)
    return [world.used_ns(job) - start for job, start in zip(jobs, before, strict=True)]


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 2, 5), (10, 1, 1, 1), (7, 7, 2)])
def test_time_follows_the_weights(weights: tuple[int, ...]) -> None:
    """Broken: a weight would mean something else than a part of the time."""
    world = VirtualGpu(FairShare())
    jobs = [world.job(weight=weight) for weight in weights]
    world.play(30_000)
    for job, weight in zip(jobs, weights, strict=True):
        assert world.used_ns(job) / world.now_ns == pytest.approx(weight / sum(weights), abs=0.02)


def test_equal_weights_take_turns_whatever_the_drains_take() -> None:
    """Broken: a job that drains faster would have two turns in a row."""
    world = VirtualGpu(FairShare())
    a, b = world.job(drain_ns=3 * MS), world.job(drain_ns=MS // 10)
    world.play(2_000)
    assert world.turns[:18] == [a.client, b.client] * 9


def test_long_drains_are_charged() -> None:
    """Broken: work that cannot be interrupted would be a way to more time than the others have."""
    world = VirtualGpu(FairShare())
    slow, quick = world.job(drain_ns=150 * MS), world.job()
    world.play(20_000)
    assert world.used_ns(slow) / world.used_ns(quick) == pytest.approx(1.0, rel=0.1)


def test_a_heavy_client_keeps_the_gpu_for_its_turns() -> None:
    """Broken: each quantum of its share would end in a drain and a switch for nothing."""
    world = VirtualGpu(FairShare())
    heavy, _ = world.job(weight=4), world.job()
    world.play(20_000)
    assert world.used_ns(heavy) / heavy.leases > 3 * QUANTUM_NS


def test_a_newcomer_cannot_claim_the_past() -> None:
    """Broken: a late job would have the GPU for as long as the others had it before."""
    world = VirtualGpu(FairShare())
    jobs = [world.job(), world.job()]
    world.play(5_000)
    had = gains(world, [*jobs, world.job()], 3_000)
    assert max(had) - min(had) <= 3 * QUANTUM_NS


def test_time_alone_is_hardly_charged() -> None:
    """Broken: a job that had the GPU to itself for an hour would then have to wait for an hour."""
    world = VirtualGpu(FairShare())
    alone = world.job()
    world.play(3_600_000)
    mine, its = gains(world, [alone, world.job()], 4_000)
    assert its - mine <= (DEBT + 1) * QUANTUM_NS


@pytest.mark.parametrize("owners", [("", ""), ("user 1", "user 2", "user 2")])
def test_who_returns_has_no_credit(owners: tuple[str, ...]) -> None:
    """Broken: a client that thought for a minute, or its user, would then have the GPU for a minute."""
    world = VirtualGpu(FairShare())
    away, *others = [world.job(owner=owner) for owner in owners]
    world.play(1_000)
    world.idle(away)
    world.play(60_000)
    world.want(away)
    mine, *theirs = gains(world, [away, *others], 4_000)
    assert abs(sum(theirs) - mine) <= DEBT * QUANTUM_NS


def test_newcomers_do_not_keep_the_others_waiting() -> None:
    """Broken: a stream of short programs would always come before a program that has had its turn."""
    world = VirtualGpu(FairShare())
    steady = world.job()
    for _ in range(5):
        world.job()
    for _ in range(100):
        holder = world.holder()
        world.play(100)
        if holder is not None and holder is not steady:
            world.leave(holder)
            world.job()
    assert world.used_ns(steady) / world.now_ns == pytest.approx(1 / 6, abs=0.04)


def test_a_slot_has_its_weight_and_a_user_has_one() -> None:
    """Broken: weights of pods mean nothing, or a user's programs of large weight leave another user nothing."""
    world = VirtualGpu(FairShare())
    slot = [world.job(owner="slot a", weight=3) for _ in range(3)]
    user = [world.job(owner="user 1", weight=weight) for weight in (1, 3)]
    world.play(40_000)
    shares = [sum(world.used_ns(job) for job in jobs) / world.now_ns for jobs in (slot, user)]
    assert shares[0] == pytest.approx(0.75, abs=0.02)
    assert world.used_ns(user[1]) / world.used_ns(user[0]) == pytest.approx(3.0, rel=0.1)


def test_a_changed_weight_counts_from_then_on() -> None:
    """Broken: `set weight` would do nothing, or charge the past again."""
    world = VirtualGpu(FairShare())
    a, b = world.job(), world.job()
    world.play(2_000)
    world.change(a, weight=3)
    mine, its = gains(world, [a, b], 20_000)
    assert mine / its == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("limits", [(0.3, 0.7), (0.3,), (0.2, 1.0), (0.5, 0.5, 1.0)])
def test_limits_hold_within_a_point(limits: tuple[float, ...]) -> None:
    """Broken: a job that is limited to 30 % gets 21 or 45, or a lone one gets all."""
    world = VirtualGpu(FairShare())
    jobs = [world.job(share_limit=limit, drain_ns=MS // 5) for limit in limits]
    world.play(10_000)
    equal = (1.0 - sum(limit for limit in limits if limit < 1 / len(limits))) / len(limits)
    for job, limit in zip(jobs, limits, strict=True):
        share = world.used_ns(job) / world.now_ns
        assert share <= limit + 0.01
        assert share >= min(limit, equal) - 0.02 if sum(limits) > 1.0 else share == pytest.approx(limit, abs=0.01)


def test_a_guarantee_holds_and_what_is_not_used_is_lent() -> None:
    """Broken: others crowd out a guaranteed job, its share stays idle with it, or comes back late."""
    world = VirtualGpu(FairShare())
    sure = world.job(share_request=0.6)
    others = [world.job() for _ in range(3)]
    assert gains(world, [sure], 10_000)[0] / 1e10 == pytest.approx(0.6, abs=0.02)
    world.idle(sure)
    idle_ns = world.idle_ns
    assert sum(gains(world, others, 5_000)) + world.idle_ns - idle_ns == 5_000 * MS
    assert world.idle_ns == idle_ns
    world.want(sure)
    world.play(101)
    assert world.holder() is sure


def test_requests_leave_the_others_something() -> None:
    """Broken: a request of 100 % keeps the others from the GPU, and then the engine replaces the policy."""
    world = VirtualGpu(FairShare())
    others = [world.job() for _ in range(2)]
    world.job(share_request=1.0), world.job(share_request=0.8)
    assert min(gains(world, others, 20_000)) >= 20_000 * MS // (2 * REST) - QUANTUM_NS


def test_a_small_limit_means_long_pauses() -> None:
    """Broken: a turn is shorter than a policy may give, and the engine replaces the policy for everybody."""
    world = VirtualGpu(FairShare(), replace(GPU, quantum_ns=20 * MS))
    limited, _ = world.job(share_limit=0.001), world.job()
    for _ in range(1_000):
        world.play(5)
        turns = [one.quantum_ns for one in world.plan.running if one.client == limited.client]
        assert all(turn is not None and turn >= SHORTEST_NS for turn in turns)
    assert limited.leases >= 2


def test_clients_that_left_are_forgotten() -> None:
    """Broken: the policy would grow with each client that ever was."""
    policy = FairShare()
    world = VirtualGpu(policy)
    for number in range(50):
        job = world.job(owner=f"user {number}")
        world.play(100)
        world.leave(job)
    last = world.job()
    world.play(1_000)
    world.leave(last)
    assert not policy._queue._owner_of
    assert not policy._limits._credit
    assert len(policy._queue._levels) <= 2 * DEBT


def test_the_lightest_runs_within_the_bound_under_full_load() -> None:
    """Broken: the bound would not hold for the one that needs it, or would be no bound worth stating."""
    world = VirtualGpu(FairShare())
    jobs = [world.job(weight=weight) for weight in (8, 8, 8, 1)]
    assert FairShare().wait_bound_ns(4, GPU) is None, "weights are not known yet"
    world.play(60_000)
    bound_ns = world.policy.wait_bound_ns(4, GPU)  # type: ignore[attr-defined]
    assert all(job.max_wait_ns <= bound_ns for job in jobs)
    assert bound_ns == 3 * (2 + 8 * (2 * DEBT + 3)) * QUANTUM_NS // 2


def test_a_gang_does_not_take_the_turns_of_its_owners_other_programs() -> None:
    """Broken: a user's second program waits for minutes, since the user's gang has the user's share in its slots."""
    policy = FairShare()
    world = VirtualGpu(policy)
    member, second, *others = [world.job(owner=owner) for owner in ("a", "a", "b", "c", "d")]
    world.play(1_000)
    world.idle(member)
    had = [world.used_ns(job) for job in (second, *others)]
    for _ in range(40):
        world.play(100)
        used_ns = member.view.turn.used_ns
        member.turn(used_ns=used_ns + QUANTUM_NS, charged_ns=used_ns)
        policy.observe(TurnEnded(member.view, world.now_ns, called=True))
    for job, before in zip((second, *others), had, strict=True):
        assert world.used_ns(job) - before >= 8 * QUANTUM_NS
