"""Whatever a policy does, the invariants hold and round robin takes over (invariant 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.harness import Harness, ScriptedClient
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, Policy, PolicyBase


class Wild(PolicyBase):
    """Does in one operation what the test says; else what is right."""

    def __init__(self, operation: str, act: Callable[..., Any]) -> None:
        self.operation = operation
        self.act = act
        self.calls: list[str] = []

    def _do(self, operation: str, right: object, *arguments: object) -> Any:
        self.calls.append(operation)
        return self.act(*arguments) if operation == self.operation else right

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        answer: Choice | None = self._do("choose", Choice(waiting[0].client), waiting)
        return answer

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        answer: bool = self._do("preempt", False, waiting)
        return answer

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        answer: bool = self._do("renew", False, waiting)
        return answer

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Sequence[int]:
        answer: Sequence[int] = self._do("order", [v.client for v in waiting], waiting)
        return answer

    def wake_at_ns(self, now_ns: int) -> int | None:
        answer: int | None = self._do("wake_at_ns", None, now_ns)
        return answer

    def released(self, client: ClientView, now_ns: int) -> None:
        self._do("released", None, client)

    def gone(self, client: int) -> None:
        self._do("gone", None, client)


def wild_harness(policy: Policy, **settings: object) -> Harness:
    """A harness whose first policy is this one."""

    def factory(name: str, uuid: str) -> Policy:
        return policy if name == "wild" else registry.create(name, uuid)

    harness = Harness(factory, policy="wild", **settings)
    harness.gpu(capacity=100)
    return harness


def live(harness: Harness) -> tuple[ScriptedClient, ScriptedClient]:
    """A bit of everything, so that every operation is called."""
    a = harness.client(wanted=True)
    b = harness.client()
    a.report(allocated=60, resident=60)
    b.report(allocated=60, resident=40, host=20)
    b.request()
    third = harness.client(wanted=True)
    harness.milliseconds(100)
    a.release(wanted=True)
    for _ in range(4):
        for client in (a, b, third):
            for order in client.take(messages.Evict) + client.take(messages.Restore):
                client.moved(order.order_id, order.bytes)
    third.die()
    return a, b


def fail(*arguments: object) -> object:
    """As a bug in a policy would."""
    raise KeyError("a bug")


BREACHES: dict[str, tuple[str, Callable[..., Any]]] = {
    "choose raises": ("choose", fail),
    "choose names one who does not wait": ("choose", lambda waiting: Choice(999)),
    "choose answers no Choice": ("choose", lambda waiting: waiting[0].client),
    "choose answers a quantum of 0": ("choose", lambda waiting: Choice(waiting[0].client, 0)),
    "choose answers a quantum of text": ("choose", lambda waiting: Choice(waiting[0].client, "long")),  # type: ignore[arg-type]
    "choose leaves the GPU idle and names no time": ("choose", lambda waiting: None),
    "preempt raises": ("preempt", fail),
    "preempt answers nonsense": ("preempt", lambda waiting: "yes"),
    "renew raises": ("renew", fail),
    "order raises": ("order", fail),
    "order forgets somebody": ("order", lambda waiting: []),
    "order invents somebody": ("order", lambda waiting: [1, 2, 3, 4, "x"]),
    "order answers a number": ("order", lambda waiting: 5),
    "released raises": ("released", fail),
    "gone raises": ("gone", fail),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_policy_that_breaks_the_rules_is_replaced(breach: str) -> None:
    """Broken: invariant 8, a bad policy could stop the GPU or crash the coordinator."""
    operation, act = BREACHES[breach]
    policy = Wild(operation, act)
    harness = wild_harness(policy)
    live(harness)
    assert operation in policy.calls
    assert harness.gpu_snapshot().rules.policy == "round_robin"
    assert harness.gpu_snapshot().rules.policy_failures == 1
    assert harness.logged(f"wild on GPU-0: {operation}")
    assert harness.gpu_snapshot().leases.holders, "the GPU is not idle"
    calls = len(policy.calls)
    harness.milliseconds(1000)
    assert len(policy.calls) == calls, "it is asked no more"


def test_a_good_policy_stays() -> None:
    """Broken: the test above would also pass if every policy were replaced."""
    policy = Wild("none", fail)
    harness = wild_harness(policy)
    live(harness)
    assert harness.gpu_snapshot().rules.policy == "wild"
    assert set(policy.calls) >= {"choose", "preempt", "renew", "order", "released", "gone"}


class Throttle(PolicyBase):
    """Leaves the GPU idle for 10 ms after each lease."""

    def __init__(self) -> None:
        self.free_at_ns = 0

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        return Choice(waiting[0].client) if now_ns >= self.free_at_ns else None

    def wake_at_ns(self, now_ns: int) -> int:
        return self.free_at_ns

    def released(self, client: ClientView, now_ns: int) -> None:
        self.free_at_ns = now_ns + 10 * MILLISECOND_NS


def test_a_policy_may_leave_the_gpu_idle_until_a_time() -> None:
    """Broken: policies that throttle would be impossible, or the GPU would stay idle for ever."""
    harness = wild_harness(Throttle())
    a = harness.client(wanted=True)
    b = harness.client(wanted=True)
    a.release(idle=True)
    harness.milliseconds(9)
    assert b.granted() is None
    harness.milliseconds(1)
    assert b.granted() is not None
    assert harness.gpu_snapshot().rules.policy_failures == 0


def test_a_wake_up_time_has_a_bound() -> None:
    """Broken: a policy's time beyond what the operating system's timer can hold ends the coordinator."""
    policy = Throttle()
    policy.free_at_ns = 1 << 90
    harness = wild_harness(policy)
    harness.client(wanted=True)
    assert harness.timer_ns is not None
    assert harness.timer_ns - harness.clock.now_ns == 3_600_000 * MILLISECOND_NS


class ChooseOnly:
    """The least that a policy can be: no base class."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        return Choice(waiting[-1].client)


def test_choose_alone_is_enough() -> None:
    """Broken: a policy would have to inherit from the project's class."""
    harness = wild_harness(ChooseOnly())
    live(harness)
    assert harness.gpu_snapshot().rules.policy_failures == 0


def test_what_a_policy_sees() -> None:
    """Broken: a policy would decide on figures that are old or wrong."""
    seen: list[tuple[ClientView, ...]] = []

    def look(waiting: Sequence[ClientView]) -> Choice:
        seen.append(tuple(waiting))
        return Choice(waiting[0].client)

    harness = wild_harness(Wild("choose", look))
    a = harness.client("first", wanted=True, priority=3, memory=10)
    b = harness.client("second", wanted=True)
    c = harness.client("third", wanted=True)
    harness.milliseconds(30)
    b.report(allocated=7, resident=5)
    harness.handle(events.PrioritySet(b.client, -4))
    a.release(wanted=True)
    views = seen[-1]
    assert [view.client for view in views] == [b.client, c.client, a.client], "turn order"
    second, last = views[0], views[2]
    assert (second.name, second.priority, second.allocated_bytes, second.resident_bytes) == ("second", -4, 7, 5)
    assert (last.name, last.priority, last.leases, last.submissions) == ("first", 3, 1, 1)
    assert last.used_ns == 30 * MILLISECOND_NS
    assert last.last_released_ns == last.waiting_since_ns == harness.clock.now_ns
    assert last.holding_since_ns is None
