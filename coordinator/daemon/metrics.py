"""Prometheus metrics, made from a snapshot at each scrape.

Invariants: a scrape's thread never uses the engine; it asks the loop for a frozen picture, and reads the histograms
under their own locks.  A client's series exist only while it is connected, and users get new ones at a bounded rate,
because Prometheus keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric, SummaryMetricFamily

from nvshare.coordinator.daemon.control.rights import HIDDEN
from nvshare.coordinator.engine.snapshot import ClientSnapshot, GpuSnapshot, SeatSnapshot, Snapshot
from nvshare.coordinator.kubernetes.slots import metrics
from nvshare.coordinator.kubernetes.slots.slot_book import SlotSnapshot
from nvshare.coordinator.system.http.families import Row, families, family
from nvshare.coordinator.system.users import user_name

_BOUNDS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_GPU: Final = ("gpu", "uuid")
_CLIENT: Final = ("gpu", "uuid", "client", "name", "pid", "user")
MAX_USERS: Final = 100
"""Users with a label of their own; further ones are `other`."""
MAX_NEW: Final = 128
NEW_PERIOD_NS: Final = 10_000_000_000
"""A user or slot gets series for so many new clients at once, and for one more in each period."""
Labels = tuple[str, ...]
disable_created_metrics()  # type: ignore[no-untyped-call]  # of histograms, in every registry of the process


class Observations:
    """Distributions of waits and drains for each GPU, from trace events.  For the loop's thread, but for `families`."""

    def __init__(self, uuids: Iterable[str]) -> None:
        """`uuids`: the GPUs, by index."""
        self.families = (
            Histogram("nvshare_wait_seconds", "Time from a request to its grant", _GPU, registry=None,
                      buckets=_BOUNDS_S),
            Histogram("nvshare_drain_seconds", "Time from a revoke to the end of the work", _GPU, registry=None,
                      buckets=_BOUNDS_S),
        )  # fmt: skip
        self._of_gpus = {
            uuid: tuple(each.labels(str(index), uuid) for each in self.families) for index, uuid in enumerate(uuids)
        }
        self._listed: set[int] = set()
        self._due_ns: dict[str | int, int] = {}  # slot or user -> when all its periods have passed

    def listed(self, snapshot: Snapshot) -> frozenset[int]:
        """The clients that have series of their own."""
        now_ns = snapshot.now_ns
        self._listed &= {client.client for client in snapshot.clients}
        self._due_ns = {owner: due_ns for owner, due_ns in self._due_ns.items() if due_ns > now_ns}
        for client in snapshot.clients:
            owner = client.identity.group or client.identity.user_id
            due_ns = self._due_ns.get(owner, now_ns)
            if client.client not in self._listed and due_ns - now_ns <= (MAX_NEW - 1) * NEW_PERIOD_NS:
                self._listed.add(client.client)
                self._due_ns[owner] = due_ns + NEW_PERIOD_NS
        return frozenset(self._listed)

    def observe(self, kind: str, values: Mapping[str, Any]) -> None:
        """Adds one trace event."""
        if kind == "granted":
            self._of_gpus[values["uuid"]][0].observe(_seconds(values["waited_ns"]))
        elif kind == "released" and not values["idle"]:
            # A client reports its drain itself; the lease's time bounds a wrong figure.
            self._of_gpus[values["uuid"]][1].observe(_seconds(min(values["drain_ns"], values["held_ns"])))


@dataclass(frozen=True, slots=True)
class Picture:
    """The data of one scrape."""

    snapshot: Snapshot
    distributions: Sequence[Histogram]
    """The histograms, which have locks of their own."""
    slots: tuple[SlotSnapshot, ...] | None = None
    """None when the coordinator serves no slots."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Refused connections by reason; empty without a listener."""
    listed: frozenset[int] = frozenset()
    """Clients with series of their own."""
    hide_names: bool = False


def take(
    snapshot: Snapshot,
    observations: Observations,
    slots: tuple[SlotSnapshot, ...] | None = None,
    refusals: Mapping[str, int] | None = None,
    *,
    hide_names: bool = False,
) -> Picture:
    """Makes a picture.  For the loop's thread."""
    return Picture(
        snapshot,
        observations.families,
        slots,
        dict(refusals or {}),
        observations.listed(snapshot),
        hide_names,
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
        clients = [
            (self._labels(client, hide_names=picture.hide_names), client)
            for client in snapshot.clients
            if client.client in picture.listed
        ]
        seats = [
            ((indices[seat.uuid], seat.uuid, *labels), client, seat)
            for labels, client in clients
            for seat in client.seats
        ]
        yield from families("nvshare", _NODE, (), [((), snapshot)])
        unlisted = [((), len(snapshot.clients) - len(clients))]
        yield family(Gauge, "nvshare_clients_unlisted", "Clients without series of their own", (), unlisted)
        if refusals := picture.refusals:
            text = "Connections of hooks refused or cut"
            counts = (((reason,), count) for reason, count in refusals.items())
            yield family(Counter, "nvshare_connections_refused", text, ("reason",), counts)
        yield from _gpu_metrics(gpus)
        for distribution in picture.distributions:
            yield from distribution.collect()
        yield _handovers(gpus)
        yield from _client_metrics(seats)
        if picture.slots is not None:
            yield from metrics.families(picture.slots, hide_names=picture.hide_names)
        shares = ((labels, client.host_share_bytes) for labels, client in clients)
        text = "Its share of the host budget"
        yield family(Gauge, "nvshare_client_host_share_bytes", text, _CLIENT[2:], shares)

    def _labels(self, client: ClientSnapshot, *, hide_names: bool) -> Labels:
        who = client.identity
        name, process_id = (HIDDEN, 0) if hide_names else (who.name, who.process_id)
        return str(client.client), name, str(process_id), self._user(who.user_id)


def _seconds(value_ns: int) -> float:
    return value_ns / 1e9


GpuRows = Sequence[tuple[Labels, GpuSnapshot]]
SeatRows = Sequence[tuple[Labels, ClientSnapshot, SeatSnapshot]]

_NODE: Final[tuple[Row, ...]] = (
    (Gauge, "clients", "Connected clients", lambda s: len(s.clients)),
    (Gauge, "host_budget_bytes", "Budget of pinned host memory", lambda s: s.host_budget_bytes),
    (Gauge, "host_shared_bytes", "Pinned host memory given to clients", lambda s: s.host_shared_bytes),
    (Counter, "host_refused", "Refused requests for pinned host memory", lambda s: s.host_refused),
    (Gauge, "gangs", "Gangs with members", lambda s: len(s.gangs)),
    (Counter, "gang_turns", "Common turns of gangs", lambda s: s.gang_turns),
    (
        Counter, "gang_gather_seconds", "Time from the beginning of gangs' slots until all members ran",
        lambda s: s.gang_gathered_ns,
    ),
)  # fmt: skip

_GPU_ROWS: Final[tuple[Row, ...]] = (
    (Gauge, "total_bytes", "Memory of the GPU", lambda g: g.memory.total_bytes),
    (Gauge, "capacity_bytes", "Memory of the GPU for all clients together", lambda g: g.memory.capacity_bytes),
    (Gauge, "clients", "Clients that use the GPU", lambda g: g.clients),
    (Gauge, "waiting", "Clients that wait for a lease", lambda g: g.leases.waiting),
    (Gauge, "contended", "1 while a client waits", lambda g: float(g.leases.waiting > 0)),
    (Gauge, "holders", "Clients with a lease", lambda g: len(g.leases.holders)),
    (Gauge, "running_clients", "Clients in the running set", lambda g: len(g.rules.members)),
    (Gauge, "quantum_seconds", "The quantum in force", lambda g: g.rules.quantum_ns),
    (Gauge, "switch_cost_seconds", "Average cost of a switch", lambda g: g.rules.switch_cost_ns),
    (Gauge, "wait_max_seconds", "Longest wait since the start", lambda g: g.statistics.max_wait_ns),
    (Gauge, "moving_orders", "Clients whose memory moves", lambda g: g.memory.moving),
    (
        Gauge, "switch_share_ratio", "Largest share of time for switching under an automatic quantum",
        lambda g: g.rules.switch_share,
    ),
    (
        Gauge, "recovering", "1 while the coordinator waits for an earlier lease holder",
        lambda g: float(g.recovery.recovering),
    ),
    (Counter, "leases", "Leases granted", lambda g: g.statistics.grants),
    (Counter, "handovers", "Leases granted to another client than the previous one", lambda g: g.statistics.handovers),
    (Counter, "lease_seconds", "Time in which leases were held", lambda g: g.statistics.held_ns),
    (Counter, "revokes", "Leases revoked", lambda g: g.statistics.revokes),
    (Counter, "idle_releases", "Leases released early by an idle holder", lambda g: g.statistics.idle_releases),
    (Counter, "overdue_drains", "Drains that passed their deadline", lambda g: g.statistics.overdue),
    (Counter, "evicted_bytes", "Bytes moved off the GPU", lambda g: g.moves.evicted_bytes),
    (Counter, "restored_bytes", "Bytes moved onto the GPU", lambda g: g.moves.restored_bytes),
    (Counter, "move_seconds", "Time in which grants waited for memory", lambda g: g.moves.moved_ns),
    (Counter, "exposed_move_seconds", "Time of moves while a grant waited", lambda g: g.moves.exposed_move_ns),
    (Counter, "hidden_move_seconds", "Time of moves beside a running client", lambda g: g.moves.hidden_move_ns),
    (Counter, "late_switches", "Grants whose memory had not moved in time", lambda g: g.moves.late_switches),
    (Counter, "failed_moves", "Moves that failed", lambda g: g.moves.failed_orders),
    (Counter, "refused_reservations", "Allocations refused for lack of room", lambda g: g.moves.refused_reservations),
    (Counter, "policy_failures", "Faulty policies that were replaced", lambda g: g.rules.policy_failures),
)  # fmt: skip


def _gpu_metrics(gpus: GpuRows) -> Iterator[Metric]:
    info = (((*labels, g.name, g.rules.policy, g.rules.sharing.name.lower()), 1) for labels, g in gpus)
    yield family(Gauge, "nvshare_gpu_info", "Always 1", (*_GPU, "name", "policy", "sharing"), info)
    memory = [
        ((*labels, kind), getattr(gpu.memory, f"{kind}_bytes"))
        for labels, gpu in gpus
        for kind in ("allocated", "resident", "pinned", "host")
    ]
    memory += [((*labels, "evicted"), g.memory.allocated_bytes - g.memory.resident_bytes) for labels, g in gpus]
    yield family(Gauge, "nvshare_gpu_memory_bytes", "Memory of all clients", (*_GPU, "kind"), memory)
    yield from families("nvshare_gpu", _GPU_ROWS, _GPU, gpus)


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


_CLIENT_ROWS: Final[tuple[Row, ...]] = (
    (Counter, "leases", "Leases granted", lambda s: s[1].statistics.leases),
    (Counter, "lease_seconds", "Time in which it held the lease", lambda s: s[1].statistics.used_ns),
    (Counter, "wait_seconds", "Time in which it waited for a lease", lambda s: s[1].statistics.waited_ns),
    (Counter, "revokes", "Leases revoked", lambda s: s[1].statistics.revokes),
    (Counter, "idle_releases", "Leases released early", lambda s: s[1].statistics.idle_releases),
    (Counter, "overdue_drains", "Drains that passed their deadline", lambda s: s[1].statistics.overdue),
    (Counter, "submissions", "GPU calls in finished leases", lambda s: s[1].statistics.submissions),
    (Counter, "evicted_bytes", "Bytes moved off the GPU", lambda s: s[1].moves.moved_out_bytes),
    (Counter, "restored_bytes", "Bytes moved onto the GPU", lambda s: s[1].moves.moved_in_bytes),
    (Counter, "exposed_move_seconds",
        "Time of its moves while a grant waited",
        lambda s: s[1].moves.exposed_move_ns,
    ),
    (Counter, "hidden_move_seconds",
        "Time of its moves beside a running client",
        lambda s: s[1].moves.hidden_move_ns,
    ),
    (Counter, "failed_moves", "Its moves that failed", lambda s: s[1].moves.failed_orders),
    (Gauge, "limit_bytes", "Its limit; 0: none", lambda s: s[1].memory.limit_bytes),
    (
        Gauge, "lacking_bytes", "Memory that it lacks beside immovable memory of others",
        lambda s: s[1].memory.lacking_bytes,
    ),
    (Gauge, "unschedulable", "1 while it cannot run for lack of memory", lambda s: float(s[1].memory.unschedulable)),
    (Gauge, "parked", "1 while it is off its GPUs", lambda s: float(s[0].parking in ("parked", "waking"))),
    (Gauge, "wait_max_seconds", "Its longest wait", lambda s: s[1].statistics.max_wait_ns),
    (Gauge, "priority", "Its priority", lambda s: s[0].rank.priority),
    (Gauge, "weight", "Its weight under fair_share", lambda s: s[0].rank.weight),
    (Gauge, "waiting", "1 while it waits for the lease", lambda s: float(s[1].turn.waiting_since_ns is not None)),
)  # fmt: skip
"""Read from a client and its seat."""


def _client_metrics(seats: SeatRows) -> Iterator[Metric]:
    yield from families("nvshare_client", _CLIENT_ROWS, _CLIENT, [(labels, (c, seat)) for labels, c, seat in seats])
    memory = (
        ((*labels, kind), getattr(seat.memory, f"{kind}_bytes"))
        for labels, _, seat in seats
        for kind in ("allocated", "resident", "pinned", "host", "evicted")
    )
    yield family(Gauge, "nvshare_client_memory_bytes", "Memory of the client", (*_CLIENT, "kind"), memory)
    classes = (((*labels, client.rank.job_class.name.lower()), 1) for labels, client, _ in seats)
    yield family(Gauge, "nvshare_client_class", "Always 1", (*_CLIENT, "class"), classes)
    # Only what is measured: an unknown figure has no series.
    text = "Its speed of the last seconds, waiting included, as a part of its speed alone"
    known = ((labels, seat.progress_normalised) for labels, _, seat in seats if seat.progress_normalised)
    yield family(Gauge, "nvshare_client_progress_ratio", text, _CLIENT, known)
    text = "Share of the time in which it kept the GPU busy when it ran alone"
    known = ((labels, seat.progress.busy_alone) for labels, _, seat in seats if seat.progress.busy_alone)
    yield family(Gauge, "nvshare_client_busy_ratio", text, _CLIENT, known)
