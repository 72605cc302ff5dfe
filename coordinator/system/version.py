"""The product's version, and the option `--version` of commands with one purpose."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


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


class Versioned(TyperCommand):
    """A command with `--version`; the function behind it has no parameter for it."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), _option()]


@functools.cache
def _option() -> Any:
    """The option as a parameter of a command, whichever click typer uses."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def _command(version: VersionOption = False) -> None: ...

    (option,) = typer.main.get_command(app).params
    option.expose_value = False
    return option
