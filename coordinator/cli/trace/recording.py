"""Leases, waits, memory moves and decisions, from trace events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nvshare.coordinator.cli.views.words import program

NO_STATUS: Final[Mapping[str, Any]] = {"gpus": (), "clients": ()}
_DECISIONS: Final = frozenset(
    (
        *("revoked", "overdue", "late", "stalled", "refused", "lacks_room", "has_room", "shut_out", "gang_due"),
        *("policy", "sharing", "quantum", "switch_share", "paused", "resumed", "rank", "limit", "gone"),
    )
)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a client does on a GPU.  Times are the node's CLOCK_MONOTONIC."""

    uuid: str
    client: int
    start_ns: int
    end_ns: int
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happens; `uuid` and `client` as far as they matter."""

    at_ns: int
    kind: str
    uuid: str | None
    client: int | None
    values: Mapping[str, Any]


@dataclass(slots=True)
class Recording:
    """What has happened.  Spans that had begun before the recording, or last longer, end at its edges."""

    start_ns: int
    end_ns: int
    gpus: dict[str, str]
    """Titles by UUID."""
    names: dict[int, str]
    leases: list[Span] = field(default_factory=list)
    """From the opening of a client's gate, as far as it is known, until its lease came back."""
    waits: list[Span] = field(default_factory=list)
    moves: list[Span] = field(default_factory=list)
    plans: list[Instant] = field(default_factory=list)
    decisions: list[Instant] = field(default_factory=list)
    lost: int = 0
    """Events that the reader was too slow for."""


def record(
    events: Iterable[Mapping[str, Any]],
    before: Mapping[str, Any] = NO_STATUS,
    after: Mapping[str, Any] = NO_STATUS,
) -> Recording:
    """`before` and `after` are replies of `status`, which tell of leases and waits that no event has begun or ended."""
    every = list(events)
    start_ns = int(before.get("now_ns", every[0]["at_ns"] if every else 0))
    last_ns = max((int(event["at_ns"]) for event in every), default=start_ns)
    found = Recording(
        start_ns=start_ns,
        end_ns=max(last_ns, int(after.get("now_ns", start_ns))),
        gpus={gpu["uuid"]: f"GPU {gpu['index']} ({gpu['name']})" for gpu in before["gpus"]},
        names={client["client"]: program(client) for client in (*after["clients"], *before["clients"])},
    )
    for gpu in before["gpus"]:
        plan = {"running": ",".join(map(str, gpu["members"])), "why": gpu["why"]}
        found.plans.append(Instant(start_ns, "plan", gpu["uuid"], None, plan))
    reader = _Reader(found, before)
    for event in every:
        reader.take(event)
    reader.close(after)
    return found


class _Reader:
    def __init__(self, found: Recording, status: Mapping[str, Any]) -> None:
        self._found = found
        self._held: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
        self._moving: dict[int, tuple[str, int, int, str]] = {}
        self._sequence: int | None = None
        for client in status["clients"]:
            for seat in client["seats"]:
                if seat["holding_since_ns"] is not None:
                    self._held[seat["uuid"], client["client"]] = (seat["holding_since_ns"], {})

    def take(self, event: Mapping[str, Any]) -> None:
        found, kind, at_ns = self._found, event["kind"], int(event["at_ns"])
        uuid, client = event.get("uuid"), event.get("client")
        sequence = event.get("seq")
        if sequence is not None and self._sequence is not None:
            found.lost += max(0, sequence - self._sequence - 1)
        self._sequence = sequence
        if uuid is not None:
            found.gpus.setdefault(uuid, str(uuid))
        if client is not None and "name" in event:
            name = program({"name": event["name"], "user_id": event["user"]}) if "user" in event else str(event["name"])
            found.names.setdefault(client, name)
        if kind == "granted":
            self._granted(event, at_ns)
        elif kind == "released":
            self._end_lease((event["uuid"], event["client"]), event, at_ns)
        elif kind in ("evicting", "restoring"):
            self._moving[event["order"]] = (event["uuid"], event["client"], at_ns, kind)
        elif kind == "moved":
            self._end_move(event["order"], event, at_ns)
        elif kind == "plan":
            found.plans.append(Instant(at_ns, kind, uuid, None, event))
        if kind in _DECISIONS:
            found.decisions.append(Instant(at_ns, kind, uuid, client, event))
        if kind == "gone":
            for key in [key for key in self._held if key[1] == client]:
                self._end_lease(key, {}, at_ns)

    def _granted(self, event: Mapping[str, Any], at_ns: int) -> None:
        key = (event["uuid"], event["client"])
        self._add(self._found.waits, Span(*key, at_ns - event["waited_ns"], at_ns))
        self._held[key] = (at_ns, {"lease": event["lease"], "quantum_ms": event.get("quantum_ns", 0) / 1e6})

    def _end_lease(self, key: tuple[str, int], event: Mapping[str, Any], at_ns: int) -> None:
        held = self._held.pop(key, None)
        if held is None:
            return
        since_ns, values = held
        opened_ns = event.get("opened_at_ns", 0)
        told = {name: event[name] for name in ("idle", "drained") if name in event}
        told |= {"drain_ms": event["drain_ns"] / 1e6} if "drain_ns" in event else {}
        start_ns = opened_ns if since_ns <= opened_ns <= at_ns else since_ns
        self._add(self._found.leases, Span(*key, start_ns, at_ns, values | told))

    def _end_move(self, order: int, event: Mapping[str, Any], at_ns: int) -> None:
        began = self._moving.pop(order, None)
        if began is None:
            return
        uuid, client, since_ns, kind = began
        moved = {"moved_bytes": event["moved_bytes"]} if "moved_bytes" in event else {}
        self._add(self._found.moves, Span(uuid, client, since_ns, at_ns, {"kind": kind, **moved}))

    def _add(self, spans: list[Span], span: Span) -> None:
        start_ns = max(self._found.start_ns, span.start_ns)
        if span.end_ns > start_ns:
            spans.append(Span(span.uuid, span.client, start_ns, span.end_ns, span.values))

    def close(self, after: Mapping[str, Any]) -> None:
        """Ends what has not ended."""
        end_ns = self._found.end_ns
        for client in after["clients"]:
            for seat in client["seats"]:
                if seat["waiting_since_ns"] is not None:
                    waited = Span(seat["uuid"], client["client"], seat["waiting_since_ns"], end_ns)
                    self._add(self._found.waits, waited)
                    # Its lease may have ended after the last event that was read.
                    self._end_lease((waited.uuid, waited.client), {}, waited.start_ns)
        for key in list(self._held):
            self._end_lease(key, {}, end_ns)
        for order in list(self._moving):
            self._end_move(order, {}, end_ns)
