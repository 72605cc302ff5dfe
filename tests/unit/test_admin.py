"""What the operator changes while clients run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nvshare.coordinator.engine.scheduler import Settings
from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Log, RecordLease
from nvshare.coordinator.model.state import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.coordinator.simulation.harness import GPU, Desk
from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase
from nvshare.scheduler_policies.registry import create


def make_desk(**settings: object) -> Desk:
    """One GPU, every check on."""
    desk = Desk(create, Settings(check_invariants=True, **settings))  # type: ignore[arg-type]
    desk.gpu()
    return desk


def test_a_new_quantum_holds_for_the_lease_at_hand() -> None:
    """Broken: `set quantum` would take effect only after the old, perhaps very long, quantum."""
    desk = make_desk(quantum_ns=60 * SECOND_NS)
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    desk.milliseconds(300)
    desk.handle(events.QuantumSet(250 * MILLISECOND_NS))
    assert len(a.take(messages.Revoke)) == 1
    a.release()
    grant = b.granted()
    assert grant is not None
    assert grant.quantum_ns == 250 * MILLISECOND_NS


class _AnHour(PolicyBase):
    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        return Choice(waiting[0].client, 3600 * SECOND_NS)


def test_a_new_policy_does_not_wait_for_a_turn_of_the_old_one() -> None:
    """Broken: after `set policy` everybody would wait for a turn whose length the replaced policy chose."""
    desk = Desk(lambda name, uuid: _AnHour() if name == "an_hour" else create(name, uuid), Settings(policy="an_hour"))
    desk.gpu()
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    desk.milliseconds(300)
    assert not a.take(messages.Revoke)
    desk.handle(events.PolicySet("round_robin"))
    desk.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1
    a.release()
    assert b.granted() is not None


def test_a_new_policy_bounds_a_turn_whose_memory_still_moves() -> None:
    """Broken: a policy that is replaced during a switch still decides the length of the turn after it."""
    desk = Desk(lambda name, uuid: _AnHour() if name == "an_hour" else create(name, uuid), Settings(policy="an_hour"))
    desk.gpu(capacity=100)
    a, b = desk.client(), desk.client()
    a.report(allocated=60, resident=20, host=40)
    a.request()
    (restore,) = a.take(messages.Restore)
    desk.handle(events.PolicySet("round_robin"))
    b.request()
    a.moved(restore.order_id, 40)
    grant = a.granted()
    assert grant is not None
    assert grant.quantum_ns == 100 * MILLISECOND_NS
    desk.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1


def test_a_quantum_may_be_for_one_gpu() -> None:
    """Broken: setting one GPU's quantum would change the others."""
    desk = make_desk()
    desk.gpu("GPU-1")
    desk.handle(events.QuantumSet(5 * MILLISECOND_NS, "GPU-1"))
    assert desk.sight().quantum_ns == 100 * MILLISECOND_NS
    assert desk.sight("GPU-1").quantum_ns == 5 * MILLISECOND_NS


def test_the_automatic_quantum_follows_the_measured_cost() -> None:
    """Broken: `auto` would be fair at any price, or cheap at any wait."""
    desk = make_desk(quantum_ns=None)
    assert desk.sight().quantum_automatic
    assert desk.sight().quantum_ns == 100 * MILLISECOND_NS, "before anything is measured"
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    first, second = a, b
    for _ in range(60):
        desk.until(lambda client=first: client.seat().phase == "revoking")  # type: ignore[misc]
        desk.milliseconds(20)
        first.release(wanted=True, drain_ns=20 * MILLISECOND_NS)
        first, second = second, first
    gpu = desk.sight()
    # 20 ms of drain per switch at 5 %: 380 ms.
    assert 370 * MILLISECOND_NS <= gpu.quantum_ns <= 390 * MILLISECOND_NS


def test_the_automatic_quantum_is_bounded() -> None:
    """Broken: with quick switches it would go to nothing."""
    desk = make_desk(quantum_ns=None)
    a = desk.client(wanted=True)
    desk.client(wanted=True)
    desk.milliseconds(100)
    a.release(drain_ns=1000)
    assert desk.sight().quantum_ns == 20 * MILLISECOND_NS


def test_paused_means_granted_nothing_and_giving_back() -> None:
    """Broken: `pause` would leave the client running, or lose it for ever."""
    desk = make_desk()
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    desk.handle(events.Paused(b.client))
    assert [w.waiters for w in a.take(messages.Waiters)] == [1, 0]
    desk.handle(events.Paused(a.client))
    assert len(a.take(messages.Revoke)) == 1
    a.release(wanted=True)
    assert b.granted() is None
    assert desk.timer_ns is None
    desk.advance(SECOND_NS)
    desk.handle(events.Resumed(b.client))
    assert b.granted() is not None
    assert b.seat().max_wait_ns == 0, "a pause is no wait"
    desk.handle(events.Resumed(a.client))
    assert desk.sight().waiting == 1


def test_a_client_that_is_paused_while_it_asks_waits_on() -> None:
    """Broken: a request in the pause would be lost or granted."""
    desk = make_desk()
    a = desk.client()
    desk.handle(events.Paused(a.client))
    a.request()
    assert a.granted() is None
    desk.handle(events.Resumed(a.client))
    assert a.granted() is not None


def test_a_paused_client_may_die() -> None:
    """Broken: invariant 6 for those who are paused."""
    desk = make_desk()
    a = desk.client(wanted=True)
    desk.handle(events.Paused(a.client))
    a.die()
    assert desk.sight().clients == 0


def test_to_concurrent_all_who_wait_are_let_in() -> None:
    """Broken: switching would leave those who wait waiting."""
    desk = make_desk()
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    a.take(messages.GpuSettings)
    desk.handle(events.SharingSet(Sharing.CONCURRENT))
    assert b.granted() is not None
    assert not a.take(messages.Revoke)
    (told,) = a.take(messages.GpuSettings)
    assert (told.sharing, told.pacing_budget_ns) == (Sharing.CONCURRENT, 0)
    assert [w.waiters for w in a.take(messages.Waiters)] == [1]


def test_to_exclusive_all_must_have_released_before_the_first_grant() -> None:
    """Broken: invariant 1 across the switch."""
    desk = make_desk(sharing=Sharing.CONCURRENT)
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    c = desk.client()
    for client in (a, b):
        assert client.granted() is not None
    desk.handle(events.SharingSet(Sharing.EXCLUSIVE))
    c.request()
    assert len(a.take(messages.Revoke)) == len(b.take(messages.Revoke)) == 1
    a.release(wanted=True)
    assert c.granted() is None
    b.release(wanted=True)
    granted = [client for client in (a, b, c) if client.granted()]
    assert len(granted) == 1


def test_to_exclusive_a_holder_alone_goes_on() -> None:
    """Broken: a process alone would be interrupted for nothing, or the journal would not know it."""
    desk = make_desk(sharing=Sharing.CONCURRENT)
    a = desk.client(wanted=True)
    desk.advance(SECOND_NS)
    desk.handle(events.SharingSet(Sharing.EXCLUSIVE))
    assert not a.take(messages.Revoke)
    record = [c for c in desk.commands if isinstance(c, RecordLease)][-1]
    assert record.process_id == a.process_id
    b = desk.client(wanted=True)
    assert not a.take(messages.Revoke), "its quantum began with the switch"
    desk.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1
    a.release()
    assert b.granted() is not None


def test_a_limit_is_told_and_held() -> None:
    """Broken: `set limit` would show and not limit."""
    desk = make_desk()
    a = desk.client(mode=messages.MemoryMode.MANAGED)
    a.take(messages.GpuSettings)
    desk.handle(events.LimitSet(a.client, 500))
    assert [s.memory_limit_bytes for s in a.take(messages.GpuSettings)] == [500]
    assert a.reserve(501) == 0
    assert a.reserve(500) == 500
    desk.handle(events.LimitSet(a.client, 100))
    assert a.reserve(501) == 500
    assert a.reserve(400, sequence=2) == 400, "giving back is always allowed"
    desk.handle(events.LimitSet(a.client, 0))
    assert a.reserve(10_000, sequence=3) == 10_000


def test_a_policy_changes_while_clients_wait() -> None:
    """Broken: `set policy` would need a restart, or forget who waits."""
    desk = make_desk()
    a = desk.client(wanted=True, priority=0)
    low = desk.client(wanted=True, priority=0)
    high = desk.client(wanted=True, priority=5)
    desk.handle(events.PolicySet("priority"))
    assert desk.sight().policy == "priority"
    assert len(a.take(messages.Revoke)) == 1, "the higher class preempts from now on"
    a.release()
    assert high.granted() is not None
    high.release()
    assert low.granted() is not None


def test_a_policy_that_cannot_be_made_leaves_the_old_one() -> None:
    """Broken: a typing mistake would leave a GPU without a policy."""
    desk = make_desk()
    desk.handle(events.PolicySet("no_such"))
    assert desk.sight().policy == "round_robin"
    assert desk.logged("no_such")


def test_orders_for_what_is_gone_are_logged() -> None:
    """Broken: an operator's order that crosses a death would crash the coordinator."""
    desk = make_desk()
    for event in (
        events.QuantumSet(1, "GPU-x"),
        events.SharingSet(Sharing.CONCURRENT, "GPU-x"),
        events.PolicySet("priority", {}, "GPU-x"),
        events.PrioritySet(99, 1),
        events.LimitSet(99, 1),
        events.SwitchShareSet(0.02, "GPU-x"),
        events.Paused(99),
        events.Resumed(99),
    ):
        out = desk.handle(event)
        assert [c.level for c in out if isinstance(c, Log)] == [logging.WARNING], event
    assert desk.sight(GPU).policy == "round_robin"


def test_the_share_of_switching_changes_an_automatic_quantum_at_once() -> None:
    """Broken: `set switch-share` would show and not act, or change a quantum that was fixed."""
    desk = Desk(create, Settings(check_invariants=True, quantum_ns=None))
    desk.gpu()
    a, b = desk.client(wanted=True), desk.client(wanted=True)
    assert a.granted() is not None
    desk.milliseconds(200)
    a.release(wanted=True, drain_ns=10 * MILLISECOND_NS)
    assert desk.sight().quantum_ns == 190 * MILLISECOND_NS, "10 ms are 5 % of 200"
    desk.handle(events.SwitchShareSet(0.02))
    assert desk.sight().quantum_ns == 490 * MILLISECOND_NS
    assert b.granted() is not None
    desk.handle(events.QuantumSet(50 * MILLISECOND_NS))
    desk.handle(events.SwitchShareSet(0.05))
    assert (desk.sight().quantum_ns, desk.sight().switch_share) == (50 * MILLISECOND_NS, 0.05)
