"""Time in proportion to weights: shares, newcomers, groups, and the stated bound."""

from __future__ import annotations

from functools import partial

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.harness import ScriptedClient
from nvshare.scheduler_policies.api import ClientView, GpuView
from nvshare.scheduler_policies.fair_share import DEBT, FairShare
from tests.harness import one_gpu, play_turn

QUANTUM_MS = 100
VIEW = GpuView("GPU-0", 1, QUANTUM_MS * MILLISECOND_NS, True)


make_harness = partial(one_gpu, policy="fair_share")
step = partial(play_turn, drain_ms=0.5)


def used(client: ScriptedClient) -> int:
    """GPU time so far."""
    return client.seat().statistics.used_ns


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 2, 5), (10, 1, 1, 1), (7, 7, 2)])
def test_time_follows_the_weights(weights: tuple[int, ...]) -> None:
    """Broken: a weight would mean something else than a part of the time."""
    harness = make_harness()
    clients = [harness.client(wanted=True, weight=weight) for weight in weights]
    while harness.clock.now_ns < 30_000 * MILLISECOND_NS:
        step(harness)
    total = sum(used(client) for client in clients)
    for client, weight in zip(clients, weights, strict=True):
        assert used(client) / total == pytest.approx(weight / sum(weights), abs=0.02)
    assert harness.gpu_snapshot().rules.policy_failures == 0


def test_equal_weights_take_turns_whatever_the_drains_take() -> None:
    """Broken: who drains a little faster would have two turns in a row, and the other one wait twice as long."""
    harness = make_harness()
    a, b = harness.client(wanted=True), harness.client(wanted=True)
    drains = {a.client: 3.0, b.client: 0.1}
    order = []
    for _ in range(20):
        (holder,) = harness.gpu_snapshot().leases.holders
        order.append(step(harness, drain_ms=drains[holder]))
    assert order == [a.client, b.client] * 10


def test_long_drains_are_paid_for() -> None:
    """Broken: work that cannot be interrupted would be a way to more time than the others have."""
    harness = make_harness()
    slow, quick = harness.client(wanted=True), harness.client(wanted=True)
    for _ in range(60):
        (holder,) = harness.gpu_snapshot().leases.holders
        step(harness, drain_ms=150.0 if holder == slow.client else 0.1)
    assert used(slow) / used(quick) == pytest.approx(1.0, rel=0.1)


def test_a_heavy_client_keeps_the_gpu_for_its_turns() -> None:
    """Broken: each quantum of its share would end in a drain and a switch for nothing."""
    harness = make_harness()
    heavy = harness.client(wanted=True, weight=4)
    harness.client(wanted=True)
    harness.milliseconds(3 * QUANTUM_MS)
    assert not heavy.take(messages.Revoke)
    harness.milliseconds(2 * QUANTUM_MS)
    assert heavy.take(messages.Revoke)


def test_a_newcomer_cannot_claim_the_past() -> None:
    """Broken: whoever comes late would have the GPU for as long as the others had it before."""
    harness = make_harness()
    a, b = harness.client(wanted=True), harness.client(wanted=True)
    for _ in range(50):
        step(harness)
    late = harness.client(wanted=True)
    before = [used(client) for client in (a, b, late)]
    for _ in range(30):
        step(harness)
    gains = [used(client) - start for client, start in zip((a, b, late), before, strict=True)]
    assert max(gains) - min(gains) <= 3 * QUANTUM_MS * MILLISECOND_NS


def test_who_was_alone_owes_nothing() -> None:
    """Broken: a job that had the GPU to itself for an hour would then have to wait for an hour."""
    harness = make_harness()
    alone = harness.client(wanted=True)
    harness.milliseconds(3_600_000)
    late = harness.client(wanted=True)
    start = used(alone)
    for _ in range(20):
        step(harness)
    assert used(alone) - start == pytest.approx(used(late), abs=2 * QUANTUM_MS * MILLISECOND_NS)


def test_a_returner_has_no_credit() -> None:
    """Broken: a client that thought for a minute would then have the GPU for a minute."""
    harness = make_harness()
    a, b = harness.client(wanted=True), harness.client(wanted=True)
    step(harness)
    b.release(idle=True)
    harness.milliseconds(60_000)
    b.request()
    start = used(a), used(b)
    for _ in range(20):
        step(harness)
    assert used(b) - start[1] == pytest.approx(used(a) - start[0], abs=2 * QUANTUM_MS * MILLISECOND_NS)


def test_processes_of_one_group_share_one_share() -> None:
    """Broken: a container would get more time by starting more processes."""
    harness = make_harness()
    crowd = [harness.client(wanted=True, group="slot-1", weight=2) for _ in range(5)]
    single = harness.client(wanted=True, weight=1)
    for _ in range(150):
        step(harness)
    assert sum(used(client) for client in crowd) / used(single) == pytest.approx(2.0, rel=0.05)
    times = [used(client) for client in crowd]
    assert max(times) - min(times) <= 2 * QUANTUM_MS * MILLISECOND_NS, "and among them turns go round"


def test_processes_that_come_and_go_do_not_shed_their_debt() -> None:
    """Broken: a shell loop of short programs in one container would have each of its turns at once."""
    harness = make_harness()
    single = harness.client(wanted=True)
    had = 0
    process = harness.client(wanted=True, group="slot-1")
    for _ in range(60):
        holder = step(harness)
        if holder == process.client:
            had += used(process)
            process.die()
            process = harness.client(wanted=True, group="slot-1")
    assert had / used(single) == pytest.approx(1.0, rel=0.1)


def test_a_changed_weight_counts_from_then_on() -> None:
    """Broken: `set weight` would do nothing, or charge the past again."""
    harness = make_harness()
    a, b = harness.client(wanted=True), harness.client(wanted=True)
    for _ in range(20):
        step(harness)
    harness.handle(events.WeightSet(a.client, 3))
    start = used(a), used(b)
    for _ in range(40):
        step(harness)
    assert (used(a) - start[0]) / (used(b) - start[1]) == pytest.approx(3.0, rel=0.1)
    assert harness.notifications("weight") == [{"client": a.client, "weight": 3}]


def test_who_is_gone_is_forgotten() -> None:
    """Broken: the policy would grow with each client that ever was."""
    harness = make_harness()
    a, b = harness.client(wanted=True), harness.client(wanted=True, group="slot-1")
    for _ in range(4):
        step(harness)
    policy = harness.scheduler._node.gpus["GPU-0"].policy_guard.policy
    assert isinstance(policy, FairShare)
    a.die()
    b.die()
    left = harness.client(wanted=True)
    step(harness) if harness.gpu_snapshot().leases.waiting else harness.milliseconds(QUANTUM_MS)
    left.die()
    assert not policy._charged
    assert not policy._weights
    assert set(policy._owners) == set(policy._top.tags) <= {"slot slot-1", "user 0"}
    assert not any(owner.level.tags for owner in policy._owners.values())


def test_the_order_names_everybody_and_changes_nothing() -> None:
    """Broken: a guess about who is next would change who is next, or memory would move for the wrong one."""
    policy = FairShare()
    views = [ClientView(n, "", 0, 0, 1, None, None, 0, 0, 0, 0, 0, weight=n) for n in (1, 2, 3)]
    first = policy.choose(views, VIEW, 1)
    before = policy._top.virtual
    order = policy.order(views[1:], VIEW, 2)
    assert sorted(order) == [2, 3]
    assert policy._top.virtual == before
    assert policy.order(views, VIEW, 3)[0] == first.client


def test_the_lightest_is_granted_within_the_bound_under_full_load() -> None:
    """Broken: the bound would not be the truth for the one that needs it; or it would be no bound worth stating."""
    harness = make_harness()
    for _ in range(3):
        harness.client(wanted=True, weight=8)
    light = harness.client(wanted=True, weight=1)
    harness.until(lambda: step(harness) == light.client, steps=200)
    start = light.seat().statistics.leases
    harness.until(lambda: step(harness) == light.client and light.seat().statistics.leases > start, steps=200)
    policy = FairShare()
    views = [ClientView(n, "", 0, 0, 1, None, None, 0, 0, 0, 0, 0, weight=8 if n else 1) for n in range(4)]
    policy.choose(views, VIEW, 1)
    assert light.seat().statistics.max_wait_ns <= policy.wait_bound_ns(4, VIEW)
    assert policy.wait_bound_ns(4, VIEW) == 3 * (2 + 8 * (2 * DEBT + 3)) * VIEW.quantum_ns // 2
