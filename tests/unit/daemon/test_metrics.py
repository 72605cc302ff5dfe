"""Metrics from pictures of the core, read with Prometheus' own parser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nvshare.coordinator.daemon import metrics
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, Sharing
from nvshare.scheduler_policies import registry

GPU = "GPU-00000000-0000-0000-0000-000000000000"
MS = 1_000_000
UNMEASURED = ("nvshare_client_progress_ratio", "nvshare_client_busy_ratio")


class Node:
    """A scheduler, and what is observed of it, on a clock of the test's own."""

    def __init__(self) -> None:
        turns = Settings(policy="round_robin", sharing=Sharing.EXCLUSIVE, quantum_ns=100 * MS)
        self.scheduler = Scheduler(registry.create, turns)
        self.observations = metrics.Observations([GPU])
        self.now_ns = 1_000 * MS
        self.do(events.GpuAdded(GPU, 'card "0"\n', 8 << 30, 6 << 30))

    def do(self, event: events.Event) -> None:
        for command in self.scheduler.handle(event, self.now_ns):
            if isinstance(command, Notify):
                self.observations.observe(command.kind, command.values)

    def client(self, number: int, user: int = 0, *, memory: tuple[int, int] | None = None) -> None:
        """A program that wants the GPU; with allocated and resident bytes: one in mode `swap` that does not."""
        mode, wanted = (MemoryMode.MANAGED, True) if memory is None else (MemoryMode.SWAP, False)
        hello = messages.Hello(messages.PROTOCOL_VERSION, "twin", "twin", 0, mode, 0, "")
        self.do(events.ClientRegistered(number, hello, 100 + number, user))
        self.do(events.Received(number, messages.AttachGpu(0, GPU, 1 << 30, 0, wanted, *(memory or (0, 0)), 0)))

    def scrape(self, *, hide_names: bool = False) -> dict[str, Any]:
        registered = CollectorRegistry()
        picture = metrics.take(self.scheduler.snapshot(self.now_ns), self.observations, hide_names=hide_names)
        registered.register(metrics.Collector(lambda: picture))
        text = generate_latest(registered).decode()
        return {family.name: family for family in text_string_to_metric_families(text)}


def released(lease_id: int, *, drain_ns: int) -> events.Received:
    reason = messages.ReleaseReason.REVOKED
    return events.Received(1, messages.Release(0, lease_id, reason, True, True, drain_ns, 0, 3))


def test_waits_and_drains_fall_into_their_buckets() -> None:
    """Broken if a distribution were wrong, or not cumulative as Prometheus has it."""
    node = Node()
    node.client(1)
    node.client(2)
    node.now_ns += 150 * MS
    node.do(events.TimerFired())
    node.now_ns += 2 * MS
    node.do(released(1, drain_ns=2 * MS))
    found = node.scrape()
    waits = {s.labels["le"]: s.value for s in found["nvshare_wait_seconds"].samples if s.name.endswith("_bucket")}
    assert (waits["0.0001"], waits["0.1"], waits["0.3"], waits["+Inf"]) == (1, 1, 2, 2)
    drains = {s.labels["le"]: s.value for s in found["nvshare_drain_seconds"].samples if s.name.endswith("_bucket")}
    assert (drains["0.001"], drains["0.003"], drains["+Inf"]) == (0, 1, 1)
    total = next(s.value for s in found["nvshare_wait_seconds"].samples if s.name.endswith("_sum"))
    assert total == pytest.approx(0.152)


def test_a_client_cannot_report_a_drain_longer_than_its_lease() -> None:
    """Broken if one client's lie could spoil the sum for ever."""
    node = Node()
    node.client(1)
    node.now_ns += 5 * MS
    node.do(released(1, drain_ns=1 << 60))
    sums = [s.value for s in node.scrape()["nvshare_drain_seconds"].samples if s.name.endswith("_sum")]
    assert sums == [pytest.approx(0.005)]


def test_clients_of_one_name_are_told_apart_and_leave_nothing_behind() -> None:
    """Broken if two clients made one series twice, which fails the scrape, or a gone one stayed."""
    node = Node()
    for number in range(1, 6):
        node.client(number)
    samples = node.scrape()["nvshare_client_leases"].samples
    assert len({tuple(sorted(s.labels.items())) for s in samples}) == len(samples) == 5
    for number in range(1, 6):
        node.do(events.ClientGone(number))
    assert node.scrape()["nvshare_client_leases"].samples == []


def test_the_users_label_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if the number of series grew with the users of a cluster, or a user had no name."""
    monkeypatch.setattr(metrics, "MAX_USERS", 2)
    node = Node()
    for number, user in enumerate((0, 0, 4_000_001, 4_000_002, 4_000_003), 1):
        node.client(number, user)
    found = node.scrape()
    for name in ("nvshare_client_leases", "nvshare_client_host_share_bytes"):
        labels = [s.labels["user"] for s in found[name].samples]
        assert labels == ["root", "root", "4000001", "other", "other"]


def test_new_series_of_a_user_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a user who reconnects in a loop fills Prometheus, or takes the series of other users."""
    monkeypatch.setattr(metrics, "MAX_NEW", 2)
    node = Node()
    seen = set()
    for number in range(1, 60, 2):
        for client, user in ((number, 7), (number + 1, 8)):
            if user == 7 or number == 1:
                node.client(client, user)
        found = node.scrape()
        samples = found["nvshare_client_leases"].samples
        seen |= {s.labels["client"] for s in samples}
        assert "2" in {s.labels["client"] for s in samples}
        assert found["nvshare_clients_unlisted"].samples[0].value == len(node.scheduler.snapshot(0).clients) - len(
            samples
        )
        node.do(events.ClientGone(number))
        node.now_ns += metrics.NEW_PERIOD_NS // 10
    assert len(seen) == 1 + 2 + 2, "two at once, one more every ten rounds"


def test_names_are_hidden_and_series_stay_distinct() -> None:
    """Broken: `hide_other_users` hides names from nvshare-ctl, and a port that every user reads shows them."""
    node = Node()
    node.client(1)
    node.client(2)
    samples = node.scrape(hide_names=True)["nvshare_client_leases"].samples
    assert [(s.labels["client"], s.labels["name"], s.labels["pid"]) for s in samples] == [
        ("1", "(hidden)", "0"),
        ("2", "(hidden)", "0"),
    ]


def test_every_family_is_named_and_documented() -> None:
    """Broken if a series broke the naming rules of Prometheus, or came without a description."""
    node = Node()
    node.client(1)
    for name, family in node.scrape().items():
        assert name.startswith("nvshare_")
        assert family.documentation
        assert family.samples or name in UNMEASURED
        assert not name.endswith(("_ns", "_ms", "_us", "_total"))


def test_measured_progress_and_class_are_exported() -> None:
    """Broken if nobody could plot what sharing costs a program, or an unknown figure were shown as 0."""
    node = Node()
    node.client(1)
    node.do(events.Set("class", "interactive", client=1))
    for at_ms, work in ((0, 0), (100, 1000), (200, 2000)):
        node.now_ns = (1_000 + at_ms) * MS
        node.do(events.Received(1, messages.Progress(0, 1, node.now_ns, work, at_ms * MS // 2, at_ms * MS, 0)))
    found = node.scrape()
    assert [s.value for s in found["nvshare_client_progress_ratio"].samples] == [pytest.approx(1.0)]
    assert [s.value for s in found["nvshare_client_busy_ratio"].samples] == [pytest.approx(0.5)]
    assert [s.labels["class"] for s in found["nvshare_client_class"].samples] == ["interactive"]
    assert [s.value for s in found["nvshare_gpu_running_clients"].samples] == [1]


def test_moved_bytes_and_move_times_are_shown_for_gpu_and_client() -> None:
    """Broken if an operator could not tell moves that are waited for from those that are not."""
    node = Node()
    for number, resident in ((1, 4 << 30), (2, 1 << 30)):
        node.client(number, memory=(4 << 30, resident))
    node.do(events.Received(1, messages.Request(0)))
    node.do(events.Received(2, messages.Request(0)))
    # Into what is free, beside the holder.
    half = messages.State(0, 1, 4 << 30, 3 << 29, 0, 5 << 29, moved_in_bytes=1 << 29, at_rest=False)
    node.do(events.Received(2, half))
    node.now_ns += 20 * MS
    node.do(events.Received(2, replace(half, at_rest=True)))
    found = node.scrape()

    def value(name: str, **labels: str) -> float:
        (sample,) = (
            s for f in found.values() for s in f.samples if s.name == name and labels.items() <= s.labels.items()
        )
        return float(sample.value)

    assert (
        value("nvshare_gpu_restored_bytes_total") == value("nvshare_client_restored_bytes_total", client="2") == 1 << 29
    )
    for family in ("nvshare_gpu", "nvshare_client"):
        labels = {"client": "2"} if family == "nvshare_client" else {}
        assert value(f"{family}_hidden_move_seconds_total", **labels) == 0.02
        assert value(f"{family}_exposed_move_seconds_total", **labels) == 0
    assert value("nvshare_client_memory_bytes", client="2", kind="evicted") == (5 << 29)
    assert value("nvshare_gpu_late_switches_total") == 0
