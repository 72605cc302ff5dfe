"""The last minutes of each GPU as spans, from trace events: who held it, who waited, whose memory moved.

Invariants: the number of spans is bounded; the oldest closed ones are forgotten first.  Leases of one client with a
shorter pause than a pixel are one span.  After lost events all spans end, because their ends may be among the lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["hold", "wait", "out", "in"]
_Key = tuple[str, int, Kind]

MAX_SPANS: Final = 6000
KEPT_NS: Final = 300_000_000_000
MERGED_NS: Final = 5_000_000
"""Shorter pauses join two spans; shorter waits are not kept."""
_OPENING: Final[dict[str, Kind]] = {
    "granted": "hold",
    "claimed": "hold",
    "stray": "hold",
    "evicting": "out",
    "restoring": "in",
}


@dataclass(slots=True)
class Span:
    """One client on one GPU in one state.  `end_ns` None: it lasts."""

    number: int
    uuid: str
    client: int
    kind: Kind
    start_ns: int
    end_ns: int | None
    revision: int


class Timeline:
    """Not for two threads at once."""

    def __init__(self) -> None:
        self.revision = 0
        """Counts changes; a span has the one of its last change."""
        self.names: dict[int, str] = {}
        """Names of the clients that have spans or are connected, by client id."""
        self._last: dict[_Key, Span] = {}  # the newest of each client, GPU and kind; may go on
        self._past: deque[Span] = deque(maxlen=MAX_SPANS)
        self._sequence: int | None = None
        self._numbers = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes one trace event."""
        at_ns, kind = event["at_ns"], event["kind"]
        if self._sequence is not None and event["seq"] != self._sequence + 1:
            for span in self._last.values():
                self._end(span, at_ns)
        self._sequence = event["seq"]
        client = event.get("client")
        if client is None:
            return
        if "name" in event:
            self.names[client] = event["name"]
        if kind == "gone":
            for key in [key for key in self._last if key[1] == client]:
                self._end(self._last[key], at_ns)
                self._past.append(self._last.pop(key))
        elif kind in _OPENING:
            uuid = event["uuid"]
            if event.get("waited_ns", 0) >= MERGED_NS:
                self._begin((uuid, client, "wait"), at_ns - event["waited_ns"])
                self._end(self._last[uuid, client, "wait"], at_ns)
            self._begin((uuid, client, _OPENING[kind]), at_ns)
        elif kind in ("released", "moved"):
            ended: Kind = "hold" if kind == "released" else "out" if event["evict"] else "in"
            open_span = self._last.get((event["uuid"], client, ended))
            if open_span is not None:
                self._end(open_span, at_ns)

    def spans(self, since: int = 0) -> Iterator[Span]:
        """The spans that changed after a revision."""
        for span in (*self._past, *self._last.values()):
            if span.revision > since:
                yield span

    def forget(self, now_ns: int) -> None:
        """Forgets what is too old, and names without a span."""
        old_ns = now_ns - KEPT_NS
        while self._past and (self._past[0].end_ns or 0) < old_ns:
            self._past.popleft()
        for key in [key for key, span in self._last.items() if span.end_ns is not None and span.end_ns < old_ns]:
            del self._last[key]
        if len(self.names) > 256:
            used = {span.client for span in self.spans()}
            self.names = {client: name for client, name in self.names.items() if client in used}

    def _begin(self, key: _Key, at_ns: int) -> None:
        last = self._last.get(key)
        if last is not None:
            if last.end_ns is None or at_ns - last.end_ns < MERGED_NS:
                last.end_ns, last.revision = None, self._changed()
                return
            self._past.append(last)
        self._numbers += 1
        self._last[key] = Span(self._numbers, *key, at_ns, None, self._changed())

    def _end(self, span: Span, at_ns: int) -> None:
        if span.end_ns is None:
            span.end_ns, span.revision = at_ns, self._changed()

    def _changed(self) -> int:
        self.revision += 1
        return self.revision
