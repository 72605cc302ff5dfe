"""`nvshare-ctl kernelspec install`: a Jupyter kernel whose notebooks share the GPU.

The kernel is this environment's Python with NVSHARE_ENABLE=1 and the chosen settings in its environment.
`jupyter kernelspec list` and `remove` work on it as on any other kernel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from nvshare.coordinator.cli.ctl_call import parse_argument
from nvshare.coordinator.units import parse_size

app = typer.Typer(no_args_is_help=True, help="Jupyter kernels whose notebooks share the GPU.")

NAME: Final = re.compile(r"[a-z0-9._-]+")
"""Characters that Jupyter allows in a kernel's name."""


@app.callback()
def _root() -> None:
    """Jupyter kernels whose notebooks share the GPU."""


@app.command()
def install(
    name: Annotated[str, typer.Option(help="the kernel's name")] = "nvshare",
    display_name: Annotated[str | None, typer.Option(help="what Jupyter shows")] = None,
    job_class: Annotated[
        Literal["interactive", "batch", "best-effort"], typer.Option("--class", help="kind of program")
    ] = "interactive",
    memory: Annotated[
        Literal["auto", "swap", "managed", "device"] | None, typer.Option(help="memory mode; default: NVSHARE_MEMORY")
    ] = None,
    limit: Annotated[str | None, typer.Option(help="GPU memory of each notebook: 8GiB")] = None,
    user: Annotated[bool, typer.Option("--user", help="for this user, not this environment")] = False,
) -> None:
    """Add a kernel "Python 3 (shared GPU)" that runs this environment's Python."""
    if not NAME.fullmatch(name):
        raise typer.BadParameter("use lower-case letters, digits, dots, hyphens and underscores", param_hint="--name")
    if importlib.util.find_spec("ipykernel") is None:
        typer.echo(f"nvshare-ctl: {sys.executable} has no ipykernel; install it: pip install ipykernel", err=True)
        raise typer.Exit(1)
    environment = {"NVSHARE_ENABLE": "1", "NVSHARE_CLASS": job_class}
    if memory is not None:
        environment["NVSHARE_MEMORY"] = memory
    if limit is not None:
        parse_argument(parse_size, limit, "--limit")
        environment["NVSHARE_MEMORY_LIMIT"] = limit
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": display_name or f"Python {sys.version_info.major} (shared GPU)",
        "language": "python",
        "metadata": {"debugger": True},
        "env": environment,
    }
    directory = (_user_data() if user else Path(sys.prefix) / "share" / "jupyter") / "kernels" / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(f"nvshare-ctl: {error.filename}: {error.strerror}; --user installs it for yourself", err=True)
        raise typer.Exit(1) from None
    typer.echo(
        f"{spec['display_name']!r} is installed in {directory}; remove it with: jupyter kernelspec remove {name}"
    )


def _user_data() -> Path:
    """Jupyter's data directory of this user."""
    named = os.environ.get("JUPYTER_DATA_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "jupyter"
