"""The demo's record of the coordinator's events: lease times, waits and the cost of handovers.

A handover's cost is the time from the `revoked` event to the opening of the next holder's gate (`opened_at_ns`, which
that client reports with its release), less the first holder's drain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvshare.bench.handover import turns
from nvshare.coordinator.cli.trace.spans import Spans


@dataclass(slots=True)
class ClientRecord:
    """One program.  `holds` are its leases, the present one up to now."""

    name: str
    holds: list[tuple[int, int]] = field(default_factory=list)
    max_wait_ns: int = 0

    @property
    def held_ns(self) -> int:
        return sum(end - start for start, end in self.holds)


class Ledger:
    """Accumulates events, in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.latest_ns = 0
        self._spans = Spans()
        self._names: dict[int, str] = {}
        self._programs = list(names)
        self._events: list[Mapping[str, Any]] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds one event."""
        self.latest_ns = max(self.latest_ns, int(event["at_ns"]))
        self._events.append(event)
        self._spans.add(event)
        if event["kind"] == "granted":
            self._names[event["client"]] = event["name"]

    @property
    def lost(self) -> int:
        """Events that the reader was too slow for."""
        return self._spans.lost

    @property
    def gpus(self) -> int:
        """Number of GPUs with leases."""
        return len({span.uuid for span in self._spans.spans()})

    @property
    def clients(self) -> dict[str, ClientRecord]:
        """The programs, by name."""
        found = {name: ClientRecord(name) for name in (*self._programs, *self._names.values())}
        for span in sorted(self._spans.spans(), key=lambda span: span.number):
            if (record := found.get(self._names.get(span.client, ""))) is None:
                continue
            start_ns, end_ns = span.start_ns, self.latest_ns if span.end_ns is None else span.end_ns
            if span.kind == "hold":
                record.holds.append((start_ns, end_ns))
            elif span.kind == "wait":
                record.max_wait_ns = max(record.max_wait_ns, end_ns - start_ns)
        return found

    @property
    def handovers(self) -> int:
        """Leases that followed one of another client."""
        found, last = 0, dict[str, int]()
        for span in sorted(self._spans.spans(), key=lambda span: span.number):
            if span.kind == "hold":
                found += last.get(span.uuid, span.client) != span.client
                last[span.uuid] = span.client
        return found

    @property
    def handover_ns(self) -> list[int]:
        """The cost of each handover after a revoke."""
        found, opened = turns(self._events)
        return [opened[turn.lease] - turn.revoked_ns - turn.drain_ns for turn in found if turn.lease in opened]
