"""The commands `install` and `completion` of nvshare-ctl.  All but `install cdi` print files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from nvshare.coordinator.cli.install.cdi import install_cdi

app = typer.Typer(no_args_is_help=True, help="Make GPUs shared by services and containers.")
app.command("cdi")(install_cdi)
_FOLDER: Final = Path(__file__).parent


Unit = Literal["system", "user", "config"]
Shell = Literal["bash", "zsh", "fish"]
_FILES: Final = {"system": "nvshare.service", "user": "nvshare-user.service"}


@app.command("unit")
def install_unit(
    unit: Annotated[
        Unit, typer.Argument(metavar="system|user|config", help="a systemd unit, or a sample nvshare.toml")
    ] = "system",
) -> None:
    """Print a systemd unit for the coordinator, or a sample configuration file."""
    if unit == "config":
        from nvshare.coordinator.daemon.settings_file import sample

        text = sample()
    else:
        text = (_FOLDER / _FILES[unit]).read_text(encoding="utf-8").replace("@BIN@", str(Path(sys.executable).parent))
    typer.echo(text, nl=False)


def completion(shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish")]) -> None:
    """Print a script by which the tab key completes nvshare-run, nvshare-ctl and nvshare-coordinator."""
    from nvshare.coordinator.cli.install.completion import script
    from nvshare.coordinator.cli.run import make_parser

    typer.echo(script(make_parser(), shell), nl=False)
