"""The device plugin's own metrics.

Invariant: the number of series depends only on the served resources.

Non-goals: metrics of slots and pods, which the coordinator exports (coordinator/kubernetes/slots/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from nvshare.coordinator.kubernetes.cluster.pods import WatchCounts
from nvshare.coordinator.system.http.families import Row, families, family


@dataclass(slots=True)
class KubeletCounts:
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

    def __init__(self, counts: KubeletCounts, ask: Callable[[], Facts]) -> None:
        self._counts = counts
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        facts = self._ask()
        devices = [
            ((resource, health), count)
            for resource, *counts in facts.devices
            for health, count in zip(("healthy", "unhealthy"), counts, strict=True)
        ]
        text = "Devices as listed to the kubelet"
        yield family(Gauge, "nvshare_plugin_devices", text, ("resource", "health"), devices)
        for name, text, found in (
            ("allocations", "Answers to the kubelet's Allocate", self._counts.allocations),
            ("registrations", "Attempts to register with the kubelet", self._counts.registrations),
        ):
            counted = sorted(found.copy().items())
            yield family(Counter, f"nvshare_plugin_{name}", text, ("resource", "outcome"), counted)
        text = "Always 1; the hook that new containers get"
        installed = [] if facts.library is None else [((facts.library,), 1)]
        yield family(Gauge, "nvshare_plugin_library_info", text, ("version",), installed)
        yield from families("nvshare_plugin", _ROWS, (), [((), facts)])
        if facts.watch is not None:
            yield from families("nvshare_plugin", _WATCH_ROWS, (), [((), facts.watch)])


_ROWS: Final[tuple[Row, ...]] = (
    (Gauge, "kubelet_connected", "1 while registered with the kubelet", lambda f: float(f.connected)),
    (Gauge, "coordinator_up", "1 while the node's coordinator answers", lambda f: float(f.coordinator_up)),
    (Gauge, "slots", "Slots that containers have", lambda f: f.slots),
    (Gauge, "slots_without_pod", "Slots whose pod the kubelet has not named", lambda f: f.slots_without_pod),
    (
        Counter, "pod_resources_failures", "Failed PodResources calls to the kubelet",
        lambda f: f.pod_resources_failures,
    ),
)  # fmt: skip
_WATCH_ROWS: Final[tuple[Row, ...]] = (
    (Gauge, "watched_pods", "Pods of this node that request a slot", lambda w: w.pods),
    (Counter, "pod_watch_events", "Pod events received", lambda w: w.events),
    (Counter, "pod_watch_failures", "Failed requests to the API server", lambda w: w.failures),
    (Counter, "bad_annotations", "Invalid annotations", lambda w: w.bad_annotations),
)
