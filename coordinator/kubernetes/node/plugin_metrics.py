"""The device plugin's own metrics.

Invariant: the number of series depends only on the served resources.

Non-goals: metrics of slots and pods, which the coordinator exports (coordinator/kubernetes/slots/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nvshare.coordinator.kubernetes.cluster.pods import Counts as WatchCounts


@dataclass(slots=True)
class Counts:
    """Counters by (resource, outcome).  gRPC's threads write them, one dictionary operation each."""

    allocations: dict[tuple[str, str], int] = field(default_factory=dict)
    registrations: dict[tuple[str, str], int] = field(default_factory=dict)

    def allocated(self, resource: str, outcome: str) -> None:
        """Counts an Allocate."""
        self.allocations[resource, outcome] = self.allocations.get((resource, outcome), 0) + 1

    def registered(self, resource: str, outcome: str) -> None:
        """Counts an attempt to register."""
        self.registrations[resource, outcome] = self.registrations.get((resource, outcome), 0) + 1


@dataclass(frozen=True, slots=True)
class Facts:
    """Values of one scrape besides the counters."""

    devices: Sequence[tuple[str, int, int]]
    """(resource, healthy, unhealthy)"""
    connected: bool
    coordinator_up: bool
    library: str | None
    slots: int
    slots_without_pod: int
    pod_resources_failures: int
    watch: WatchCounts | None = None
    """None: no watch of pods."""


class Collector:
    """Produces the metrics of each scrape."""

    def __init__(self, counts: Counts, ask: Callable[[], Facts]) -> None:
        self._counts = counts
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        facts = self._ask()
        devices = GaugeMetricFamily(
            "nvshare_plugin_devices", "Devices as listed to the kubelet", labels=("resource", "health")
        )
        for resource, healthy, unhealthy in facts.devices:
            devices.add_metric((resource, "healthy"), healthy)
            devices.add_metric((resource, "unhealthy"), unhealthy)
        yield devices
        for name, text, found in (
            ("allocations", "Answers to the kubelet's Allocate", self._counts.allocations),
            ("registrations", "Attempts to register with the kubelet", self._counts.registrations),
        ):
            family = CounterMetricFamily(f"nvshare_plugin_{name}", text, labels=("resource", "outcome"))
            for labels, count in sorted(found.copy().items()):
                family.add_metric(labels, count)
            yield family
        text = "Always 1; the hook that new containers get"
        info = GaugeMetricFamily("nvshare_plugin_library_info", text, labels=("version",))
        if facts.library is not None:
            info.add_metric((facts.library,), 1)
        yield info
        for name, text, value in (
            ("kubelet_connected", "1 while registered with the kubelet", float(facts.connected)),
            ("coordinator_up", "1 while the node's coordinator answers", float(facts.coordinator_up)),
            ("slots", "Slots that containers have", facts.slots),
            ("slots_without_pod", "Slots whose pod the kubelet has not named", facts.slots_without_pod),
        ):
            yield GaugeMetricFamily(f"nvshare_plugin_{name}", text, value=value)
        if facts.watch is not None:
            yield from _watch_metrics(facts.watch)
        text = "Failed PodResources calls to the kubelet"
        yield CounterMetricFamily("nvshare_plugin_pod_resources_failures", text, value=facts.pod_resources_failures)


def _watch_metrics(watch: WatchCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("nvshare_plugin_watched_pods", "Pods of this node that request a slot", value=watch.pods)
    for name, text, value in (
        ("pod_watch_lists", "Lists of pods requested from the API server", watch.lists),
        ("pod_watch_events", "Pod events received", watch.events),
        ("pod_watch_failures", "Failed requests to the API server", watch.failures),
        (
            "bad_annotations",
            "Invalid annotations",
            watch.bad_annotations,
        ),
    ):
        yield CounterMetricFamily(f"nvshare_plugin_{name}", text, value=value)
