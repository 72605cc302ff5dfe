"""Clients' reports of their work: rates now and alone, as policies see them."""

from __future__ import annotations

from typing import Any

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.api import Progress
from tests.harness import Harness, ScriptedClient, contended, one_gpu

STEP_MS = 100


class Reporter:
    """A client that counts its work."""

    def __init__(self, client: ScriptedClient) -> None:
        self.client, self.work, self.steps, self.busy_ns, self.watched_ns = client, 0, 0, 0, 0

    def report(self, work: int = 0, *, busy: float = 0.0, lease_id: int | None = None) -> Progress:
        """Reports what it has done since the last time.  Returns what policies see."""
        harness = self.client.harness
        self.work += work
        self.steps += work // 10
        self.watched_ns += STEP_MS * MILLISECOND_NS
        self.busy_ns += round(busy * STEP_MS * MILLISECOND_NS)
        lease = self.client.seat().lease_id if lease_id is None else lease_id
        now_ns = harness.clock.now_ns
        self.client.say(messages.Progress(0, lease, now_ns, self.work, self.busy_ns, self.watched_ns, self.steps))
        return self.client.seat().progress

    def works(self, work: int, *, busy: float = 0.0) -> Progress:
        """Reports after a span of work."""
        self.client.harness.milliseconds(STEP_MS)
        return self.report(work, busy=busy)


def alone(**settings: Any) -> tuple[Harness, Reporter]:
    harness = one_gpu(**settings)
    reporter = Reporter(harness.client(wanted=True))
    reporter.report()
    return harness, reporter


def test_a_rate_is_work_a_second() -> None:
    """Broken: policies would compare figures of different kinds."""
    _, reporter = alone()
    seen = reporter.works(50, busy=0.4)
    assert (seen.rate, seen.alone_rate, seen.work) == (500.0, 500.0, 50)
    assert seen.busy_alone == pytest.approx(0.4)
    assert seen.measured_for_ns == STEP_MS * MILLISECOND_NS
    assert reporter.client.seat().step_rate == 50.0
    assert reporter.works(100).rate == 1000.0


def test_a_rate_beside_another_one_is_no_rate_alone() -> None:
    """Broken: a policy would never see that two programs slow each other down."""
    harness, reporter = alone(sharing=Sharing.CONCURRENT)
    reporter.works(100)
    other = harness.client(wanted=True)
    reporter.report()
    seen = reporter.works(60)
    assert (seen.rate, seen.alone_rate) == (600.0, 1000.0)
    other.release(idle=True)
    reporter.works(90)
    assert reporter.works(100).alone_rate > 900.0


def test_bursts_beside_others_keep_the_rate_alone() -> None:
    """Broken: a notebook would never be measured; or a program that was idle when measured would never be again."""
    harness, reporter = alone(sharing=Sharing.CONCURRENT)
    reporter.works(100, busy=0.1)
    harness.client(wanted=True)
    reporter.report()
    for _ in range(10):
        reporter.works(0)
        assert reporter.works(200).busy_alone == pytest.approx(0.1)
    assert reporter.works(900).alone_rate == 0.0


def test_a_first_rate_alone_is_replaced_by_one_with_a_full_queue() -> None:
    """Broken: what a program submitted while it filled its queue stays part of its rate alone."""
    _, reporter = alone()
    assert reporter.works(115).alone_rate == 1150.0
    assert reporter.works(100).alone_rate == 1000.0
    assert reporter.works(110).alone_rate == pytest.approx(1030.0), "from then on it is a mean"


def test_a_change_of_the_running_set_begins_a_new_rate() -> None:
    """Broken: work done beside another program would count as done alone."""
    harness, reporter = alone(sharing=Sharing.CONCURRENT)
    reporter.works(100)
    harness.milliseconds(STEP_MS // 2)
    harness.client(wanted=True)
    harness.milliseconds(10)
    seen = reporter.report(10_000)
    assert (seen.rate, seen.alone_rate) == (1000.0, 1000.0), "10 ms of the new set are too short for a rate"


def test_impossible_reports_change_no_rate() -> None:
    """Broken: a client would make policies believe what it likes, or crash the coordinator."""
    harness, reporter = alone()
    reporter.works(100)
    harness.milliseconds(STEP_MS)
    assert reporter.report(-50).rate == 1000.0, "work does not shrink"
    assert reporter.report(50, lease_id=77).rate == 1000.0, "not its lease"
    reporter.works(0)
    assert reporter.works(100, busy=7.0).busy_alone == 1.0
    now_ns = harness.clock.now_ns
    late = events.Received(
        reporter.client.client, messages.Progress(0, 1, now_ns + (1 << 62), reporter.work + 5, 0, 0, 0)
    )
    harness.milliseconds(STEP_MS)
    harness.handle(late)
    assert reporter.client.seat().progress.measured_at_ns == harness.clock.now_ns, "no report is from the future"
    assert harness.gpu_snapshot().rules.policy_failures == 0


def test_people_see_work_over_time() -> None:
    """Broken: two programs that share the GPU in turns seem to be as fast as alone, or an idle one seems at work."""
    harness, *clients = contended(sharing=Sharing.EXCLUSIVE, quantum_ns=200 * MILLISECOND_NS)
    reporters = {client.client: Reporter(client) for client in clients}
    for _ in range(60):
        (holder,) = harness.gpu_snapshot().leases.holders
        reporters[holder].works(100)
        reporters[holder].works(100)
        harness.clients[holder].release(wanted=True)
    for client in clients:
        assert client.seat().progress.alone_rate == 1000.0
        assert client.seat().progress_normalised == pytest.approx(0.5, abs=0.05)
    harness.milliseconds(20_000)
    assert [client.seat().progress_normalised for client in clients] == [0.0, 0.0]
