"""Faults of policies: the invariants hold, and round robin takes over (invariant 8)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nvshare.coordinator.daemon.control.api import encode_event
from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Log, Notify
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import (
    Allotment,
    GpuView,
    Happened,
    JobLeft,
    JobView,
    Plan,
    Policy,
    PolicyBase,
    State,
    TurnEnded,
)
from tests.harness import Harness, ScriptedClient, one_gpu


def first(jobs: Sequence[JobView], gpu: GpuView, now_ns: int) -> Plan:
    """Turns: a running job until its quantum is over, else the next one."""
    running = [job for job in jobs if job.state is not State.WAITING and now_ns < job.turn.began_ns + gpu.quantum_ns]
    waiting = [job for job in jobs if job.state is State.WAITING]
    job = (running or waiting or list(jobs))[0]
    return Plan((Allotment(job.client, gpu.quantum_ns),), tuple(job.client for job in waiting))


class Wild(PolicyBase):
    """Does in one operation what the test says; else what is right."""

    def __init__(self, operation: str, act: Callable[..., Any]) -> None:
        self.operation = operation
        self.act = act
        self.calls: list[object] = []

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        self.calls.append("decide")
        answer: Plan = self.act(jobs) if self.operation == "decide" else first(jobs, gpu, now_ns)
        return answer

    def observe(self, happened: Happened) -> None:
        self.calls.append(type(happened))
        if self.operation == "observe":
            self.act(happened)


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
            if client.told():
                client.obeys()
    third.die()
    return a, b


def fail(*arguments: object) -> object:
    """As a bug in a policy would."""
    raise KeyError("a bug")


class UnprintableError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raising(error: BaseException) -> Callable[..., Any]:
    """Raises this, whatever the arguments."""

    def act(*arguments: object) -> object:
        raise error

    return act


def _named(*allotments: Allotment, **more: Any) -> Callable[[Sequence[JobView]], Plan]:
    """A plan for the first job with what is wrong in it."""
    return lambda jobs: Plan(allotments or (Allotment(jobs[0].client),), **more)


def _with(**values: Any) -> Callable[[Sequence[JobView]], Plan]:
    return lambda jobs: Plan((Allotment(jobs[0].client, **values),))


BREACHES: dict[str, tuple[str, Callable[..., Any]]] = {
    "decide raises": ("decide", fail),
    "decide exits": ("decide", lambda jobs: 1 // 0),
    "it names a client that does not want the GPU": ("decide", _named(Allotment(999))),
    "it names a client twice": ("decide", lambda jobs: Plan((Allotment(jobs[0].client),) * 2)),
    "it answers no plan": ("decide", lambda jobs: jobs[0].client),
    "it answers None": ("decide", lambda jobs: None),
    "its members are a list": ("decide", lambda jobs: Plan([Allotment(jobs[0].client)])),  # type: ignore[arg-type]
    "a member is a number": ("decide", lambda jobs: Plan((jobs[0].client,))),
    "a quantum of 0": ("decide", _with(quantum_ns=0)),
    "a quantum of text": ("decide", _with(quantum_ns="long")),
    "a rate of 0": ("decide", _with(rate=0.0)),
    "a rate of 2": ("decide", _with(rate=2.0)),
    "a rate that is no number": ("decide", _with(rate=float("nan"))),
    "pacing of 0": ("decide", _with(pacing_ns=0)),
    "it leaves the GPU idle and names no time": ("decide", lambda jobs: Plan()),
    "it leaves the GPU idle until the past": ("decide", lambda jobs: Plan(ask_again_ns=1)),
    "a time of text": ("decide", _named(ask_again_ns="soon")),
    "an order that is a list": ("decide", _named(order=[1])),
    "an order that cannot be hashed": ("decide", _named(order=([],))),
    "an order of texts": ("decide", _named(order=("c1",))),
    "a reason that cannot be sent": ("decide", _named(why="\ud800")),
    "a reason that steers a terminal": ("decide", _named(why="\x1b[2J")),
    "a reason without end": ("decide", _named(why="x" * 1_000_000)),
    "watch of text": ("decide", _with(watch="yes")),
    "decide ends the program": ("decide", lambda jobs: sys.exit(0)),
    "decide raises what is no Exception": ("decide", raising(KeyboardInterrupt())),
    "decide raises what cannot be printed": ("decide", raising(UnprintableError())),
    "decide raises what cannot be sent": ("decide", raising(ValueError("\ud800"))),
    "observe raises": ("observe", fail),
    "observe ends the program": ("observe", lambda happened: sys.exit(0)),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_policy_that_breaks_the_rules_is_replaced(breach: str) -> None:
    """Broken: invariant 8, a bad policy could stop the GPU or crash the coordinator."""
    operation, act = BREACHES[breach]
    policy = Wild(operation, act)
    harness = wild_harness(policy)
    live(harness)
    assert policy.calls
    assert harness.gpu_snapshot().rules.policy == "round_robin"
    assert harness.gpu_snapshot().rules.policy_failures == 1
    assert harness.gpu_snapshot().rules.policy_failed.startswith(f"the policy wild failed ({operation}: ")
    assert harness.logged(f"GPU-0: the policy wild failed ({operation}: ")
    for command in harness.commands:
        if isinstance(command, Notify):
            encode_event(1, 1, command.kind, command.values)
        elif isinstance(command, Log):
            assert command.text.encode()
    assert harness.gpu_snapshot().leases.holders, "the GPU is not idle"
    calls = len(policy.calls)
    harness.milliseconds(1000)
    assert len(policy.calls) == calls, "it is asked no more"


def test_a_good_policy_stays() -> None:
    """Broken: the test above would also pass if every policy were replaced."""
    policy = Wild("none", fail)
    harness = wild_harness(policy)
    a, _ = live(harness)
    for at_ms in (0, 30, 60):
        harness.milliseconds(at_ms and 30)
        lease = a.seat().lease_id
        a.say(messages.Progress(0, lease, harness.clock.now_ns, 1 + at_ms, 0, 0, 0))
    assert harness.gpu_snapshot().rules.policy == "wild"
    assert {"decide", TurnEnded, JobLeft} <= set(policy.calls)


class Starving(PolicyBase):
    """Names the highest client number, whoever waits."""

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        last = max(jobs, key=lambda job: job.client)
        return Plan((Allotment(last.client),), ask_again_ns=now_ns + SECOND_NS)


def test_a_job_that_waits_by_its_own_limit_is_not_starved() -> None:
    """Broken: a program with a small limit and one long kernel ends the policy of all programs of its GPU."""
    harness = one_gpu(policy="fair_share", check_invariants=False)
    limited, other = harness.client(wanted=True), harness.client()
    harness.handle(events.Set("share_limit", 0.01, client=limited.client))
    harness.milliseconds(2_000)  # its kernel
    other.request()
    limited.release(limited.seat().lease_id, wanted=True)
    for _ in range(1_500):
        harness.milliseconds(100)
        for revoke in other.take(messages.Revoke):
            other.release(revoke.lease_id, wanted=True)
    assert limited.seat().phase == "waiting"
    assert harness.gpu_snapshot().rules.policy == "fair_share"


def test_a_policy_that_starves_a_job_is_replaced() -> None:
    """Broken: a policy that forgets a program keeps it from the GPU for ever."""
    harness = wild_harness(Starving())
    starved, other = harness.client(wanted=True), harness.client(wanted=True)
    harness.milliseconds(1)
    starved.release(starved.take(messages.Revoke)[0].lease_id, wanted=True)
    assert other.granted() is not None
    harness.milliseconds(100_000)
    assert harness.gpu_snapshot().rules.policy == "wild"
    harness.milliseconds(40_000)
    assert harness.gpu_snapshot().rules.policy == "round_robin"
    assert harness.logged("is not named")
    for revoke in other.take(messages.Revoke):
        other.release(revoke.lease_id)
    assert starved.take(messages.Grant)


class Throttle(PolicyBase):
    """Leaves the GPU idle for 10 ms after each lease."""

    def __init__(self) -> None:
        self.free_at_ns = 0

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        if now_ns < self.free_at_ns:
            return Plan(ask_again_ns=self.free_at_ns)
        return Plan((Allotment(jobs[0].client),))

    def observe(self, happened: Happened) -> None:
        if isinstance(happened, TurnEnded):
            self.free_at_ns = happened.now_ns + 10 * MILLISECOND_NS


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


def test_a_time_to_ask_again_has_a_bound() -> None:
    """Broken: a policy's time beyond what the operating system's timer can hold ends the coordinator."""
    policy = Throttle()
    policy.free_at_ns = 1 << 90
    harness = wild_harness(policy)
    harness.client(wanted=True)
    assert harness.timer_ns is not None
    assert harness.timer_ns - harness.clock.now_ns <= 3_600_000 * MILLISECOND_NS


def test_what_a_policy_sees() -> None:
    """Broken: a policy would decide on figures that are old or wrong."""
    seen: list[tuple[JobView, ...]] = []

    def look(jobs: Sequence[JobView]) -> Plan:
        seen.append(tuple(jobs))
        return Plan((Allotment(jobs[0].client, 100 * MILLISECOND_NS),))

    harness = wild_harness(Wild("decide", look))
    a = harness.client("first", wanted=True, priority=3, memory=10)
    b = harness.client("second", wanted=True)
    c = harness.client("third", wanted=True)
    harness.milliseconds(30)
    b.report(allocated=7, resident=5)
    harness.handle(events.Set("priority", -4, client=b.client))
    assert [job.state for job in seen[-1]] == [State.RUNNING, State.WAITING, State.WAITING]
    a.release(wanted=True)
    views = seen[-1]
    assert [view.client for view in views] == [b.client, c.client, a.client], "turn order"
    second, last = views[0], views[2]
    assert (second.name, second.rank.priority) == ("second", -4)
    assert (second.memory.allocated_bytes, second.memory.resident_bytes) == (7, 5)
    assert (last.name, last.rank.priority, last.turn.used_ns) == ("first", 3, 30 * MILLISECOND_NS)
    assert last.turn.last_released_ns == last.turn.waiting_since_ns == harness.clock.now_ns
    assert last.turn.granted_at_ns is None


def test_a_policy_is_charged_each_lease_once_and_none_from_before_it() -> None:
    """Broken: a program that has run for hours waits for its turns after `set policy`; or nobody ever pays."""
    told: list[int] = []

    def note(happened: Happened) -> None:
        if isinstance(happened, TurnEnded):
            told.append(happened.job.uncharged_ns(happened.now_ns))

    harness = wild_harness(Wild("observe", note))
    a = harness.client()
    for policy, milliseconds in (("wild", 100), ("wild", 30), ("round_robin", 5_000), ("wild", 20)):
        harness.handle(events.Set("policy", policy))
        a.request()
        harness.milliseconds(milliseconds)
        a.release()
    assert told == [100 * MILLISECOND_NS, 30 * MILLISECOND_NS, 20 * MILLISECOND_NS]
