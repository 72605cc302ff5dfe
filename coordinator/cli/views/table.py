"""Tables of plain text that fit a terminal: only columns of text are cut, never a number.

Without a width, as in a pipe, nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size

GAP: Final = "  "
NARROWEST: Final = 6
"""Columns of text keep this width; a table that is still too wide goes beyond the terminal's edge."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.  `text`: it is aligned left, and cut where the width does not suffice."""

    title: str
    text: bool = False
    wide: bool = False
    """Shown with `-o wide` only."""
    left: bool = False
    """Aligned left although it is never cut."""


def text(title: str, *, wide: bool = False) -> Column:
    """A column that may be cut."""
    return Column(title, text=True, wide=wide, left=True)


def number(title: str, *, wide: bool = False) -> Column:
    """A column of figures."""
    return Column(title, wide=wide)


def word(title: str, *, wide: bool = False) -> Column:
    """A column of short words or of words with figures, which are never cut."""
    return Column(title, wide=wide, left=True)


def layout(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None = None, *, wide: bool = False
) -> list[str]:
    """The lines of a table; `wide` shows all columns and cuts none."""
    shown = [index for index, column in enumerate(columns) if wide or not column.wide]
    chosen = [columns[index] for index in shown]
    cells = [[column.title for column in chosen], *([row[index] for index in shown] for row in rows)]
    widths = [max(cell_len(row[index]) for row in cells) for index in range(len(chosen))]
    if width is not None and not wide:
        _shrink(chosen, widths, width)
    return [_line(chosen, row, widths) for row in cells]


def _shrink(columns: Sequence[Column], widths: list[int], width: int) -> None:
    """Narrows the widest columns of text, one cell at a time."""
    least = [max(NARROWEST, len(column.title)) if column.text else 1 << 30 for column in columns]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    for _ in range(excess):
        index = max(range(len(widths)), key=lambda i: widths[i] if widths[i] > least[i] else -1)
        if widths[index] <= least[index]:
            return
        widths[index] -= 1


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    cells = []
    for column, cell, width in zip(columns, row, widths, strict=True):
        shown = cut(cell, width)
        padding = " " * (width - cell_len(shown))
        cells.append(shown + padding if column.left else padding + shown)
    return GAP.join(cells).rstrip()


def cut(shown: str, width: int) -> str:
    """The beginning of a text that is too long, and an ellipsis."""
    return shown if cell_len(shown) <= width else set_cell_size(shown, width - 1).rstrip() + "…"
