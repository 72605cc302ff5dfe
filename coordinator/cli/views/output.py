"""Prints a view of `status` once or again and again, as a table or JSON.

A pipe gets the same columns as a terminal, uncut; nothing has colours.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import typer

from nvshare.coordinator.cli.ctl_call import call, directory_of, refusals, until_interrupted
from nvshare.coordinator.daemon.control import api

PERIOD_S: Final = 2.0


Form = Literal["wide", "json"]
"""Format of the printed text."""
Output = Annotated[Form | None, typer.Option("-o", "--output", help="all columns, or the whole reply")]
Watch = Annotated[
    float | None,
    typer.Option("-w", "--watch", min=0.1, metavar="[SECONDS]", help="show again, every 2 s by default, until Ctrl-C"),
]


class View(Protocol):
    """The lines of a reply."""

    def __call__(self, status: Mapping[str, Any], width: int | None = None, *, wide: bool = False) -> list[str]:
        """Nothing is cut without a width, or when `wide`."""
        ...


def with_period(words: list[str]) -> list[str]:
    """The command line, where a `--watch` without a number gets one."""
    found = list(words)
    for index, each in enumerate(words):
        follows = words[index + 1 : index + 2]
        if each in ("-w", "--watch") and not (follows and re.fullmatch(r"[0-9]*\.?[0-9]+", follows[0])):
            found[index] = f"--watch={PERIOD_S}"
    return found


def show(
    context: typer.Context, where: Path | None, view: View, *, form: Form | None, as_json: bool, every_s: float | None
) -> None:
    """Asks for the status and prints it; with `every_s` until Ctrl-C."""
    form = "json" if as_json else form
    with refusals(form == "json"), until_interrupted():
        if every_s is None:
            print(written(call(directory_of(context, where), api.Status()), view, form, terminal_width()))
        else:
            _watch(lambda: call(directory_of(context, where), api.Status()), view, form, every_s)


def _watch(ask: Any, view: View, form: Form | None, every_s: float) -> None:
    if not sys.stdout.isatty():
        while True:
            print(written(ask(), view, form, None), end="\n" if form == "json" else "\n\n", flush=True)
            time.sleep(every_s)
    from rich.console import Console  # slow to import
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text(written(ask(), view, form, console.width), no_wrap=True), refresh=True)
            time.sleep(every_s)


def written(status: Mapping[str, Any], view: View, form: Form | None, width: int | None) -> str:
    """A reply as text."""
    if form == "json":
        return json.dumps(status)
    return "\n".join(view(status, width, wide=form == "wide"))


def terminal_width() -> int | None:
    """Columns of the terminal; None when standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
