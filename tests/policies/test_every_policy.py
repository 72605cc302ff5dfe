"""Properties of every policy, in worlds of one GPU in virtual time.

`VirtualGpu` checks each plan: it names known jobs once, two calls agree, and it stays once it is carried out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvshare.coordinator.engine.planning import STARVED_NS
from nvshare.scheduler_policies.api import GpuView, JobClass, JobView, Memory, Rank, State, Turn
from nvshare.scheduler_policies.parts.turns import REMEMBERED, OwnerTurns
from nvshare.scheduler_policies.registry import BUILT_IN, create
from tests.policies.card import Card
from tests.policies.virtual_gpu import GPU, MS, SECOND, Job, VirtualGpu

POLICIES = sorted(BUILT_IN)
EXCLUSIVE = ["edf", "fair_share", "least_attained", "priority", "round_robin"]
RANKS = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 3),
        "weight": st.sampled_from([1, 1, 2, 5, 9]),
        "job_class": st.sampled_from(list(JobClass)),
        "deadline_ns": st.sampled_from([None, None, 2 * SECOND, 20 * SECOND]),
    }
)
SHARES = st.fixed_dictionaries(
    {"share_request": st.sampled_from([0.0, 0.0, 0.4]), "share_limit": st.sampled_from([1.0, 1.0, 0.5])}
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "leave", "idle", "want", "want", "rank", "pass"]),
        st.integers(0, 9),
        st.sampled_from(["", "a", "b", "slot c"]),
        RANKS,
        SHARES,
        st.sampled_from([0, 1, 30, 100, 250, 1000]),
    ),
    max_size=40,
)


def play(world: VirtualGpu, steps: list[tuple], shares: bool = True) -> int:  # type: ignore[type-arg]
    """Lets clients come, work, rest and go.  Returns the most clients at one time."""
    most = 0
    for act, which, owner, rank, share, pass_ms in steps:
        jobs = list(world.jobs.values())
        one: Job | None = jobs[which % len(jobs)] if jobs else None
        if one is None or act == "come":
            if len(jobs) < 8:
                ranks = rank | share if shares else rank
                new = (
                    world.program(0.7, owner=owner, **ranks)
                    if isinstance(world, Card)
                    else world.job(owner=owner, **ranks)
                )
                world.has(job=new, memory=Memory(10 * which))
        elif act == "leave":
            world.leave(one)
        elif act == "idle":
            world.idle(one)
        elif act == "want" and not one.wanted:
            world.want(one)
        elif act == "rank":
            world.change(one, **rank)
        most = max(most, len(world.jobs))
        world.play(pass_ms)
    return most


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["roomy", "short", "exclusive"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(steps=STEPS)
def test_plans_make_sense_and_stay(policy: str, kind: str, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    """Broken: the engine replaces the policy, or clients take the GPU from each other in turn."""
    gpu = replace(GPU, memory_short=kind == "short", exclusive=kind == "exclusive")
    play(Card(create(policy, ""), gpu), steps)


@pytest.mark.parametrize("policy", EXCLUSIVE)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(steps=STEPS, tail=st.integers(0, 8))
def test_the_stated_bounds_hold(policy: str, steps: list[tuple], tail: int) -> None:  # type: ignore[type-arg]
    """Broken: invariant 5, whoever comes and goes when."""
    world = VirtualGpu(create(policy, ""))
    most = play(world, steps, shares=False)
    bound_ns = world.policy.wait_bound_ns(most, world.gpu)  # type: ignore[attr-defined]
    world.play(0)
    assert bound_ns is None or all(job.max_wait_ns <= bound_ns for job in world.jobs.values())


@pytest.mark.parametrize("policy", ["edf", "least_attained", "priority"])
@pytest.mark.parametrize("quantum_ns", [100 * MS, 5 * SECOND, 3600 * SECOND])
def test_the_engine_keeps_the_policy(policy: str, quantum_ns: int) -> None:
    """Broken: the engine takes a policy that keeps to its bound for one that starves a job, and replaces it."""
    for clients in (2, 10, 1000):
        bound_ns = create(policy, "").wait_bound_ns(clients, replace(GPU, quantum_ns=quantum_ns))  # type: ignore[attr-defined]
        assert bound_ns <= STARVED_NS + 4 * clients * quantum_ns


@pytest.mark.parametrize("policy", EXCLUSIVE)
@pytest.mark.parametrize("busy", [True, False])
def test_the_gpu_works_while_somebody_waits(policy: str, busy: bool) -> None:
    """Broken: the GPU idles between turns, or a lone job is not named."""
    world = VirtualGpu(create(policy, ""))
    for _ in range(4 if busy else 1):
        world.job()
    world.play(5_000)
    assert world.idle_ns == 0


@pytest.mark.parametrize("policy", EXCLUSIVE)
def test_more_programs_give_a_user_no_more_time(policy: str) -> None:
    """Broken: a user takes the GPU from the others by starting more programs."""
    world = VirtualGpu(create(policy, ""))
    mine = world.job(owner="user 1")
    crowd = [world.job(owner="user 2") for _ in range(5)]
    world.play(6_000 if policy != "least_attained" else 12_000)
    assert world.used_ns(mine) / world.now_ns == pytest.approx(0.5, abs=0.05)
    turns = [job.leases for job in crowd]
    assert max(turns) - min(turns) <= 1, "and among them turns rotate"


@pytest.mark.parametrize("policy", ["auto", "edf", "fair_share"])
def test_time_under_an_earlier_policy_is_no_debt(policy: str) -> None:
    """Broken: after `set policy` or a move the program that has run for hours waits for its next turns."""

    def had_ns(past_ns: int) -> int:
        world = VirtualGpu(create(policy, ""), replace(GPU, exclusive=True))
        old = world.job(owner="a", wanted=False, job_class=JobClass.INTERACTIVE, deadline_ns=600 * SECOND)
        old.turn(used_ns=past_ns, charged_ns=past_ns)
        for owner in ("b", "c"):
            world.job(owner=owner)
        for _ in range(4):
            world.want(old)
            world.play(240)
            world.idle(old)
            world.play(10)
        return world.used_ns(old) - past_ns

    assert had_ns(3_600 * SECOND) == had_ns(0)


@pytest.mark.parametrize("policy", EXCLUSIVE)
def test_without_owners_time_is_divided_between_programs(policy: str) -> None:
    """Broken: where all users are one person or one service, the division cannot be switched off."""
    world = VirtualGpu(create(policy, ""))
    jobs = [world.job() for _ in range(5)]
    world.play(6_000)
    assert all(world.used_ns(job) / world.now_ns == pytest.approx(0.2, abs=0.03) for job in jobs)


@pytest.mark.parametrize("policy", ["fair_share", "priority", "round_robin"])
def test_programs_that_come_and_go_give_a_user_no_more_time(policy: str) -> None:
    """Broken: a loop of short programs has all turns, because nobody remembers that its user has just had one."""
    world = VirtualGpu(create(policy, ""))
    steady = world.job(owner="user 1")
    for _ in range(4):
        world.job(owner="user 2")
    for _ in range(80):
        holder = world.holder()
        assert holder is not None
        world.play(99)
        if holder is not steady:
            world.leave(holder)
            world.job(owner="user 2")
        else:
            world.play(1)
    assert world.used_ns(steady) / world.now_ns == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("policy", ["fair_share", "priority", "round_robin"])
def test_the_expected_order_is_the_one_that_comes(policy: str) -> None:
    """Broken: where memory is short the wrong program's memory is brought in at each turn."""
    world = VirtualGpu(create(policy, ""))
    for user in (1, 2, 2, 2, 3, 3):
        world.job(owner=f"user {user}")
    world.play(850)
    expected, done = world.plan.order, len(world.turns)
    world.play(300)
    assert tuple(world.turns[done : done + 2]) == expected[:2]


class Counted(tuple):  # type: ignore[type-arg]
    """Jobs that count how often they are passed over."""

    passes = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        Counted.passes += 1
        return super().__iter__()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("owners", [1, 10, 1000])
def test_a_thousand_jobs_cost_a_few_passes(policy: str, owners: int) -> None:
    """Broken: an event costs more than linear time, or a plan names everybody."""
    jobs = [
        JobView(
            n, "", State.WAITING if n else State.RUNNING, Turn(n, n, n, None if n else 0), Rank(), owner=str(n % owners)
        )
        for n in range(1000)
    ]
    for gpu in (GPU, replace(GPU, memory_short=True)):
        Counted.passes = 0
        plan = create(policy, "").decide(gpu, Counted(jobs), 200 * MS)
        assert Counted.passes <= 4
        assert len(plan.running) <= 24
        assert len(plan.order) <= 8


def test_owners_are_forgotten_one_day() -> None:
    """Broken: the policy grows with each user or slot that ever was."""
    turns = OwnerTurns()
    world = VirtualGpu(create("round_robin", ""))
    world.policy.observe = turns.observe  # type: ignore[attr-defined]
    for number in range(2 * REMEMBERED):
        world.leave(world.job(owner=f"user {number}"))
    assert len(turns._last_ns) == REMEMBERED
    assert not turns._owners


def test_a_switch_of_policy_keeps_one_of_many_members() -> None:
    """Broken: a policy of exclusive turns stops at first when it takes over from `auto`."""
    jobs = [JobView(n, "", State.RUNNING, Turn(n, 0, None, 0, 0)) for n in range(4)]
    for policy in EXCLUSIVE:
        plan = create(policy, "").decide(GpuView("GPU-0", 1, 100 * MS), jobs, 5 * SECOND)
        assert [one.client for one in plan.running] == [0]
