"""Prometheus metrics, made from a snapshot at each scrape.

Invariants: a scrape's thread never uses the engine; it asks the loop for a frozen picture.  A client's series exist
only while it is connected, so their number is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from nvshare.coordinator.engine.snapshot import ClientSnapshot, GpuSnapshot, SeatSnapshot, Snapshot
from nvshare.coordinator.kubernetes.slots import metrics
from nvshare.coordinator.kubernetes.slots.slot_book import SlotSnapshot
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.coordinator.system.users import user_name

_BOUNDS_MS: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
BOUNDS_NS: Final = tuple(int(bound * 1_000_000) for bound in _BOUNDS_MS)
_GPU: Final = ("gpu", "uuid")
_CLIENT: Final = ("gpu", "uuid", "client", "name", "pid", "user")
MAX_USERS: Final = 100
"""Users with a label of their own; further ones are `other`."""
Labels = tuple[str, ...]


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, with the upper bounds `BOUNDS_NS`."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_NS) + 1))
    sum_ns: int = 0

    def add(self, value_ns: int) -> None:
        self.counts[bisect_left(BOUNDS_NS, value_ns)] += 1
        self.sum_ns += value_ns

    def copy(self) -> Histogram:
        return Histogram(list(self.counts), self.sum_ns)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts in Prometheus's form."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*BOUNDS_NS, None), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound is None else repr(bound / 1e9), total))
        return found


class Observations:
    """Distributions of waits and drains for each GPU, from trace events.  For the loop's thread."""

    def __init__(self) -> None:
        self.waits: dict[str, Histogram] = {}
        self.drains: dict[str, Histogram] = {}

    def observe(self, kind: str, values: Mapping[str, Any]) -> None:
        """Adds one trace event."""
        if kind == "granted":
            self.waits.setdefault(values["uuid"], Histogram()).add(values["waited_ns"])
        elif kind == "released" and not values["idle"]:
            # A client reports its drain itself; the lease's time bounds a wrong figure.
            self.drains.setdefault(values["uuid"], Histogram()).add(min(values["drain_ns"], values["held_ns"]))


@dataclass(frozen=True, slots=True)
class Picture:
    """The data of one scrape."""

    snapshot: Snapshot
    waits: dict[str, Histogram]
    drains: dict[str, Histogram]
    slots: tuple[SlotSnapshot, ...] | None = None
    """None when the coordinator serves no slots."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Refused connections by reason; empty without a listener."""


def take(
    snapshot: Snapshot,
    observations: Observations,
    slots: tuple[SlotSnapshot, ...] | None = None,
    refusals: Mapping[str, int] | None = None,
) -> Picture:
    """Makes a picture.  For the loop's thread."""
    return Picture(
        snapshot,
        {uuid: histogram.copy() for uuid, histogram in observations.waits.items()},
        {uuid: histogram.copy() for uuid, histogram in observations.drains.items()},
        slots,
        dict(refusals or {}),
    )


class Collector:
    """The collector of prometheus_client.  `ask` gives a picture; an exception of it fails the scrape."""

    def __init__(self, ask: Callable[[], Picture]) -> None:
        self._ask = ask
        self._users: dict[int, str] = {}

    def _user(self, user_id: int) -> str:
        """Bounded: the label's values since the start are `MAX_USERS` names and `other`."""
        if user_id not in self._users and len(self._users) < MAX_USERS:
            self._users[user_id] = user_name(user_id)
        return self._users.get(user_id, "other")

    def describe(self) -> Iterable[Metric]:
        """Nothing: registration must not ask the loop."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        picture = self._ask()
        snapshot = picture.snapshot
        indices = {gpu.uuid: str(index) for index, gpu in enumerate(snapshot.gpus)}
        gpus = [((indices[gpu.uuid], gpu.uuid), gpu) for gpu in snapshot.gpus]
        seats = [
            (
                (
                    indices[seat.uuid],
                    seat.uuid,
                    str(client.client),
                    client.identity.name,
                    str(client.identity.process_id),
                    self._user(client.identity.user_id),
                ),
                client,
                seat,
            )
            for client in snapshot.clients
            for seat in client.seats
        ]
        yield GaugeMetricFamily("nvshare_clients", "Connected clients", value=len(snapshot.clients))
        yield GaugeMetricFamily(
            "nvshare_host_budget_bytes", "Budget of pinned host memory", value=snapshot.host_budget_bytes
        )
        yield GaugeMetricFamily(
            "nvshare_host_shared_bytes", "Pinned host memory given to clients", value=snapshot.host_shared_bytes
        )
        yield CounterMetricFamily(
            "nvshare_host_refused", "Refused requests for pinned host memory", value=snapshot.host_refused
        )
        refused = CounterMetricFamily(
            "nvshare_connections_refused", "Connections of hooks refused or cut", labels=("reason",)
        )
        for reason, count in picture.refusals.items():
            refused.add_metric((reason,), count)
        if picture.refusals:
            yield refused
        yield GaugeMetricFamily("nvshare_gangs", "Gangs with members", value=len(snapshot.gangs))
        yield CounterMetricFamily("nvshare_gang_turns", "Common turns of gangs", value=snapshot.gang_turns)
        yield CounterMetricFamily(
            "nvshare_gang_gather_seconds",
            "Time in which GPUs of a gang were kept free for its other GPUs",
            value=_seconds(snapshot.gang_gathered_ns),
        )
        yield from _gpu_gauges(gpus)
        yield from _gpu_counters(gpus)
        yield _histogram("nvshare_wait_seconds", "Time from a request to its grant", gpus, picture.waits)
        yield _histogram("nvshare_drain_seconds", "Time from closing the gate to idle", gpus, picture.drains)
        yield _handovers(gpus)
        yield from _client_metrics(seats)
        if picture.slots is not None:
            yield from metrics.families(picture.slots)
        yield self._host_shares(snapshot)

    def _host_shares(self, snapshot: Snapshot) -> Metric:
        labels = _CLIENT[2:]
        shares = GaugeMetricFamily("nvshare_client_host_share_bytes", "Its share of the host budget", labels=labels)
        for client in snapshot.clients:
            who = client.identity
            shares.add_metric(
                (str(client.client), who.name, str(who.process_id), self._user(who.user_id)), client.host_share_bytes
            )
        return shares


def _seconds(value_ns: int) -> float:
    return value_ns / 1e9


GpuRows = Sequence[tuple[Labels, GpuSnapshot]]
SeatRows = Sequence[tuple[Labels, ClientSnapshot, SeatSnapshot]]

_GPU_GAUGES: Final[tuple[tuple[str, str, Callable[[GpuSnapshot], float]], ...]] = (
    ("total_bytes", "Memory of the GPU", lambda g: g.memory.total_bytes),
    ("capacity_bytes", "Memory of the GPU for all clients together", lambda g: g.memory.capacity_bytes),
    ("clients", "Clients that use the GPU", lambda g: g.clients),
    ("waiting", "Clients that wait for a lease", lambda g: g.leases.waiting),
    ("contended", "1 while a client waits", lambda g: float(g.leases.waiting > 0)),
    ("holders", "Clients with a lease", lambda g: len(g.leases.holders)),
    ("running_clients", "Clients in the running set", lambda g: len(g.rules.members)),
    ("quantum_seconds", "The quantum in force", lambda g: _seconds(g.rules.quantum_ns)),
    ("switch_cost_seconds", "Average cost of a switch", lambda g: _seconds(g.rules.switch_cost_ns)),
    ("wait_max_seconds", "Longest wait since the start", lambda g: _seconds(g.statistics.max_wait_ns)),
    ("moving_orders", "Memory orders in progress", lambda g: g.memory.moving),
    (
        "switch_share_ratio",
        "Largest share of time for switching under an automatic quantum",
        lambda g: g.rules.switch_share,
    ),
    ("recovering", "1 while the coordinator waits for an earlier lease holder", lambda g: float(g.recovery.recovering)),
)

_GPU_COUNTERS: Final[tuple[tuple[str, str, Callable[[GpuSnapshot], float]], ...]] = (
    ("leases", "Leases granted", lambda g: g.statistics.grants),
    ("handovers", "Leases granted to another client than the previous one", lambda g: g.statistics.handovers),
    ("lease_seconds", "Time in which leases were held", lambda g: _seconds(g.statistics.held_ns)),
    ("revokes", "Leases revoked", lambda g: g.statistics.revokes),
    ("idle_releases", "Leases released early by an idle holder", lambda g: g.statistics.idle_releases),
    ("overdue_drains", "Drains that passed their deadline", lambda g: g.statistics.overdue),
    ("evicted_bytes", "Bytes moved off the GPU", lambda g: g.moves.evicted_bytes),
    ("restored_bytes", "Bytes moved onto the GPU", lambda g: g.moves.restored_bytes),
    ("move_seconds", "Time in which grants waited for memory", lambda g: _seconds(g.moves.moved_ns)),
    ("exposed_move_seconds", "Time of memory orders while a grant waited", lambda g: _seconds(g.moves.exposed_move_ns)),
    (
        "hidden_move_seconds",
        "Time of memory orders beside a running client",
        lambda g: _seconds(g.moves.hidden_move_ns),
    ),
    ("late_switches", "Grants whose memory had not moved in time", lambda g: g.moves.late_switches),
    ("failed_moves", "Memory orders that failed", lambda g: g.moves.failed_orders),
    ("refused_reservations", "Allocations refused for lack of room", lambda g: g.moves.refused_reservations),
    ("policy_failures", "Faulty policies that were replaced", lambda g: g.rules.policy_failures),
)


def _gpu_gauges(gpus: GpuRows) -> Iterator[Metric]:
    info = GaugeMetricFamily("nvshare_gpu_info", "Always 1", labels=(*_GPU, "name", "policy", "sharing"))
    memory = GaugeMetricFamily("nvshare_gpu_memory_bytes", "Memory of all clients", labels=(*_GPU, "kind"))
    for labels, gpu in gpus:
        info.add_metric((*labels, gpu.name, gpu.rules.policy, Sharing(gpu.rules.sharing).name.lower()), 1)
        for kind in ("allocated", "resident", "pinned", "host"):
            memory.add_metric((*labels, kind), getattr(gpu.memory, f"{kind}_bytes"))
        memory.add_metric((*labels, "evicted"), gpu.memory.allocated_bytes - gpu.memory.resident_bytes)
    yield info
    yield memory
    for name, text, read in _GPU_GAUGES:
        family = GaugeMetricFamily(f"nvshare_gpu_{name}", text, labels=_GPU)
        for labels, gpu in gpus:
            family.add_metric(labels, read(gpu))
        yield family


def _gpu_counters(gpus: GpuRows) -> Iterator[Metric]:
    for name, text, read in _GPU_COUNTERS:
        family = CounterMetricFamily(f"nvshare_gpu_{name}", text, labels=_GPU)
        for labels, gpu in gpus:
            family.add_metric(labels, read(gpu))
        yield family


def _histogram(name: str, text: str, gpus: GpuRows, found: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_GPU)
    for labels, gpu in gpus:
        histogram = found.get(gpu.uuid) or Histogram()
        family.add_metric(labels, histogram.buckets(), _seconds(histogram.sum_ns))
    return family


def _handovers(gpus: GpuRows) -> Metric:
    """Quantiles of the last samples."""
    family = SummaryMetricFamily("nvshare_handover_seconds", "End of a lease to the next open gate", labels=_GPU)
    for labels, gpu in gpus:
        ordered = sorted(gpu.leases.recent_handovers_ns)
        family.add_metric(labels, count_value=len(ordered), sum_value=_seconds(sum(ordered)))
        for quantile in (0.5, 0.99) if ordered else ():
            value = ordered[min(len(ordered) - 1, int(len(ordered) * quantile))]
            names = dict(zip(_GPU, labels, strict=True))
            family.add_sample("nvshare_handover_seconds", {**names, "quantile": str(quantile)}, _seconds(value))
    return family


_CLIENT_COUNTERS: Final[tuple[tuple[str, str, Callable[[SeatSnapshot], float]], ...]] = (
    ("leases", "Leases granted", lambda s: s.statistics.leases),
    ("lease_seconds", "Time in which it held the lease", lambda s: _seconds(s.statistics.used_ns)),
    ("wait_seconds", "Time in which it waited for a lease", lambda s: _seconds(s.statistics.waited_ns)),
    ("revokes", "Leases revoked", lambda s: s.statistics.revokes),
    ("idle_releases", "Leases released early", lambda s: s.statistics.idle_releases),
    ("overdue_drains", "Drains that passed their deadline", lambda s: s.statistics.overdue),
    ("submissions", "Gated calls in finished leases", lambda s: s.statistics.submissions),
    ("evicted_bytes", "Bytes moved off the GPU", lambda s: s.moves.moved_out_bytes),
    ("restored_bytes", "Bytes moved onto the GPU", lambda s: s.moves.moved_in_bytes),
    (
        "exposed_move_seconds",
        "Time of its memory orders while a grant waited",
        lambda s: _seconds(s.moves.exposed_move_ns),
    ),
    (
        "hidden_move_seconds",
        "Time of its memory orders beside a running client",
        lambda s: _seconds(s.moves.hidden_move_ns),
    ),
    ("failed_moves", "Its memory orders that failed", lambda s: s.moves.failed_orders),
)


def _client_metrics(seats: SeatRows) -> Iterator[Metric]:
    for name, text, read in _CLIENT_COUNTERS:
        counter = CounterMetricFamily(f"nvshare_client_{name}", text, labels=_CLIENT)
        for labels, _, seat in seats:
            counter.add_metric(labels, read(seat))
        yield counter
    memory = GaugeMetricFamily("nvshare_client_memory_bytes", "Memory of the client", labels=(*_CLIENT, "kind"))
    limit = GaugeMetricFamily("nvshare_client_limit_bytes", "Its limit; 0: none", labels=_CLIENT)
    lacking = GaugeMetricFamily(
        "nvshare_client_lacking_bytes", "Memory that it lacks beside immovable memory of others", labels=_CLIENT
    )
    shut_out = GaugeMetricFamily("nvshare_client_shut_out", "1 while it cannot run for lack of memory", labels=_CLIENT)
    longest = GaugeMetricFamily("nvshare_client_wait_max_seconds", "Its longest wait", labels=_CLIENT)
    priority = GaugeMetricFamily("nvshare_client_priority", "Its priority", labels=_CLIENT)
    weight = GaugeMetricFamily("nvshare_client_weight", "Its weight under fair_share", labels=_CLIENT)
    classes = GaugeMetricFamily("nvshare_client_class", "Always 1", labels=(*_CLIENT, "class"))
    waiting = GaugeMetricFamily("nvshare_client_waiting", "1 while it waits for the lease", labels=_CLIENT)
    for labels, client, seat in seats:
        for kind in ("allocated", "resident", "pinned", "host", "evicted"):
            memory.add_metric((*labels, kind), getattr(seat.memory, f"{kind}_bytes"))
        limit.add_metric(labels, seat.memory.limit_bytes)
        lacking.add_metric(labels, seat.memory.lacking_bytes)
        shut_out.add_metric(labels, float(seat.memory.shut_out))
        longest.add_metric(labels, _seconds(seat.statistics.max_wait_ns))
        priority.add_metric(labels, client.rank.priority)
        weight.add_metric(labels, client.rank.weight)
        classes.add_metric((*labels, client.rank.job_class.name.lower()), 1)
        waiting.add_metric(labels, float(seat.waiting_since_ns is not None))
    yield from (memory, limit, lacking, shut_out, longest, priority, weight, classes, waiting)
    yield from _progress(seats)


def _progress(seats: SeatRows) -> Iterator[Metric]:
    """Only what is measured: an unknown figure has no series."""
    ratio = GaugeMetricFamily("nvshare_client_progress_ratio", "Its rate now by its rate alone", labels=_CLIENT)
    busy = GaugeMetricFamily(
        "nvshare_client_busy_ratio", "Share of the time in which it kept the GPU busy when it ran alone", labels=_CLIENT
    )
    for labels, _, seat in seats:
        if seat.progress.normalised:
            ratio.add_metric(labels, seat.progress.normalised)
        if seat.progress.busy_alone:
            busy.add_metric(labels, seat.progress.busy_alone)
    yield from (ratio, busy)
