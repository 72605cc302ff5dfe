"""Metrics of one node's coordinator, by its own collector: names, labels, number of series.

Non-goals: what dashboards or documents make of it.
"""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nvshare.coordinator.daemon import metrics
from nvshare.coordinator.kubernetes.node import plugin_metrics
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot
from nvshare.coordinator.kubernetes.slots.slot_book import Figures, SlotSnapshot
from nvshare.coordinator.model.commands import Notify
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness

SECOND = 1_000_000_000


def _uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def scrape(gpus: int, pods_per_gpu: int) -> str:
    """One scrape of a node whose slots are all taken, by a process each, with a hand-over behind it; 2 pods or more."""
    harness = Harness(create, check_invariants=False)
    slots: list[SlotSnapshot] = []
    for gpu in range(gpus):
        harness.gpu(_uuid(gpu), 141 << 30)
        clients = [harness.client("python", attach=False) for _ in range(pods_per_gpu)]
        for pod, client in enumerate(clients):
            client.attach(_uuid(gpu), wanted=True)
            slot = Slot(
                slot=f"{_uuid(gpu)}-{pod}",
                allocation=f"a{client.client}",
                allocated_at_s=0,
                gpus=(_uuid(gpu),),
                device_ids=(f"{_uuid(gpu)}::{pod}",),
                pod=PodRef(namespace="team", name=f"pod-{client.client}", container="main"),
            )
            slots.append(SlotSnapshot(slot, registered=True, figures=Figures()))
        for client in clients[:2]:  # the second one's release tells how long the hand-over to it took
            harness.advance(SECOND)
            client.release(wanted=True, drain_ns=1, opened_at_ns=harness.clock.now_ns - 1)
    observations = metrics.Observations(map(_uuid, range(gpus)))
    for command in harness.commands:
        if isinstance(command, Notify):
            observations.observe(command.kind, command.values)
    registered = CollectorRegistry()
    picture = metrics.take(harness.scheduler.snapshot(harness.clock.now_ns), observations, tuple(slots))
    registered.register(metrics.Collector(lambda: picture))
    return generate_latest(registered).decode()


def scrape_plugin() -> str:
    """One scrape of a device plugin with one resource that has registered, allocated and refused."""
    counts = plugin_metrics.KubeletCounts()
    counts.registered("nvshare.com/gpu", "ok")
    for outcome in ("ok", "refused"):
        counts.allocated("nvshare.com/gpu", outcome)
    facts = plugin_metrics.Facts(
        devices=[("nvshare.com/gpu", 4, 0)],
        connected=True,
        coordinator_up=True,
        library="0.1.0-0123456789ab",
        slots=4,
        slots_without_pod=0,
        pod_resources_failures=0,
    )
    registered = CollectorRegistry()
    registered.register(plugin_metrics.Collector(counts, lambda: facts))
    return generate_latest(registered).decode()


def series(text: str) -> dict[str, set[str]]:
    """Name of each series -> its labels, as Prometheus stores them."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def count(text: str) -> int:
    """How many series Prometheus makes of it."""
    return len([line for line in text.splitlines() if line and not re.match(r"#", line)])
