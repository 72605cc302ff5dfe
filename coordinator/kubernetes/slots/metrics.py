"""Prometheus metrics by slot: its pod, its GPU use, and whether its hook has registered.

Invariant: one series a metric and slot, and for `nvshare_slot_info` also a GPU.  The device plugin's slots bound the
number of series.

Non-goals: metrics by process (daemon/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nvshare.coordinator.kubernetes.slots.slot_book import SlotSnapshot

_SLOT: Final = ("slot", "namespace", "pod", "container")

_GAUGES: Final[tuple[tuple[str, str, Callable[[SlotSnapshot], float]], ...]] = (
    ("clients", "Registered processes of the slot", lambda s: s.figures.clients),
    ("waiting", "Leases that processes of the slot wait for", lambda s: s.figures.waiting),
    ("limit_bytes", "Memory limit of the slot on each of its GPUs; 0: no limit", lambda s: s.slot.limit_bytes),
    (
        "unregistered",
        "1 while a container runs whose hook has not registered: its GPU work is not scheduled",
        lambda s: float(s.slot.pod is not None and not s.registered),
    ),
)

_COUNTERS: Final[tuple[tuple[str, str, Callable[[SlotSnapshot], float]], ...]] = (
    ("leases", "Leases granted to the slot", lambda s: s.figures.leases),
    ("lease_seconds", "Time that the slot held leases", lambda s: s.figures.used_ns / 1e9),
    ("wait_seconds", "Time that the slot waited for leases", lambda s: s.figures.waited_ns / 1e9),
    ("submissions", "Gated calls in finished leases", lambda s: s.figures.submissions),
)


def families(slots: Sequence[SlotSnapshot]) -> Iterator[Metric]:
    """All families; without samples if there are no slots."""
    info = GaugeMetricFamily("nvshare_slot_info", "Always 1; the GPUs of a slot", labels=(*_SLOT, "uuid"))
    memory = GaugeMetricFamily("nvshare_slot_memory_bytes", "Memory of the slot's processes", labels=(*_SLOT, "kind"))
    for picture in slots:
        labels = _labels(picture)
        for uuid in picture.slot.gpus:
            info.add_metric((*labels, uuid), 1)
        for kind in ("allocated", "resident", "pinned", "host"):
            memory.add_metric((*labels, kind), getattr(picture.figures, f"{kind}_bytes"))
    yield info
    yield memory
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(f"nvshare_slot_{name}", text, labels=_SLOT)
        for picture in slots:
            gauge.add_metric(_labels(picture), read(picture))
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(f"nvshare_slot_{name}", text, labels=_SLOT)
        for picture in slots:
            counter.add_metric(_labels(picture), read(picture))
        yield counter


def _labels(picture: SlotSnapshot) -> tuple[str, str, str, str]:
    pod = picture.slot.pod
    return (picture.slot.slot, *((pod.namespace, pod.name, pod.container) if pod else ("", "", "")))
