"""Changes by the operator while clients run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Log, RecordLease
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.api import Allotment, GpuView, JobView, Plan, PolicyBase
from nvshare.scheduler_policies.registry import create
from tests.harness import GPU, Harness, contended, one_gpu


def test_a_new_quantum_holds_for_the_lease_at_hand() -> None:
    """Broken: `set quantum` would take effect only after the old, perhaps very long, quantum."""
    harness, a, b = contended(quantum_ns=60 * SECOND_NS)
    harness.milliseconds(300)
    harness.handle(events.Set("quantum", 250 * MILLISECOND_NS))
    assert len(a.take(messages.Revoke)) == 1
    a.release(wanted=True)
    assert b.granted() is not None
    harness.milliseconds(249)
    assert not b.take(messages.Revoke)
    harness.milliseconds(1)
    assert len(b.take(messages.Revoke)) == 1


class _AnHour(PolicyBase):
    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        return Plan((Allotment(jobs[0].client, 3600 * SECOND_NS),))


def turns_of_an_hour(capacity: int = 1 << 30) -> Harness:
    """A GPU whose policy gives turns of an hour; other policies can be chosen by their names."""
    harness = Harness(lambda name, uuid: _AnHour() if name == "an_hour" else create(name, uuid), policy="an_hour")
    harness.gpu(capacity=capacity)
    return harness


def test_a_new_policy_does_not_wait_for_a_turn_of_the_old_one() -> None:
    """Broken: after `set policy` everybody would wait for a turn whose length the replaced policy chose."""
    harness = turns_of_an_hour()
    a = harness.client(wanted=True)
    b = harness.client(wanted=True)
    harness.milliseconds(300)
    assert not a.take(messages.Revoke)
    harness.handle(events.Set("policy", "round_robin"))
    harness.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1
    a.release()
    assert b.granted() is not None


def test_a_new_quantum_holds_for_a_turn_that_a_new_policy_has_bounded() -> None:
    """Broken: after `set policy` and `set quantum` clients wait for the longer quantum of before."""
    harness = turns_of_an_hour()
    a = harness.client(wanted=True)
    harness.client(wanted=True)
    harness.milliseconds(30)
    harness.handle(events.Set("policy", "round_robin"))
    harness.milliseconds(30)
    harness.handle(events.Set("quantum", 20 * MILLISECOND_NS))
    assert len(a.take(messages.Revoke)) == 1


def test_a_new_policy_bounds_a_turn_whose_memory_still_moves() -> None:
    """Broken: a policy that is replaced during a switch still decides the length of the turn after it."""
    harness = turns_of_an_hour(100)
    a, b = harness.client(resident=20, host=40), harness.client()
    a.request()
    harness.handle(events.Set("policy", "round_robin"))
    b.request()
    a.obeys()
    assert a.granted() is not None
    harness.milliseconds(99)
    assert not a.take(messages.Revoke)
    harness.milliseconds(1)
    assert len(a.take(messages.Revoke)) == 1


def test_the_automatic_quantum_follows_the_measured_cost() -> None:
    """Broken: `auto` would be fair at any price, or cheap at any wait."""
    harness, *_ = contended(quantum_ns=None)
    assert harness.gpu_snapshot().rules.quantum_automatic
    assert harness.gpu_snapshot().rules.quantum_ns == 100 * MILLISECOND_NS, "before anything is measured"
    for _ in range(60):
        (holder,) = harness.gpu_snapshot().leases.holders
        client = harness.clients[holder]
        harness.until(lambda client=client: client.seat().phase == "revoking")
        harness.milliseconds(20)
        client.release(wanted=True, drain_ns=20 * MILLISECOND_NS)
    # 20 ms of drain per switch at 5 %: 380 ms.
    assert 370 * MILLISECOND_NS <= harness.gpu_snapshot().rules.quantum_ns <= 390 * MILLISECOND_NS


def test_one_slow_switch_does_not_decide_the_quantum() -> None:
    """Broken: on a busy machine one stall of seconds in a hand-over makes the next turns as long as `longest_wait`."""
    harness, *_ = contended(quantum_ns=None)

    def switch(drain_ms: int) -> int:
        (holder,) = harness.gpu_snapshot().leases.holders
        client = harness.clients[holder]
        harness.until(lambda: client.seat().phase == "revoking")
        harness.milliseconds(drain_ms)
        client.release(wanted=True, drain_ns=drain_ms * MILLISECOND_NS)
        quantum_ns: int = harness.gpu_snapshot().rules.quantum_ns
        return quantum_ns

    usual_ns = [switch(10) for _ in range(20)][-1]
    assert switch(4000) < 2 * usual_ns
    assert [switch(400) for _ in range(40)][-1] > 4 * usual_ns, "what lasts counts"


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_a_failed_drain_does_not_change_the_automatic_quantum(late: bool) -> None:
    """Broken: one program that hangs would give all others turns of seconds."""
    harness, a, _ = contended(quantum_ns=None)
    harness.until(lambda: a.seat().phase == "revoking")
    granted_ns = harness.clock.now_ns
    harness.until(lambda: a.seat().phase == "overdue") if late else harness.milliseconds(9999)
    a.release(drained=False, drain_ns=harness.clock.now_ns - granted_ns)
    assert a.seat().statistics.overdue == 1
    gpu = harness.gpu_snapshot()
    assert gpu.rules.quantum_ns == 100 * MILLISECOND_NS, "as before anything is measured"
    assert gpu.leases.recent_drains_ns == ()


def test_the_automatic_quantum_is_bounded() -> None:
    """Broken: with quick switches it would go to nothing."""
    harness, a, _ = contended(quantum_ns=None)
    harness.milliseconds(100)
    a.release(drain_ns=1000)
    assert harness.gpu_snapshot().rules.quantum_ns == 20 * MILLISECOND_NS


def test_paused_means_granted_nothing_and_giving_back() -> None:
    """Broken: `pause` would leave the client running, or lose it for ever."""
    harness, a, b = contended()
    harness.handle(events.Set("paused", True, client=b.client))
    assert [w.waiters for w in a.take(messages.Waiters)] == [1, 0]
    harness.handle(events.Set("paused", True, client=a.client))
    assert len(a.take(messages.Revoke)) == 1
    a.release(wanted=True)
    assert b.granted() is None
    assert harness.timer_ns is None
    harness.advance(SECOND_NS)
    harness.handle(events.Set("paused", False, client=b.client))
    assert b.granted() is not None
    assert b.seat().statistics.max_wait_ns == 0, "a pause is no wait"
    harness.handle(events.Set("paused", False, client=a.client))
    assert harness.gpu_snapshot().leases.waiting == 1


def test_a_client_that_is_paused_while_it_asks_waits_on() -> None:
    """Broken: a request in the pause would be lost or granted."""
    harness = one_gpu()
    a = harness.client()
    harness.handle(events.Set("paused", True, client=a.client))
    a.request()
    assert a.granted() is None
    harness.handle(events.Set("paused", False, client=a.client))
    assert a.granted() is not None


def test_to_concurrent_all_who_wait_are_let_in() -> None:
    """Broken: switching would leave those who wait waiting."""
    harness, a, b = contended()
    a.take(messages.GpuSettings)
    harness.handle(events.Set("sharing", "concurrent"))
    assert b.granted() is not None
    assert not a.take(messages.Revoke)
    assert a.take(messages.GpuSettings)[-1].pacing_budget_ns == 0
    assert [w.waiters for w in a.take(messages.Waiters)] == [1, 0]


def test_to_exclusive_all_must_have_released_before_the_first_grant() -> None:
    """Broken: invariant 1 across the switch."""
    harness, a, b = contended(sharing=Sharing.CONCURRENT)
    c = harness.client()
    for client in (a, b):
        assert client.granted() is not None
    harness.handle(events.Set("sharing", "exclusive"))
    c.request()
    assert len(b.take(messages.Revoke)) == 1
    harness.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1, "the first member has its turn"
    a.release(wanted=True)
    assert c.granted() is None
    b.release(wanted=True)
    assert c.granted() is not None


def test_to_exclusive_a_holder_alone_goes_on() -> None:
    """Broken: a process alone would be interrupted for nothing, or the journal would not know it."""
    harness, a = contended(1, sharing=Sharing.CONCURRENT)
    harness.advance(SECOND_NS)
    harness.handle(events.Set("sharing", "exclusive"))
    assert not a.take(messages.Revoke)
    record = [c for c in harness.commands if isinstance(c, RecordLease)][-1]
    assert record.process_id == a.process_id
    b = harness.client(wanted=True)
    assert not a.take(messages.Revoke), "its quantum began with the switch"
    harness.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1
    a.release()
    assert b.granted() is not None


def test_a_limit_is_told_and_held() -> None:
    """Broken: `set limit` would show and not limit."""
    harness = one_gpu()
    a = harness.client(mode=messages.MemoryMode.MANAGED)
    a.take(messages.GpuSettings)
    harness.handle(events.Set("limit", 500, client=a.client))
    assert [s.memory_limit_bytes for s in a.take(messages.GpuSettings)] == [500]
    assert a.reserve(501) == 0
    assert a.reserve(500) == 500
    harness.handle(events.Set("limit", 100, client=a.client))
    assert a.reserve(501) == 500
    assert a.reserve(400) == 400, "giving back is always allowed"
    harness.handle(events.Set("limit", 0, client=a.client))
    assert a.reserve(10_000) == 10_000


def test_a_policy_changes_while_clients_wait() -> None:
    """Broken: `set policy` would need a restart, or forget who waits."""
    harness = one_gpu()
    a = harness.client(wanted=True, priority=0)
    low = harness.client(wanted=True, priority=0)
    high = harness.client(wanted=True, priority=5)
    harness.handle(events.Set("policy", "priority"))
    assert harness.gpu_snapshot().rules.policy == "priority"
    assert len(a.take(messages.Revoke)) == 1, "the higher class preempts from now on"
    a.release()
    assert high.granted() is not None
    high.release()
    assert low.granted() is not None


def test_a_policy_that_cannot_be_made_leaves_the_old_one() -> None:
    """Broken: a typing mistake would leave a GPU without a policy."""
    harness = one_gpu()
    harness.handle(events.Set("policy", "no_such"))
    assert harness.gpu_snapshot().rules.policy == "round_robin"
    assert harness.logged("no_such")


def test_orders_for_what_is_gone_are_logged() -> None:
    """Broken: an operator's order that crosses a death would crash the coordinator."""
    harness = one_gpu()
    for event in (
        events.Set("quantum", 1, "GPU-x"),
        events.Set("sharing", "concurrent", "GPU-x"),
        events.Set("policy", "priority", "GPU-x"),
        events.Set("priority", 1, client=99),
        events.Set("limit", 1, client=99),
        events.Set("switch_share", 0.02, "GPU-x"),
        events.Set("paused", True, client=99),
        events.Set("paused", False, client=99),
    ):
        out = harness.handle(event)
        assert [c.level for c in out if isinstance(c, Log)] == [logging.WARNING], event
    assert harness.gpu_snapshot(GPU).rules.policy == "round_robin"


def test_the_share_of_switching_changes_an_automatic_quantum_at_once() -> None:
    """Broken: `set switch-share` would show and not act, or change a quantum that was fixed."""
    harness = one_gpu(quantum_ns=None)
    a, b = harness.client(wanted=True), harness.client(wanted=True)
    assert a.granted() is not None
    harness.milliseconds(200)
    a.release(wanted=True, drain_ns=10 * MILLISECOND_NS)
    assert harness.gpu_snapshot().rules.quantum_ns == 190 * MILLISECOND_NS, "10 ms are 5 % of 200"
    harness.handle(events.Set("switch_share", 0.02))
    assert harness.gpu_snapshot().rules.quantum_ns == 490 * MILLISECOND_NS
    assert b.granted() is not None
    harness.handle(events.Set("quantum", 50 * MILLISECOND_NS))
    harness.handle(events.Set("switch_share", 0.05))
    assert (harness.gpu_snapshot().rules.quantum_ns, harness.gpu_snapshot().rules.switch_share) == (
        50 * MILLISECOND_NS,
        0.05,
    )
