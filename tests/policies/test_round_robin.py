"""Round robin: fair turns, newcomers and returning jobs in their place."""

from __future__ import annotations

from dataclasses import replace

from nvshare.scheduler_policies.api import State, TurnEnded
from nvshare.scheduler_policies.round_robin import RoundRobin
from tests.policies.virtual_gpu import GPU, MS, VirtualGpu


def test_turns_rotate() -> None:
    """Broken: somebody would run twice before another runs once."""
    world = VirtualGpu(RoundRobin())
    clients = [world.job(drain_ns=MS).client for _ in range(3)]
    world.play(750)
    assert world.turns == [*clients, *clients, clients[0], clients[1]]


def test_a_newcomer_stands_behind_those_that_wait() -> None:
    """Broken: a stream of new processes would keep others from their turn."""
    world = VirtualGpu(RoundRobin())
    first, second = world.job(), world.job()
    world.play(50)
    late = world.job()
    world.play(300)
    assert world.turns[:3] == [first.client, second.client, late.client]


def test_a_job_that_was_away_is_before_those_that_ran_meanwhile() -> None:
    """Broken: an interactive client would wait for a full round each time."""
    world = VirtualGpu(RoundRobin())
    a, b, _ = world.job(), world.job(), world.job()
    world.play(50)
    world.idle(a)
    world.play(60)
    world.want(a)
    world.play(300)
    assert world.turns[:4] == [a.client, b.client, 3, a.client]


def test_a_lone_job_gives_way_at_once_after_its_turn() -> None:
    """Broken: a newcomer waits for a quantum of a job that has run for an hour."""
    world = VirtualGpu(RoundRobin())
    world.job()
    world.play(3_600_000)
    late = world.job()
    world.play(1)
    assert world.holder() is late
    assert late.max_wait_ns == 0


def test_co_scheduled_turns_do_not_take_the_turns_of_the_owner() -> None:
    """Broken: a gang that is co-scheduled after each turn of another user keeps its owner's other programs waiting."""
    policy = RoundRobin()
    world = VirtualGpu(policy)
    member, mate, other = world.job(owner="a"), world.job(owner="a"), world.job(owner="b")
    world.play(250)  # member, other, mate
    assert world.turns == [member.client, other.client, mate.client]
    views = [replace(job.view, state=job.view.state.WAITING) for job in (other, member, mate)]
    policy.observe(TurnEnded(mate.view, world.now_ns))
    policy.observe(TurnEnded(member.view, world.now_ns + 1, called=True))
    assert policy.decide(GPU, views, world.now_ns + 2).running[0].client == other.client
    policy.observe(TurnEnded(other.view, world.now_ns + 3))
    policy.observe(TurnEnded(member.view, world.now_ns + 4, called=True))
    assert policy.decide(GPU, views[1:] + views[:1], world.now_ns + 5).running[0].client == member.client


def test_the_owner_whose_job_drains_is_last() -> None:
    """Broken: a turn that the operator ends early does not count yet, and its owner has the next one, too."""
    policy = RoundRobin()
    world = VirtualGpu(policy)
    a, mate, b = world.job(owner="a"), world.job(owner="a"), world.job(owner="b")
    world.play(150)
    assert world.turns == [a.client, b.client]
    world.play(100)
    assert world.turns[2] == mate.client
    waiting = [replace(job.view, state=State.WAITING) for job in (a, b)]
    drained = replace(GPU, draining=(mate.view,))
    assert policy.decide(drained, waiting, world.now_ns).running[0].client == b.client
