"""Strict classes: preemption, rounds within a class, and nobody starves."""

from __future__ import annotations

from functools import partial

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.harness import ScriptedClient
from nvshare.scheduler_policies.api import GpuView
from nvshare.scheduler_policies.priority import Priority
from tests.harness import one_gpu, play_turn

QUANTUM_MS = 100
AGE = 20


make_harness = partial(one_gpu, policy="priority")


def seconds(client: ScriptedClient) -> float:
    """GPU time so far."""
    return client.seat().statistics.used_ns / 1e9


def test_a_higher_class_preempts_at_once() -> None:
    """Broken: an urgent client would wait for a quantum of a batch job."""
    harness = make_harness()
    low = harness.client(wanted=True, priority=0)
    harness.milliseconds(1)
    high = harness.client(wanted=True, priority=1)
    assert len(low.take(messages.Revoke)) == 1
    low.release(wanted=True)
    assert high.granted() is not None


def test_the_same_or_a_lower_class_does_not_preempt() -> None:
    """Broken: two clients could preempt each other in turn."""
    harness = make_harness()
    holder = harness.client(wanted=True, priority=1)
    harness.client(wanted=True, priority=1)
    harness.client(wanted=True, priority=0)
    harness.milliseconds(QUANTUM_MS - 1)
    assert not holder.take(messages.Revoke)


def test_the_highest_class_keeps_the_gpu_while_only_lower_ones_wait() -> None:
    """Broken: strictness, each quantum would end in a drain for nothing."""
    harness = make_harness()
    high = harness.client(wanted=True, priority=5)
    harness.client(wanted=True, priority=0)
    harness.milliseconds((AGE - 1) * QUANTUM_MS)
    assert not high.take(messages.Revoke)


def test_turns_go_round_within_a_class() -> None:
    """Broken: one client of the class would keep the others out."""
    harness = make_harness()
    a, b, c = (harness.client(wanted=True, priority=3) for _ in range(3))
    assert [play_turn(harness) for _ in range(6)] == [a.client, b.client, c.client] * 2


def test_nobody_starves_and_the_highest_keeps_its_share() -> None:
    """Broken: ageing, a low class would never run, or many low ones would take the GPU from the high one."""
    harness = make_harness()
    high = harness.client(wanted=True, priority=5)
    lows = [harness.client(wanted=True, priority=0) for _ in range(4)]
    for _ in range(60):
        play_turn(harness)
    total = seconds(high) + sum(seconds(low) for low in lows)
    assert seconds(high) / total >= AGE / (AGE + 1) - 0.02
    assert all(seconds(low) > 0 for low in lows)


def test_a_favoured_turn_is_not_preempted() -> None:
    """Broken: a client would get its turn through age and lose it in the same moment."""
    harness = make_harness()
    high = harness.client(wanted=True, priority=5)
    low = harness.client(wanted=True, priority=0)
    harness.milliseconds(AGE * QUANTUM_MS)
    high.release(wanted=True)
    assert low.granted() is not None
    harness.client(wanted=True, priority=9)
    harness.milliseconds(QUANTUM_MS - 1)
    assert not low.take(messages.Revoke)
    harness.milliseconds(1)
    assert len(low.take(messages.Revoke)) == 1


def test_a_changed_priority_counts_at_once() -> None:
    """Broken: `set priority` would wait for the next decision."""
    harness = make_harness()
    a = harness.client(wanted=True, priority=0)
    b = harness.client(wanted=True, priority=0)
    harness.handle(events.PrioritySet(b.client, 1))
    assert len(a.take(messages.Revoke)) == 1


def test_a_favoured_client_that_is_gone_is_forgotten() -> None:
    """Broken: a later client of the same number would not be preemptible."""
    policy = Priority(age_quanta=1)
    gpu = GpuView("GPU-0", 1, 10, True)
    harness = make_harness()
    view = harness.client(wanted=True)
    seat = harness.scheduler._node.gpus["GPU-0"].seats[view.client]
    shown = seat.view(harness.clock.now_ns)
    policy._favoured = shown.client
    assert not policy.preempt(shown, [shown], gpu, 0)
    policy.gone(shown.client)
    assert policy._favoured is None


def test_the_lowest_is_granted_within_the_bound_under_full_load() -> None:
    """Broken: the bound that the policy states would not be the truth for the one that needs it."""
    harness = make_harness()
    for number in range(4):
        harness.client(wanted=True, priority=10 - number)
    low = harness.client(wanted=True, priority=-5)
    bound_ns = Priority().wait_bound_ns(5, GpuView("", 0, QUANTUM_MS * MILLISECOND_NS, True))
    start_ns = harness.clock.now_ns
    harness.until(lambda: play_turn(harness) == low.client, steps=200)
    assert low.seat().statistics.max_wait_ns <= bound_ns
    assert harness.clock.now_ns > start_ns
