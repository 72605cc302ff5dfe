"""Metrics from pictures of the core, read with Prometheus' own parser."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nvshare.coordinator.daemon import metrics
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.registry import create
from tests.harness import GPU, Harness, ScriptedClient

UNMEASURED = ("nvshare_client_progress_ratio", "nvshare_client_busy_ratio")


class Node(Harness):
    """One GPU in turns of 100 ms, and what is observed of it."""

    def __init__(self) -> None:
        super().__init__(create)
        self.observations = metrics.Observations([GPU])
        self.handle(events.GpuAdded(GPU, 'card "0"\n', 8 << 30, 6 << 30))

    def handle(self, event: events.Event) -> list[commands.Command]:
        out = super().handle(event)
        for command in out:
            if isinstance(command, commands.Notify):
                self.observations.observe(command.kind, command.values)
        return out

    def twins(self, *users: int) -> list[ScriptedClient]:
        """Programs of one name that want the GPU."""
        return [self.client("twin", wanted=True, user_id=user) for user in users]

    def scrape(self, *, hide_names: bool = False) -> dict[str, Any]:
        registered = CollectorRegistry()
        picture = metrics.take(self.scheduler.snapshot(self.clock.now_ns), self.observations, hide_names=hide_names)
        registered.register(metrics.Collector(lambda: picture))
        text = generate_latest(registered).decode()
        return {family.name: family for family in text_string_to_metric_families(text)}


def test_waits_and_drains_fall_into_their_buckets() -> None:
    """Broken if a distribution were wrong, or not cumulative as Prometheus has it."""
    node = Node()
    first, _ = node.twins(0, 0)
    node.milliseconds(102)
    first.release(wanted=True, drain_ns=2 * MILLISECOND_NS)
    found = node.scrape()
    waits = {s.labels["le"]: s.value for s in found["nvshare_wait_seconds"].samples if s.name.endswith("_bucket")}
    assert (waits["0.0001"], waits["0.1"], waits["0.3"], waits["+Inf"]) == (1, 1, 2, 2)
    drains = {s.labels["le"]: s.value for s in found["nvshare_drain_seconds"].samples if s.name.endswith("_bucket")}
    assert (drains["0.001"], drains["0.003"], drains["+Inf"]) == (0, 1, 1)
    total = next(s.value for s in found["nvshare_wait_seconds"].samples if s.name.endswith("_sum"))
    assert total == pytest.approx(0.102)


def test_a_client_cannot_report_a_drain_longer_than_its_lease() -> None:
    """Broken if one client's lie could spoil the sum for ever."""
    node = Node()
    (client,) = node.twins(0)
    node.milliseconds(5)
    client.release(drain_ns=1 << 60)
    sums = [s.value for s in node.scrape()["nvshare_drain_seconds"].samples if s.name.endswith("_sum")]
    assert sums == [pytest.approx(0.005)]


def test_clients_of_one_name_are_told_apart_and_leave_nothing_behind() -> None:
    """Broken if two clients made one series twice, which fails the scrape, or a gone one stayed."""
    node = Node()
    clients = node.twins(*[0] * 5)
    samples = node.scrape()["nvshare_client_leases"].samples
    assert len({tuple(sorted(s.labels.items())) for s in samples}) == len(samples) == 5
    for client in clients:
        client.die()
    assert node.scrape()["nvshare_client_leases"].samples == []


def test_the_users_label_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if the number of series grew with the users of a cluster, or a user had no name."""
    monkeypatch.setattr(metrics, "MAX_USERS", 2)
    node = Node()
    node.twins(0, 0, 4_000_001, 4_000_002, 4_000_003)
    found = node.scrape()
    for name in ("nvshare_client_leases", "nvshare_client_host_share_bytes"):
        labels = [s.labels["user"] for s in found[name].samples]
        assert labels == ["root", "root", "4000001", "other", "other"]


def test_new_series_of_a_user_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a user who reconnects in a loop fills Prometheus, or takes the series of other users."""
    monkeypatch.setattr(metrics, "MAX_NEW", 2)
    node = Node()
    (other,) = node.twins(8)
    seen = set()
    for _ in range(30):
        (client,) = node.twins(7)
        found = node.scrape()
        shown = {sample.labels["client"] for sample in found["nvshare_client_leases"].samples}
        seen |= shown
        assert str(other.client) in shown
        assert found["nvshare_clients_unlisted"].samples[0].value == 2 - len(shown)
        client.die()
        node.advance(metrics.NEW_PERIOD_NS // 10)
    assert len(seen) == 1 + 2 + 2, "two at once, one more every ten rounds"


def test_names_are_hidden_and_series_stay_distinct() -> None:
    """Broken: `hide_other_users` hides names from nvshare-ctl, and a port that every user reads shows them."""
    node = Node()
    node.twins(0, 0)
    samples = node.scrape(hide_names=True)["nvshare_client_leases"].samples
    assert [(s.labels["client"], s.labels["name"], s.labels["pid"]) for s in samples] == [
        ("1", "(hidden)", "0"),
        ("2", "(hidden)", "0"),
    ]


def test_every_family_is_named_and_documented() -> None:
    """Broken if a series broke the naming rules of Prometheus, or came without a description."""
    node = Node()
    node.twins(0)
    for name, family in node.scrape().items():
        assert name.startswith("nvshare_")
        assert family.documentation
        assert family.samples or name in UNMEASURED
        assert not name.endswith(("_ns", "_ms", "_us", "_total"))


def test_measured_progress_and_class_are_exported() -> None:
    """Broken if nobody could plot what sharing costs a program, or an unknown figure were shown as 0."""
    node = Node()
    (client,) = node.twins(0)
    node.handle(events.Set("class", "interactive", client=client.client))
    client.progress(client.seat().lease_id, node.clock.now_ns, 0, 0, 0)
    for count in (1, 2):
        node.milliseconds(100)
        busy_ns = count * 50 * MILLISECOND_NS
        client.progress(client.seat().lease_id, node.clock.now_ns, 1000 * count, busy_ns, 2 * busy_ns)
    found = node.scrape()
    assert [s.value for s in found["nvshare_client_progress_ratio"].samples] == [pytest.approx(1.0)]
    assert [s.value for s in found["nvshare_client_busy_ratio"].samples] == [pytest.approx(0.5)]
    assert [s.labels["class"] for s in found["nvshare_client_class"].samples] == ["interactive"]
    assert [s.value for s in found["nvshare_gpu_running_clients"].samples] == [1]


def test_moved_bytes_and_move_times_are_shown_for_gpu_and_client() -> None:
    """Broken if an operator could not tell moves that are waited for from those that are not."""
    node = Node()
    one, two = (node.client(mode=MemoryMode.SWAP, resident=size, host=(4 << 30) - size) for size in (4 << 30, 1 << 30))
    one.request()
    two.request()
    two.comes_to(3 << 29, at_rest=False)  # into what is free, beside the holder
    node.milliseconds(20)
    two.comes_to(3 << 29)
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
