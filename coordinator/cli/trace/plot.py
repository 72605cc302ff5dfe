"""A picture of time lines, with matplotlib (extra `plots`), for `nvshare-ctl trace`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.cli.trace.recording import Recording

COLOURS: Final = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#542788", "#8c510a", "#01665e", "#c51b7d")

LONG_NS: Final = 5_000_000_000
"""Longer windows have an axis of seconds."""

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One program: thick solid bars, pale bars above them, thin dark bars below them."""

    name: str
    solid: Sequence[Interval]
    pale: Sequence[Interval]
    dark: Sequence[Interval] = ()


def available() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def rows_of(recording: Recording) -> list[Row]:
    """A row for each program on each GPU: its leases solid, its waits pale, its memory moves dark."""
    keys = sorted({(span.uuid, span.client) for span in (*recording.leases, *recording.waits, *recording.moves)})
    several = len(recording.gpus) > 1

    def name(uuid: str, client: int) -> str:
        shown = recording.names.get(client, f"client {client}")
        return f"{recording.gpus[uuid].partition(' (')[0]}: {shown}" if several else shown

    return [
        Row(
            name(*key),
            *(
                [(span.start_ns, span.end_ns or 0) for span in spans if (span.uuid, span.client) == key]
                for spans in (recording.leases, recording.waits, recording.moves)
            ),
        )
        for key in keys
    ]


@contextmanager
def picture(out: Path, width: float, height: float) -> Iterator[Any]:
    """Axes to draw on, of this size in inches; the block's end writes the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    yield axes
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def draw(rows: Sequence[Row], window: Interval, title: str, out: Path) -> None:
    """Writes a PNG of the rows within a window of time."""
    origin, end = window
    unit_ns, unit = (10**9, "seconds") if end - origin > LONG_NS else (10**6, "milliseconds")

    def bars(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
        inside = [(max(a, origin), min(b, end)) for a, b in intervals if b > origin and a < end]
        return [((a - origin) / unit_ns, (b - a) / unit_ns) for a, b in inside]

    with picture(out, 10, 0.75 * len(rows) + 1.3) as axes:
        for index, row in enumerate(rows):
            colour = COLOURS[index % len(COLOURS)]
            axes.broken_barh(bars(row.pale), (index - 0.42, 0.26), facecolors=colour, alpha=0.35)
            axes.broken_barh(bars(row.solid), (index - 0.12, 0.5), facecolors=colour)
            axes.broken_barh(bars(row.dark), (index + 0.4, 0.06), facecolors="black")
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, (end - origin) / unit_ns)
        axes.set_xlabel(unit)
        axes.set_title(title, fontsize=10)
