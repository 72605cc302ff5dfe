"""Leases, waits, memory moves and decisions, from trace events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from nvshare.coordinator.cli.trace.spans import Kind, Span, Spans
from nvshare.coordinator.cli.views.words import program

NO_STATUS: Final[Mapping[str, Any]] = {"gpus": (), "clients": ()}
_OF_PROGRAMS: Final = ("parking", "migrated")
"""Marked in the program's lanes on all GPUs."""
_DECISIONS: Final = frozenset(
    (
        *("revoked", "overdue", "late", "stalled", "refused", "lacks_room", "has_room", "unschedulable", "gang_due"),
        *("policy", "sharing", "quantum", "switch_share", "paused", "resumed", "rank", "limit", "gone"),
        *_OF_PROGRAMS,
    )
)


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
    """The events of a recording.  Spans that had begun before the recording, or last longer, end at its edges."""

    start_ns: int
    end_ns: int
    gpus: dict[str, str]
    """Titles by UUID."""
    names: dict[int, str]
    spans: list[Span] = field(default_factory=list)
    plans: list[Instant] = field(default_factory=list)
    decisions: list[Instant] = field(default_factory=list)
    lost: int = 0
    """Events that the reader was too slow for."""

    @property
    def leases(self) -> list[Span]:
        """Spans of leases, from the opening of the client's gate, if known, to the release."""
        return self._of("hold")

    @property
    def waits(self) -> list[Span]:
        return self._of("wait")

    @property
    def moves(self) -> list[Span]:
        return self._of("out", "in")

    def _of(self, *kinds: Kind) -> list[Span]:
        return [span for span in self.spans if span.kind in kinds]


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
    spans = Spans()
    for client, seat in _seats(before):
        if seat["holding_since_ns"] is not None:
            spans.begin((seat["uuid"], client, "hold"), seat["holding_since_ns"])
    for event in every:
        spans.add(event)
        _note(found, event)
    for client, seat in _seats(after):
        if seat["waiting_since_ns"] is not None:
            spans.begin((seat["uuid"], client, "wait"), seat["waiting_since_ns"])
            # Its lease may have ended after the last event that was read.
            spans.end((seat["uuid"], client, "hold"), seat["waiting_since_ns"])
    spans.end_all(found.end_ns)
    found.lost = spans.lost
    found.spans = [_clipped(span, found.start_ns) for span in sorted(spans.spans(), key=lambda span: span.number)]
    found.spans = [span for span in found.spans if (span.end_ns or 0) > span.start_ns]
    return found


def _seats(status: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for client in status["clients"]:
        for seat in client["seats"]:
            yield client["client"], seat


def _clipped(span: Span, start_ns: int) -> Span:
    return replace(span, start_ns=max(start_ns, span.start_ns))


def _note(found: Recording, event: Mapping[str, Any]) -> None:
    """Names, plans and decisions."""
    kind, at_ns, uuid, client = event["kind"], int(event["at_ns"]), event.get("uuid"), event.get("client")
    if uuid is not None:
        found.gpus.setdefault(uuid, str(uuid))
    if client is not None and "name" in event:
        name = program({"name": event["name"], "user_id": event["user"]}) if "user" in event else str(event["name"])
        found.names.setdefault(client, name)
    if kind == "plan":
        found.plans.append(Instant(at_ns, kind, uuid, None, event))
    if kind in _DECISIONS:
        found.decisions.append(Instant(at_ns, kind, None if kind in _OF_PROGRAMS else uuid, client, event))
