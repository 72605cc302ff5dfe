"""Time is divided between users first, then between the programs of each; under every policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.harness import Harness, ScriptedClient
from nvshare.scheduler_policies.api import ClientView
from nvshare.scheduler_policies.owner_turns import REMEMBERED, OwnerTurns
from nvshare.scheduler_policies.registry import BUILT_IN, create
from tests.harness import one_gpu, play_turn

POLICIES = sorted(BUILT_IN)


def view(client: int, owner: str) -> ClientView:
    """A client that nothing is known of."""
    return ClientView(client, "", 0, 0, None, None, None, 0, 0, 0, 0, 0, owner=owner)


def share(some: list[ScriptedClient], others: list[ScriptedClient]) -> float:
    """Of the time of all, what some have had."""
    had = [sum(client.seat().statistics.used_ns for client in clients) for clients in (some, others)]
    return had[0] / sum(had)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_programs_give_a_user_no_more_time(policy: str) -> None:
    """Broken: a user takes the GPU from the others by starting more programs."""
    harness = one_gpu(policy=policy)
    mine = [harness.client(wanted=True, user_id=1)]
    crowd = [harness.client(wanted=True, user_id=2) for _ in range(5)]
    for _ in range(60):
        play_turn(harness)
    assert share(mine, crowd) == pytest.approx(0.5, abs=0.03)
    turns = [client.seat().statistics.leases for client in crowd]
    assert max(turns) - min(turns) <= 1, "and among them turns go round"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_operator_may_divide_between_programs(policy: str) -> None:
    """Broken: where all users are one person or one service, the division cannot be switched off."""
    harness = one_gpu(policy=policy, users_first=False)
    mine = [harness.client(wanted=True, user_id=1)]
    crowd = [harness.client(wanted=True, user_id=2) for _ in range(4)]
    for _ in range(60):
        play_turn(harness)
    assert share(mine, crowd) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("policy", POLICIES)
def test_programs_that_come_and_go_give_a_user_no_more_time(policy: str) -> None:
    """Broken: a loop of short programs has all turns, because nobody remembers that its user has just had one."""
    harness = one_gpu(policy=policy)
    steady = harness.client(wanted=True, user_id=1)
    crowd = [harness.client(wanted=True, user_id=2) for _ in range(4)]
    had = 0
    for _ in range(60):
        (holder,) = harness.gpu_snapshot().leases.holders
        client = harness.clients[holder]
        if client is steady:
            play_turn(harness)
            continue
        harness.milliseconds(99)  # it ends without giving the lease back
        had += client.seat().statistics.used_ns
        client.die()
        crowd.append(harness.client(wanted=True, user_id=2))
    assert had / (had + steady.seat().statistics.used_ns) == pytest.approx(0.5, abs=0.05)


def test_weights_divide_within_a_user_alone() -> None:
    """Broken: two programs of the largest weight leave another user half a percent."""
    harness = one_gpu(policy="fair_share")
    mine = [harness.client(wanted=True, user_id=1, weight=weight) for weight in (1, 3)]
    hogs = [harness.client(wanted=True, user_id=2, weight=messages.MAX_WEIGHT) for _ in range(2)]
    for _ in range(300):
        play_turn(harness)
    assert share(mine, hogs) == pytest.approx(0.5, abs=0.02)
    assert share(mine[:1], mine[1:]) == pytest.approx(0.25, abs=0.03)


def test_a_slot_weighs_what_its_annotation_says() -> None:
    """Broken: weights of pods mean nothing, or count once for each process."""
    harness = one_gpu(policy="fair_share")
    heavy = [harness.client(wanted=True, group="a", weight=3, user_id=user) for user in (0, 0, 7)]
    light = [harness.client(wanted=True, group="b")]
    for _ in range(200):
        play_turn(harness)
    assert share(heavy, light) == pytest.approx(0.75, abs=0.02)
    assert share(heavy[:1], heavy[1:]) == pytest.approx(1 / 3, abs=0.03)


def test_a_user_who_comes_back_cannot_claim_the_past() -> None:
    """Broken: a user who was away for an hour has the GPU alone until that is made up for."""
    for policy in POLICIES:
        harness = one_gpu(policy=policy)
        away, steady = harness.client(wanted=True, user_id=1), harness.client(wanted=True, user_id=2)
        other = harness.client(wanted=True, user_id=2)
        play_turn(harness)
        away.die()
        for _ in range(20):
            play_turn(harness)
        back = [harness.client(wanted=True, user_id=1) for _ in range(3)]
        before = steady.seat().statistics.used_ns + other.seat().statistics.used_ns
        for _ in range(30):
            play_turn(harness)
        gained = steady.seat().statistics.used_ns + other.seat().statistics.used_ns - before
        had = sum(client.seat().statistics.used_ns for client in back)
        assert had / (had + gained) == pytest.approx(0.5, abs=0.1), policy


def test_a_turn_that_a_gang_interrupts_goes_on_before_other_users() -> None:
    """Broken: a call costs the interrupted user a whole round; an interrupted turn goes on next."""
    harness = Harness(create)
    for uuid in "AB":
        harness.gpu(uuid)

    def join(uuid: str, user: int, gang: str = "") -> ScriptedClient:
        client = harness.client(attach=False, user_id=user, gang=gang)
        client.attach(uuid, wanted=True)
        return client

    busy, chosen = join("B", 3), join("B", 4, "g")
    harness.milliseconds(50)
    worker, rival = join("A", 1), join("A", 2)
    called = join("A", 4, "g")
    harness.until(lambda: busy.seat().phase == "revoking")
    busy.release()
    assert worker.seat().phase == "revoking", "half of its quantum is left"
    worker.release(wanted=True)
    assert (called.seat().phase, chosen.seat().phase) == ("holding", "holding")
    harness.until(lambda: called.seat().phase == "revoking")
    called.release()
    assert harness.gpu_snapshot("A").leases.holders == (worker.client,)
    assert rival.seat().phase == "waiting"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_stated_bounds_hold(policy: str, users: int, seed: int) -> None:
    """Broken: invariant 5, whoever comes and goes when; the core's check measures each wait."""
    chance = random.Random(seed)
    harness = one_gpu(policy=policy)

    def come() -> ScriptedClient:
        return harness.client(
            wanted=chance.random() < 0.8,
            weight=chance.choice([1, 1, 2, 5, 9]),
            user_id=chance.randrange(users),
            group=chance.choice(["", "", "", "a"]),
            priority=chance.randint(0, 4),
        )

    clients = [come() for _ in range(chance.randint(2, 7))]
    for _ in range(300):
        client = chance.choice(clients)
        phase, act = client.seat().phase, chance.random()
        if phase == "revoking":
            client.release(wanted=chance.random() < 0.9)
        elif phase == "idle" and act < 0.5:
            client.request()
        elif phase == "holding" and act < 0.15:
            client.release(idle=True, wanted=chance.random() < 0.5)
        elif act < 0.03:
            client.die()
            clients[clients.index(client)] = come()
        harness.milliseconds(chance.choice([0, 1, 10, 60, 100, 200, 1000]))
    assert harness.gpu_snapshot().rules.policy_failures == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_expected_order_is_the_one_that_comes(policy: str) -> None:
    """Broken: where memory is short the wrong program's memory is brought in at each turn."""
    harness = one_gpu(policy=policy)
    for user in (1, 2, 2, 2, 3, 3):
        harness.client(wanted=True, user_id=user)
    for _ in range(8):
        play_turn(harness)
    gpu = harness.scheduler._node.gpus["GPU-0"]
    expected = gpu.policy_guard.order(gpu.wait_queue.views(), gpu.view(), harness.clock.now_ns, [])
    assert sorted(expected) == sorted(view.client for view in gpu.wait_queue.views())
    play_turn(harness)
    came = [play_turn(harness) for _ in range(3)]
    assert came == expected[:3]


def test_owners_are_forgotten_one_day() -> None:
    """Broken: the policy grows with each user or slot that ever was."""
    turns = OwnerTurns()
    for number in range(2 * REMEMBERED):
        view = ClientView(number, "", 0, 0, 1, None, None, 0, 0, 0, 0, 0, owner=f"user {number}")
        turns.released(view, number)
        turns.gone(number)
    assert len(turns._last_ns) == REMEMBERED
    assert not turns._owners


def test_a_changed_setting_does_not_reach_the_host_budget() -> None:
    """Broken: dividing time between programs lets one user have the host memory of all."""
    harness = Harness(create, users_first=False, host_budget_bytes=900)
    harness.gpu()
    harness.milliseconds(1_000)
    for _ in range(2):
        harness.handle(events.HostAsked(harness.client(user_id=7).client, 1, 800))
    snapshot = harness.scheduler.snapshot(harness.clock.now_ns)
    assert [(owner.owner, owner.shared_bytes) for owner in snapshot.host_owners] == [("user 7", 800)]


def test_a_turn_that_ends_overdue_counts() -> None:
    """Broken: a user whose program does not give the GPU back in time has the next turn, too."""
    harness = one_gpu(policy="round_robin")
    hung, mate = (harness.client(user_id=1, wanted=True) for _ in range(2))
    other = harness.client(user_id=2, wanted=True)
    assert [play_turn(harness) for _ in range(4)] == [hung.client, other.client, mate.client, other.client]
    harness.until(lambda: hung.seat().phase == "overdue")
    assert (other.seat().phase, mate.seat().phase) == ("holding", "waiting")
    hung.release(wanted=True)
    play_turn(harness)
    assert mate.seat().phase == "holding", "its late release is no second turn"


def test_calls_of_a_gang_do_not_take_the_turns_of_its_owner() -> None:
    """Broken: a gang that is called after each turn of another user keeps its owner's other programs waiting."""
    turns = OwnerTurns()
    member, mate, other = (view(number, owner) for number, owner in enumerate("AAB", 1))
    assert turns.first((mate, other)) is mate
    turns.released(mate, 1)
    assert turns.first((mate, other)) is other
    turns.released(replace(member, called=True), 2)
    turns.released(other, 3)
    assert turns.first((mate, other)) is mate
    assert turns.first((other,)) is other
    turns.released(replace(member, called=True), 4)
    assert turns.first((mate, other)) is other, "where no other program of its owner waits they count"
