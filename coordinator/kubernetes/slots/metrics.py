"""Prometheus metrics by slot: its pod, its GPU use, and whether its hook has registered.

Invariant: one series a metric and slot, and for `nvshare_slot_info` also a GPU.  The device plugin's slots bound the
number of series.

Non-goals: metrics by process (daemon/metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from nvshare.coordinator.kubernetes.slots.slot_book import SlotSnapshot
from nvshare.coordinator.system.http.families import Row, family
from nvshare.coordinator.system.http.families import families as table

_SLOT: Final = ("slot", "namespace", "pod", "container")

_ROWS: Final[tuple[Row, ...]] = (
    (Gauge, "clients", "Registered processes of the slot", lambda s: s.figures.clients),
    (Gauge, "waiting", "Leases that processes of the slot wait for", lambda s: s.figures.waiting),
    (Gauge, "limit_bytes", "Memory limit of the slot on each of its GPUs; 0: no limit", lambda s: s.slot.limit_bytes),
    (
        Gauge, "unregistered", "1 while a container runs whose hook has not registered: its GPU work is not scheduled",
        lambda s: float(s.slot.pod is not None and not s.registered),
    ),
    (Counter, "refused_gpus", "Attempts of its programs to use a GPU outside of the slot", lambda s: s.refused),
    (Counter, "leases", "Leases granted to the slot", lambda s: s.figures.leases),
    (Counter, "lease_seconds", "Time that the slot held leases", lambda s: s.figures.used_ns),
    (Counter, "wait_seconds", "Time that the slot waited for leases", lambda s: s.figures.waited_ns),
    (Counter, "submissions", "GPU calls in finished leases", lambda s: s.figures.submissions),
)  # fmt: skip


def families(slots: Sequence[SlotSnapshot], *, hide_names: bool = False) -> Iterator[Metric]:
    """All families; without samples if there are no slots.  `hide_names`: those of pods."""
    named = [(_labels(picture, hide_names=hide_names), picture) for picture in slots if not picture.removed]
    gpus = (((*labels, uuid), 1) for labels, picture in named for uuid in picture.slot.gpus)
    yield family(Gauge, "nvshare_slot_info", "Always 1; the GPUs of a slot", (*_SLOT, "uuid"), gpus)
    memory = (
        ((*labels, kind), getattr(picture.figures, f"{kind}_bytes"))
        for labels, picture in named
        for kind in ("allocated", "resident", "pinned", "host")
    )
    yield family(Gauge, "nvshare_slot_memory_bytes", "Memory of the slot's processes", (*_SLOT, "kind"), memory)
    yield from table("nvshare_slot", _ROWS, _SLOT, named)


def _labels(picture: SlotSnapshot, *, hide_names: bool) -> tuple[str, str, str, str]:
    pod = None if hide_names else picture.slot.pod
    return (picture.slot.slot, *((pod.namespace, pod.name, pod.container) if pod else ("", "", "")))
