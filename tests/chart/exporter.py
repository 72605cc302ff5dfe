"""Metrics of one node's coordinator, by its own collector: names, labels, number of series.

Non-goals: what dashboards or documents make of it.
"""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nvshare.coordinator.daemon import metrics
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kubernetes.node import plugin_metrics
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot
from nvshare.coordinator.kubernetes.slots.slot_book import Figures, SlotSnapshot
from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, Sharing
from nvshare.scheduler_policies import registry

SECOND = 1_000_000_000


def _uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def scrape(gpus: int, pods_per_gpu: int) -> str:
    """One scrape of a node whose slots are all taken, by a process each, with a hand-over behind it; 2 pods or more."""
    turns = Settings(policy="round_robin", sharing=Sharing.EXCLUSIVE)
    scheduler, observations = Scheduler(registry.create, turns), metrics.Observations(map(_uuid, range(gpus)))

    def tell(event: events.Event, now_ns: int) -> None:
        for command in scheduler.handle(event, now_ns):
            if isinstance(command, Notify):
                observations.observe(command.kind, command.values)

    slots: list[SlotSnapshot] = []
    for gpu in range(gpus):
        tell(events.GpuAdded(_uuid(gpu), "NVIDIA H200", 141 << 30, 141 << 30), SECOND)
        for pod in range(pods_per_gpu):
            client = gpu * pods_per_gpu + pod + 1
            hello = messages.Hello(messages.PROTOCOL_VERSION, "python", "python", 0, MemoryMode.MANAGED, 0, "")
            tell(events.ClientRegistered(client, hello, 1000 + client, 0), SECOND)
            tell(events.Received(client, messages.AttachGpu(0, _uuid(gpu), 1 << 30, 0, True, 0, 0, 0)), SECOND)
            slot = Slot(
                slot=f"{_uuid(gpu)}-{pod}",
                allocation=f"a{client}",
                allocated_at_s=0,
                gpus=(_uuid(gpu),),
                device_ids=(f"{_uuid(gpu)}::{pod}",),
                pod=PodRef(namespace="team", name=f"pod-{client}", container="main"),
            )
            slots.append(SlotSnapshot(slot, registered=True, figures=Figures()))
        for turn in range(2):  # the second one's release tells how long the hand-over to it took
            lease_id, at_ns = scheduler.snapshot(SECOND).gpus[gpu].leases.lease_id, (turn + 2) * SECOND
            tell(_released(gpu * pods_per_gpu + 1 + turn, lease_id, at_ns - 1), at_ns)
    registered = CollectorRegistry()
    picture = metrics.take(scheduler.snapshot(4 * SECOND), observations, tuple(slots))
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


def _released(client: int, lease_id: int, opened_at_ns: int) -> events.Received:
    return events.Received(
        client, messages.Release(0, lease_id, messages.ReleaseReason.REVOKED, True, True, 1, opened_at_ns, 1)
    )


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
