"""The one timer: a deadline that has passed is handled or dropped, and never armed again."""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import SetTimer
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import (
    Allotment,
    GpuView,
    Happened,
    JobView,
    Plan,
    Policy,
    PolicyBase,
    State,
    TurnEnded,
)
from tests.harness import Harness, ScriptedClient, contended, one_gpu

SWAP = messages.MemoryMode.SWAP
DRAIN_NS = 20 * MILLISECOND_NS


class Throttle(PolicyBase):
    """One turn of 5 ms in 50 ms."""

    name = "throttle"

    def __init__(self) -> None:
        self.next_ns = 0

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        if jobs[0].state is State.WAITING and now_ns < self.next_ns:
            return Plan(ask_again_ns=self.next_ns)
        began_ns = jobs[0].turn.began_ns if jobs[0].state is State.RUNNING else now_ns
        if now_ns >= began_ns + 5 * MILLISECOND_NS:
            return Plan(ask_again_ns=began_ns + 50 * MILLISECOND_NS)
        return Plan((Allotment(jobs[0].client, 5 * MILLISECOND_NS),))

    def observe(self, happened: Happened) -> None:
        if isinstance(happened, TurnEnded):
            self.next_ns = happened.now_ns + 45 * MILLISECOND_NS


def make(name: str, uuid: str) -> Policy:
    return Throttle() if name == "throttle" else registry.create(name, uuid)


def timers(harness: Harness, milliseconds: int) -> int:
    """How often the timer fires in this time."""
    fired = 0
    end_ns = harness.clock.now_ns + milliseconds * MILLISECOND_NS
    while harness.timer_ns is not None and harness.timer_ns <= end_ns and fired < 1000:
        harness.clock.now_ns = max(harness.clock.now_ns, harness.timer_ns)
        harness.handle(events.TimerFired())
        fired += 1
    harness.clock.now_ns = end_ns
    return fired


def test_a_wake_up_time_does_not_outlive_the_choice_that_it_was_for() -> None:
    """Broken: a policy's wake-up time in the past is armed for ever, and the coordinator takes a whole processor."""
    harness = Harness(make, policy="throttle", drain_deadline_ns=DRAIN_NS)
    harness.gpu(capacity=1000)
    hung, waiter = harness.client(mode=SWAP, resident=600), harness.client(mode=SWAP)
    hung.request()
    waiter.report(allocated=300, resident=300)
    waiter.request()
    harness.milliseconds(27)
    assert hung.seat().phase == "overdue"
    assert harness.timer_ns is not None, "the policy is to be asked again"
    waiter.report(allocated=500, resident=300, host=200)  # it does not fit beside the overdue client any more
    assert timers(harness, 200) <= 1
    hung.release()
    assert harness.gpu_snapshot().leases.preparing == waiter.client or waiter.granted() is not None


def test_the_moment_in_which_a_gang_waits_for_the_last_holder_passes_once() -> None:
    """Broken: the same storm under round robin, after a member was passed over beside an overdue lease."""
    harness = Harness(registry.create, drain_deadline_ns=DRAIN_NS)
    for uuid in "ABC":
        harness.gpu(uuid, capacity=1000)

    def join(uuid: str, gang: str = "", memory: int = 0) -> ScriptedClient:
        client = harness.client(attach=False, gang=gang, mode=SWAP)
        client.attach(uuid, memory=memory)
        return client

    hung, last = join("A", memory=600), join("A", memory=100)
    member, mate = join("A", "g", 300), join("B", "g", 10)
    hung.request()
    last.request()
    harness.milliseconds(130)
    assert (hung.seat().phase, last.seat().phase) == ("overdue", "holding")
    for client in (join("B", "other"), join("C", "other")):  # another gang's turn keeps the mate's GPU
        client.request()
        harness.milliseconds(1)
    mate.request()
    member.request()
    last.release(idle=True)
    assert harness.timer_ns is not None, "the last holder may come back in a moment"
    member.report(allocated=500, resident=300, host=200)
    assert timers(harness, 50) <= 2


def test_a_client_that_hangs_is_noticed_though_everything_fits_by_now() -> None:
    """Broken: nobody hears of a client that does not move its memory, or its deadline is armed for ever."""
    harness = Harness(registry.create)
    harness.gpu(capacity=1000)
    hung, other = harness.client(mode=SWAP, resident=600), harness.client(mode=SWAP, resident=0, host=600)
    other.request()
    assert len(hung.told()) == 1
    hung.report(allocated=300, resident=300)
    other.obeys()
    harness.advance(6 * SECOND_NS)
    other.release(idle=True)
    assert [note["client"] for note in harness.notifications("stalled")] == [hung.client]


def test_a_timer_that_fires_for_nothing_is_set_again() -> None:
    """Broken: after a timer that fired early the end of the quantum would never come."""
    harness, a, _ = contended()
    due_ns = harness.timer_ns
    harness.timer_ns = None
    harness.handle(events.TimerFired())
    assert harness.timer_ns == due_ns
    harness.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1


def test_the_timer_is_the_least_of_all_gpus_and_is_set_only_when_it_changes() -> None:
    """Broken: one GPU's deadline would hide another's, or every event would set the timer."""
    harness = one_gpu()
    harness.gpu("GPU-1")
    first = harness.client(wanted=True)
    harness.client(wanted=True)
    due_ns = harness.timer_ns
    harness.milliseconds(10)
    for _ in range(2):
        client = harness.client(attach=False)
        client.attach("GPU-1", wanted=True)
    assert harness.timer_ns == due_ns
    assert len([c for c in harness.commands if isinstance(c, SetTimer)]) == 1
    first.release(idle=True)
    assert harness.timer_ns == due_ns + 10 * MILLISECOND_NS if due_ns else False
