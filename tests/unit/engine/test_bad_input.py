"""Faults of clients: each is refused, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.bench.virtual_node.world import core_settings
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, RemoteProtocolError
from nvshare.scheduler_policies.registry import create
from tests.harness import GPU, one_gpu

make_harness = partial(one_gpu, capacity=1000)
Values = st.SearchStrategy[Any]

NONSENSE: dict[str, Callable[[int], events.Event]] = {
    "a request for a GPU that it has not attached": lambda c: events.Received(c, messages.Request(5)),
    "a release of another's lease": lambda c: events.Received(
        c, messages.Release(0, 1, messages.ReleaseReason.REVOKED, True, False, 0, 0, 0)
    ),
    "a release of lease 0": lambda c: events.Received(
        c, messages.Release(0, 0, messages.ReleaseReason.REVOKED, True, False, 0, 0, 0)
    ),
    "a state of a GPU that it has not attached": lambda c: events.Received(c, messages.State(7, 0, 1, 1, 1, 1)),
    "a target that it was not told": lambda c: events.Received(c, messages.State(0, 1, 1, 1, 1, 1)),
    "a second hello": lambda c: events.ClientRegistered(
        c, messages.Hello(messages.PROTOCOL_VERSION, "x", "x", MemoryMode.DEVICE, 0), 1, 1
    ),
    "one ordinal for two GPUs": lambda c: events.Received(c, messages.AttachGpu(0, "GPU-1", 0, False, 0, 0, 0)),
    "two ordinals for one GPU": lambda c: events.Received(c, messages.AttachGpu(1, GPU, 0, False, 0, 0, 0)),
    "a lease that it does not have": lambda c: events.Received(c, messages.AttachGpu(0, GPU, 9, False, 0, 0, 0)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_costs_the_peer_its_connection_and_nobody_else_anything(what: str) -> None:
    """Broken: a client could harm others, or crash the coordinator, by breaking the protocol."""
    harness = make_harness()
    harness.gpu("GPU-1")
    a = harness.client(wanted=True)
    b = harness.client(wanted=True)
    before = harness.scheduler.snapshot(harness.clock.now_ns)
    with pytest.raises(RemoteProtocolError):
        harness.handle(NONSENSE[what](b.client))
    assert harness.scheduler.snapshot(harness.clock.now_ns) == before
    a.release()
    assert b.granted() is not None


def test_speaking_before_hello_is_refused() -> None:
    """Broken: an unknown connection would reach the records."""
    harness = make_harness()
    for event in (
        events.Received(9, messages.Request(0)),
        events.Received(9, messages.AttachGpu(0, GPU, 0, True, 0, 0, 0)),
        events.Received(9, messages.State(messages.HOST, 0, 0, 0, 0, 0, asks=1)),
    ):
        with pytest.raises(RemoteProtocolError):
            harness.handle(event)


def test_an_unknown_gpu_is_answered_with_those_that_there_are() -> None:
    """Broken: a user with a wrong GPU would see a hang instead of a reason."""
    harness = make_harness()
    a = harness.client(attach=False)
    a.attach("GPU-nowhere")
    (rejected,) = a.take(messages.Rejected)
    assert rejected.code == messages.Rejection.UNKNOWN_GPU
    assert not rejected.final
    assert GPU in rejected.text
    a.attach(GPU, wanted=True)
    assert a.granted() is not None


def test_a_client_too_many_is_told_so_and_not_registered() -> None:
    """Broken: clients would not be bounded."""
    harness = make_harness(max_clients=1)
    harness.client()
    late = harness.client(attach=False)
    (rejected,) = late.take(messages.Rejected)
    assert rejected.code == messages.Rejection.TOO_MANY_CLIENTS
    assert rejected.final
    harness.handle(events.ClientGone(late.client))
    assert len(harness.scheduler.snapshot(harness.clock.now_ns).clients) == 1


def test_attaching_again_repeats_the_settings() -> None:
    """Broken: a hook that lost its settings could not get them again."""
    harness = make_harness()
    a = harness.client()
    a.take(messages.GpuSettings)
    a.attach()
    assert len(a.take(messages.GpuSettings)) == 1
    a.attach(wanted=True)
    assert a.granted() is not None


def any_event() -> st.SearchStrategy[events.Event]:
    """Any event that a client, a timer or an operator can cause."""
    client = st.integers(1, 4)
    gpu = st.integers(0, 2)
    small = st.integers(0, 120)
    flag = st.booleans()
    mode = st.sampled_from(MemoryMode)
    name = st.just("n")
    gang = st.sampled_from(["", "g", "h"])
    card, number = st.sampled_from("AB"), st.integers(0, 9)
    hello = st.builds(messages.Hello, small, name, name, mode, small, st.just(""), flag, flag)
    reason = st.sampled_from(messages.ReleaseReason)

    def message(kind: type[messages.Message], *fields: st.SearchStrategy[object]) -> st.SearchStrategy[events.Event]:
        return st.builds(events.Received, client, st.builds(kind, *fields))

    policy = st.sampled_from(["round_robin", "priority", "fair_share", "?"])
    uuid = st.none() | st.sampled_from("ABX")

    def setting(name: str, value: Values, **of: Values) -> st.SearchStrategy[events.Set]:
        return st.builds(events.Set, st.just(name), value, **of)

    return st.one_of(
        st.builds(events.ClientRegistered, client, hello, st.integers(10, 13), small, st.sampled_from(["", "slot"])),
        message(messages.AttachGpu, gpu, card, number, flag, small, small, small),
        message(messages.Request, gpu),
        message(messages.Release, gpu, number, reason, flag, flag, small, small, small),
        st.builds(events.ClientGone, client, flag),
        st.builds(events.ProcessEnded, st.integers(10, 13)),
        message(messages.State, gpu, number, *4 * [small], st.just(0), small, flag, *3 * [small], flag, *6 * [small]),
        message(messages.State, st.just(messages.HOST), number, *12 * [small], *5 * [small]),
        message(messages.Progress, gpu, number, small, small, small, small, small),
        st.builds(events.TimerFired),
        st.builds(events.Look, st.frozensets(st.integers(0, 9), max_size=3)),
        setting("quantum", st.none() | st.integers(1, 50), gpu=uuid),
        setting("policy", policy),
        setting("sharing", st.sampled_from(["auto", "exclusive", "concurrent"]), gpu=uuid),
        setting("priority", gpu, client=client),
        setting("weight", st.integers(1, 9), client=client),
        setting("gang", gang, client=client),
        setting("limit", small, client=client),
        setting("host_budget", small),
        setting("switch_share", st.sampled_from([0.02, 0.5]), gpu=uuid),
        setting("paused", st.booleans(), client=client),
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_sequence_of_client_events_breaks_an_invariant(data: st.DataObject) -> None:
    """Broken: some order of messages, legal or not, would crash the core or break an invariant."""
    scheduler = Scheduler(create, core_settings(drain_deadline_ns=50, recovery_ns=40))
    now = 0
    scheduler.handle(events.GpuAdded("A", "A", 100, 100), now)
    scheduler.handle(events.GpuAdded("B", "B", 100, 100, 5, 11), now)
    refused = 0
    for item in data.draw(st.lists(st.tuples(any_event(), st.integers(0, 30)), max_size=60)):
        now += item[1]
        try:
            out = scheduler.handle(item[0], now)
        except RemoteProtocolError:
            refused += 1
            continue
        for command in out:
            if isinstance(command, commands.Send):
                messages.encode(command.message)
    snapshot = scheduler.snapshot(now)
    assert {gpu.uuid for gpu in snapshot.gpus} == {"A", "B"}
