"""The log of events: it reads back, replays to the same commands, and stands in our own mistakes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvshare.bench.virtual_node.world import Plan as Work
from nvshare.bench.virtual_node.world import World, core_settings
from nvshare.coordinator.engine.event_log import EventLog, read, replay
from nvshare.coordinator.engine.scheduler import InvariantError, Scheduler
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol.messages import Revoke
from nvshare.coordinator.system.journal import Journal
from nvshare.scheduler_policies.api import Allotment, GpuView, JobView, Plan, Policy
from nvshare.scheduler_policies.registry import BUILT_IN, create
from tests.harness import GPU, Harness

SETTINGS = core_settings(event_log_length=1_000_000)


@pytest.mark.parametrize(("policy", "length"), [("auto", 1_000_000), *((policy, 300) for policy in BUILT_IN)])
def test_a_log_replays_to_the_same_commands(policy: str, length: int) -> None:
    """Broken: a failure could not be run again from what was logged; or something hidden feeds the core."""
    settings = core_settings(policy=policy, event_log_length=length)
    work = Work(memory_bytes=600, admin_every_ns=SECOND_NS, death_chance=0.05, duration_ns=6 * SECOND_NS)
    world = World(5, work, create, settings)
    world.run()
    assert world.scheduler is not None
    told = world.scheduler.event_log
    assert told.complete
    again = Scheduler(create)  # the settings are the log's
    lines = list(told.lines())
    assert len(lines) == len(told) + 1
    replay(again, read(lines))
    assert again.event_log.describe(len(told)) == told.describe(len(again.event_log))
    end_ns = world.scheduler._now_ns
    assert again.snapshot(end_ns) == world.scheduler.snapshot(end_ns)


def test_a_crash_replays_when_its_beginning_has_left_the_ring() -> None:
    """Broken: the log of a crash after hours of work would not lead a replay to the same assertion."""
    settings = core_settings(event_log_length=64)
    harness = Harness(create, settings)
    harness.gpu()
    clients = [harness.client(wanted=True) for _ in range(3)]
    for _ in range(500):
        harness.milliseconds(100)
        for client in clients:
            if client.take(Revoke):
                client.release(wanted=True)
    with pytest.raises(InvariantError, match="was added already") as caught:
        harness.gpu()  # a mistake only in a core that knows the GPU
    lines = caught.value.lines
    assert len(lines) < 150
    assert not any("GpuAdded" in line for line in lines[:-1])
    replay(Scheduler(create, settings), read(lines[1:]))  # without the state there is no mistake to be found
    again = Scheduler(create)
    with pytest.raises(InvariantError, match="was added already") as replayed:
        replay(again, read(lines))
    assert again.settings == settings
    assert again.event_log.describe(60) == harness.scheduler.event_log.describe(60)
    assert str(replayed.value).splitlines()[0] == str(caught.value).splitlines()[0]


class _Foreign:
    """A policy of another package, with something that cannot be copied."""

    def __init__(self) -> None:
        self.secret = lambda: None

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        return Plan((Allotment(jobs[-1].client, gpu.quantum_ns),))


def test_a_policy_of_another_package_begins_afresh_in_a_replay() -> None:
    """Broken: with such a policy no log would replay, or a copy would run its code."""

    def factory(name: str, uuid: str) -> Policy:
        return create(name, uuid) if name == "round_robin" else _Foreign()

    harness = Harness(factory, policy="last", event_log_length=8)
    harness.gpu()
    client = harness.client(wanted=True)
    for _ in range(20):
        client.report(allocated=0, resident=0)
    assert harness.scheduler.event_log.complete
    again = Scheduler(factory)
    replay(again, read(harness.scheduler.event_log.lines()))
    now_ns = harness.clock.now_ns
    assert again.snapshot(now_ns) == harness.scheduler.snapshot(now_ns)
    assert again.snapshot(now_ns).gpus[0].rules.policy == "last"


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(os.getcwd), pickle.dumps(Path("/")), pickle.dumps(Journal), pickle.dumps(create), b"", b"junk"],
)
def test_a_state_makes_records_and_runs_nothing(content: bytes) -> None:
    """Broken: whoever replays a stranger's log would run what the stranger likes."""
    with pytest.raises(ValueError, match="not a state"):
        Scheduler(create).load(content)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "[1, 2]",
        '[1, "Beginning", {"state": "AAAA"}]',
        '[1, "NoEvent", {}]',
        '[1, "Received", {"client": 1}]',
        '[1, "Received", {"client": 1, "message": [3]}]',
        '[1, "Received", {"client": 1, "message": [255, 0]}]',
        "[1",
    ],
)
def test_what_is_no_log_is_refused(line: str) -> None:
    """Broken: a damaged file would end in a riddle instead of a message."""
    with pytest.raises(ValueError, match="not a line of an event log"):
        read([line])


def test_a_log_is_bounded_and_says_so() -> None:
    """Broken: the log would grow without end, or a replay from its middle be trusted."""
    log = EventLog(4)
    log.begin(0, b"state")
    for time in range(20):
        if log.full:
            log.begin(time, None)  # nothing can be copied any more
        log.record(time, events.TimerFired(), [])
        assert log.complete == (time < 4)
    assert 2 <= len(log) <= 4
    assert len(list(log.lines())) == len(log)


def test_our_own_mistake_shows_the_log() -> None:
    """Broken: a breach of an invariant would go unseen, or it or a plain bug be reported without what led to it."""
    harness = Harness(create, SETTINGS)
    harness.gpu()
    a = harness.client(wanted=True)
    harness.scheduler._node.gpus[GPU].memory.resident_bytes += 1  # break invariant 6 by hand
    with pytest.raises(InvariantError, match="invariant 6") as caught:
        a.request()
    assert "Received(client=1, message=Request(gpu=0))" in str(caught.value)
    assert len(read(caught.value.lines)) == len(caught.value.lines) > 3
    with pytest.raises(InvariantError, match="KeyError"):
        Harness(create, SETTINGS).handle(events.MemoryChecked("GPU-nowhere", {}, 0))
