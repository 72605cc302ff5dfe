"""The demo's record of the coordinator's events: lease times, waits and the cost of handovers.

A handover's cost is the time from the `revoked` event to the opening of the next holder's gate (`opened_at_ns`, which
that client reports with its release), less the first holder's drain.  All are CLOCK_MONOTONIC of the node.  Idle
releases, and leases that were being released when the revocation came, are not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RECENT_LEASES = 512
"""Finished leases kept for each client, for the live view."""


@dataclass(slots=True)
class ClientRecord:
    """One program.  `holds` are its finished leases, oldest first; `holding_since_ns` is its present one."""

    name: str
    leases: int = 0
    held_ns: int = 0
    max_wait_ns: int = 0
    holding_since_ns: int | None = None
    holds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_LEASES))


@dataclass(slots=True)
class _Revoked:
    """A revoked lease, with its drain time once known."""

    at_ns: int
    drain_ns: int | None = None


@dataclass(slots=True)
class _Gpu:
    last_client: int | None = None
    revoked: dict[int, _Revoked] = field(default_factory=dict)
    after: dict[int, _Revoked] = field(default_factory=dict)
    """Lease -> the revoked lease before it."""
    freed: _Revoked | None = None


class Ledger:
    """Accumulates events, in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.clients = {name: ClientRecord(name) for name in names}
        self.handovers = 0
        self.handover_ns: list[int] = []
        self.lost = 0
        self.latest_ns = 0
        self._gpus: dict[str, _Gpu] = {}
        self._names: dict[int, str] = {}
        self._sequence: int | None = None

    @property
    def gpus(self) -> int:
        """Number of GPUs with leases."""
        return len(self._gpus)

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds one event; ignores kinds without leases."""
        sequence = event.get("seq")
        if self._sequence is not None and sequence is not None:
            self.lost += sequence - self._sequence - 1
        self._sequence = sequence
        at_ns = int(event["at_ns"])
        self.latest_ns = max(self.latest_ns, at_ns)
        if event["kind"] == "granted":
            self._granted(event, at_ns)
        elif event["kind"] == "revoked":
            self._gpu(event).revoked[event["lease"]] = _Revoked(at_ns)
        elif event["kind"] == "released":
            self._released(event, at_ns)
        elif event["kind"] == "gone" and event.get("client") in self._names:
            self._end(self.clients[self._names[event["client"]]], at_ns)

    def _gpu(self, event: Mapping[str, Any]) -> _Gpu:
        return self._gpus.setdefault(event["uuid"], _Gpu())

    def _granted(self, event: Mapping[str, Any], at_ns: int) -> None:
        gpu, client = self._gpu(event), event["client"]
        self._names[client] = event["name"]
        record = self.clients.setdefault(event["name"], ClientRecord(event["name"]))
        record.leases += 1
        record.max_wait_ns = max(record.max_wait_ns, event["waited_ns"])
        record.holding_since_ns = at_ns
        if gpu.last_client is not None and gpu.last_client != client:
            self.handovers += 1
            if gpu.freed is not None:
                gpu.after[event["lease"]] = gpu.freed
        gpu.last_client, gpu.freed = client, None

    def _released(self, event: Mapping[str, Any], at_ns: int) -> None:
        gpu = self._gpu(event)
        if event["client"] in self._names:
            self._end(self.clients[self._names[event["client"]]], at_ns)
        before = gpu.after.pop(event["lease"], None)
        if before is not None and before.drain_ns is not None:
            self.handover_ns.append(event["opened_at_ns"] - before.at_ns - before.drain_ns)
        gpu.freed = gpu.revoked.pop(event["lease"], None)
        if gpu.freed is not None and event["drained"] and at_ns - gpu.freed.at_ns >= event["drain_ns"]:
            gpu.freed.drain_ns = event["drain_ns"]

    @staticmethod
    def _end(record: ClientRecord, at_ns: int) -> None:
        if record.holding_since_ns is not None:
            record.held_ns += at_ns - record.holding_since_ns
            record.holds.append((record.holding_since_ns, at_ns))
            record.holding_since_ns = None


def percentile(values: Sequence[int], share: float) -> float | None:
    """The nearest-rank percentile; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
