"""A picture of a recording of `nvshare-ctl trace`: `python -m tests.docs.timeline TRACE.json PICTURE.svg`.

A row for each program on each GPU: its leases solid, its waits pale above them, its memory moves black below them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, Final

COLOURS: Final = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#542788", "#8c510a", "#01665e", "#c51b7d")
LEFT, WIDTH, ROW, TOP = 220, 760, 60, 30
BARS: Final = {"lease": (18, 28, 1.0), "wait": (0, 15, 0.35), "evicting": (49, 5, 1.0), "restoring": (49, 5, 1.0)}
"""Of a kind of span: the offset in its row, the height and the opacity."""


def draw(trace: Mapping[str, Any]) -> str:
    """The SVG of a trace in Chrome's format."""
    lanes = {each["tid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"}
    bars = [each for each in trace["traceEvents"] if each.get("cat") in BARS]
    end_us = max((each["ts"] + each["dur"] for each in bars), default=0) or 1
    rows = list(dict.fromkeys(_row(lanes, each) for each in sorted(bars, key=lambda each: each["tid"])))
    height = TOP + ROW * len(rows)
    marks = [*_bars(bars, rows, lanes, WIDTH / end_us), *_axis(end_us, height)]
    names = [_text(LEFT - 8, TOP + ROW * index + 36, "end", name) for index, (_, name) in enumerate(rows)]
    size = f'width="{LEFT + WIDTH + 30}" height="{height + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *names, *marks, "</svg>\n"])


def _row(lanes: Mapping[int, str], span: Mapping[str, Any]) -> tuple[int, str]:
    """GPU and program."""
    return span["pid"], lanes[span["tid"]].removesuffix(", memory")


def _bars(
    spans: list[dict[str, Any]], rows: list[tuple[int, str]], lanes: Mapping[int, str], scale: float
) -> Iterator[str]:
    for span in spans:
        index = rows.index(_row(lanes, span))
        offset, height, opacity = BARS[span["cat"]]
        colour = "black" if height == 5 else COLOURS[index % len(COLOURS)]
        place = f'x="{LEFT + span["ts"] * scale:.1f}" y="{TOP + ROW * index + offset}"'
        size = f'width="{max(span["dur"] * scale, 0.5):.1f}" height="{height}"'
        yield f'<rect {place} {size} fill="{colour}" opacity="{opacity}"/>'


def _axis(end_us: float, height: int) -> Iterator[str]:
    for part in range(6):
        shown = f"{end_us * part / 5e6:.3g}" + (" s" if part == 5 else "")
        yield _text(LEFT + WIDTH * part / 5, height + 20, "middle", shown)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
