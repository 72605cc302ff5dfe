"""Progress of long work, as one line on standard error while it is a terminal; silent otherwise.

Non-goals: results; they go to standard output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

T = TypeVar("T")
_shown: list[tuple[Progress, TaskID, str]] = []


@contextlib.contextmanager
def showing(name: str) -> Iterator[None]:
    """Shows name, step and elapsed time for the length of the block.  It redraws rarely: that takes processor time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, redirect_stdout=False) as progress:
        _shown.append((progress, progress.add_task(name), name))
        try:
            yield
        finally:
            _shown.pop()


def step(text: str) -> None:
    """Names what is done now."""
    for progress, task, name in _shown:
        progress.update(task, description=f"{name}: {text}")


def track(items: Collection[T], what: str) -> Iterator[T]:
    """The items; each is named as "WHAT 2 of 5"."""
    for number, item in enumerate(items, start=1):
        step(f"{what} {number} of {len(items)}")
        yield item
