"""Trace events as spans: who held a GPU, who waited for it, whose memory moved.

Invariants: with `most` the number of spans is bounded, and the oldest closed ones are forgotten first.  After lost
events all spans end, because their ends may be among the lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["hold", "wait", "out", "in"]
Key = tuple[str, int, Kind]

_OPENING: Final[dict[str, Kind]] = {
    "granted": "hold",
    "claimed": "hold",
    "stray": "hold",
    "evicting": "out",
    "restoring": "in",
}


@dataclass(slots=True)
class Span:
    """One client on one GPU in one state.  `end_ns` None: it lasts.  Times are the node's CLOCK_MONOTONIC."""

    number: int
    uuid: str
    client: int
    kind: Kind
    start_ns: int
    end_ns: int | None
    revision: int
    values: dict[str, Any] = field(default_factory=dict)


class Spans:
    """Spans of one recording.  Use by one thread only."""

    def __init__(self, *, merged_ns: int = 0, most: int | None = None) -> None:
        """Shorter pauses than `merged_ns` join two spans; shorter waits are not kept.

        Without it, a lease begins when the client's gate opened, as far as that is known.
        """
        self.revision = 0
        """Counts changes; a span has the one of its last change."""
        self.lost = 0
        """Events that the reader was too slow for."""
        self._merged_ns = merged_ns
        self._last: dict[Key, Span] = {}  # the newest of each client, GPU and kind; may go on
        self._past: deque[Span] = deque(maxlen=most)
        self._sequence: int | None = None
        self._numbers = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes one trace event."""
        at_ns, kind, sequence = event["at_ns"], event["kind"], event.get("seq")
        if self._sequence is not None and sequence is not None and sequence != self._sequence + 1:
            self.lost += max(0, sequence - self._sequence - 1)
            self.end_all(at_ns)
        self._sequence = sequence
        client = event.get("client")
        if client is None:
            return
        if kind == "gone":
            for key in [key for key in self._last if key[1] == client]:
                self._end(self._last[key], at_ns)
                self._past.append(self._last.pop(key))
        elif kind in _OPENING:
            uuid = event["uuid"]
            if event.get("waited_ns", 0) >= self._merged_ns:
                self.begin((uuid, client, "wait"), at_ns - event.get("waited_ns", 0))
                self._end(self._last[uuid, client, "wait"], at_ns)
            self.begin((uuid, client, _OPENING[kind]), at_ns, event)
        elif kind in ("released", "moved"):
            ended: Kind = "hold" if kind == "released" else "out" if event["evict"] else "in"
            span = self._last.get((event["uuid"], client, ended))
            if span is not None and span.end_ns is None:
                opened_ns = event.get("opened_at_ns", 0)
                if not self._merged_ns and span.start_ns <= opened_ns <= at_ns:
                    span.start_ns = opened_ns
                self._end(span, at_ns, event)

    def spans(self, since: int = 0) -> Iterator[Span]:
        """The spans that changed after a revision."""
        for span in (*self._past, *self._last.values()):
            if span.revision > since:
                yield span

    def begin(self, key: Key, at_ns: int, event: Mapping[str, Any] | None = None) -> None:
        """A span begins, or the last one goes on."""
        last = self._last.get(key)
        if last is not None:
            if last.end_ns is None or (self._merged_ns and at_ns - last.end_ns < self._merged_ns):
                last.end_ns, last.revision = None, self._changed()
                return
            self._past.append(last)
        self._numbers += 1
        self._last[key] = Span(self._numbers, *key, at_ns, None, self._changed(), _values(event or {}))

    def end(self, key: Key, at_ns: int) -> None:
        """A span ends, if there is one."""
        if key in self._last:
            self._end(self._last[key], at_ns)

    def end_all(self, at_ns: int) -> None:
        """All spans end."""
        for span in self._last.values():
            self._end(span, at_ns)

    def forget(self, before_ns: int) -> None:
        """Forgets what ended before."""
        while self._past and (self._past[0].end_ns or 0) < before_ns:
            self._past.popleft()
        for key in [key for key, span in self._last.items() if span.end_ns is not None and span.end_ns < before_ns]:
            del self._last[key]

    def _end(self, span: Span, at_ns: int, event: Mapping[str, Any] | None = None) -> None:
        if span.end_ns is None:
            span.end_ns, span.revision = at_ns, self._changed()
            span.values |= _values(event or {})

    def _changed(self) -> int:
        self.revision += 1
        return self.revision


def _values(event: Mapping[str, Any]) -> dict[str, Any]:
    """Values of events that a span keeps."""
    found = {name: event[name] for name in ("lease", "idle", "drained", "moved_bytes") if name in event}
    return found | {f"{name}_ms": event[f"{name}_ns"] / 1e6 for name in ("quantum", "drain") if f"{name}_ns" in event}
