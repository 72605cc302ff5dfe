"""The time line: trace events become spans."""

from __future__ import annotations

from typing import Any

from nvshare.coordinator.cli.trace.spans import Spans
from nvshare.coordinator.web.live import KEPT_NS, MAX_SPANS, MERGED_NS

GPU = "GPU-0"
MS = 1_000_000


class Story:
    """Feeds a time line with numbered events of client 7."""

    def __init__(self) -> None:
        self.timeline = Spans(merged_ns=MERGED_NS, most=MAX_SPANS)
        self.sequence = 0

    def add(self, at_ms: float, kind: str, client: int = 7, **values: Any) -> None:
        self.sequence += 1
        event = {"seq": self.sequence, "at_ns": int(at_ms * MS), "kind": kind, "uuid": GPU, "client": client}
        self.timeline.add(event | values)

    def spans(self) -> list[tuple[str, float, float | None]]:
        return sorted(
            (span.kind, span.start_ns / MS, None if span.end_ns is None else span.end_ns / MS)
            for span in self.timeline.spans()
        )


def test_a_turn_with_its_wait_and_moves() -> None:
    """Broken if the page showed a program on the GPU while it waited, or no move."""
    story = Story()
    story.add(10, "restoring", order=1)
    story.add(30, "moved", order=1, evict=False)
    story.add(30, "granted", name="a.py", waited_ns=20 * MS)
    story.add(130, "released")
    story.add(131, "evicting", order=2)
    assert story.spans() == [("hold", 30, 130), ("in", 10, 30), ("out", 131, None), ("wait", 10, 30)]
    story.add(140, "gone", name="a.py")
    assert ("out", 131, 140) in story.spans()


def test_short_pauses_join_spans() -> None:
    """Broken if a lone program that releases its idle lease a thousand times a second filled the memory."""
    story = Story()
    for turn in range(1000):
        story.add(turn, "granted", name="a.py", waited_ns=1000)
        story.add(turn + 0.9, "released")
    assert story.spans() == [("hold", 0, 999.9)]


def test_lost_events_end_spans() -> None:
    """Broken if a program whose release was lost held the GPU for ever."""
    story = Story()
    story.add(0, "granted", name="a.py", waited_ns=0)
    story.sequence += 5
    story.add(50, "granted", client=8, name="b.py", waited_ns=0)
    assert story.spans() == [("hold", 0, 50), ("hold", 50, None)]


def test_only_changed_spans_are_told_again() -> None:
    """Broken if each update sent the whole time line, or missed the end of a span."""
    story = Story()
    story.add(0, "granted", name="a.py", waited_ns=0)
    story.add(0, "granted", client=8, name="b.py", waited_ns=0)
    seen = story.timeline.revision
    assert not list(story.timeline.spans(seen))
    story.add(50, "released")
    assert [(span.client, span.end_ns) for span in story.timeline.spans(seen)] == [(7, 50 * MS)]


def test_the_past_is_forgotten() -> None:
    """Broken if the page's process grew with the coordinator's age."""
    story = Story()
    for turn in range(MAX_SPANS + 50):
        story.add(100 * turn, "granted", client=turn % 2, name="x", waited_ns=0)
        story.add(100 * turn + 50, "released", client=turn % 2)
    assert len(story.spans()) <= MAX_SPANS + 2
    story.timeline.forget(story.timeline.revision * 10**12 - KEPT_NS)
    assert story.spans() == []
