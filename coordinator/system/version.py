"""The product's version, and the option `--version` of commands."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

import typer


def version() -> str:
    """The installed version; `0` in a source checkout."""
    try:
        return importlib.metadata.version("nvshare")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def show_version(context: typer.Context, _parameter: object, value: bool) -> None:
    """Prints the command's name and version, and ends it."""
    if value and not context.resilient_parsing:
        typer.echo(f"{context.find_root().info_name} {version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=show_version, is_eager=True, help="show the version and exit")
]


def run_command(app: typer.Typer, words: list[str], name: str, **given: Any) -> Any:
    """Runs the command line.  Some versions of typer show `<bool>` as the value of a flag; here its help has none."""
    command: Any = typer.main.get_command(app)
    _hide_types(command, typer.Context(command, **command.context_settings))
    return command(words, prog_name=name, **given)


def _hide_types(command: Any, context: typer.Context) -> None:
    for flag in (each for each in command.get_params(context) if getattr(each, "is_flag", False)):
        flag.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _hide_types(each, context)
