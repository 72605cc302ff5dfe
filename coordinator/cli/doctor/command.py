"""The command `nvshare-ctl doctor`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from nvshare.coordinator.cli.ctl_call import Json, Where, directory_of
from nvshare.coordinator.cli.doctor.facts import Finding

_MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}
_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "problem": typer.colors.RED}


def doctor(
    context: typer.Context,
    process_id: Annotated[int | None, typer.Argument(metavar="PID", min=1, help="also examine this program")] = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Examine driver, coordinator, rights and a program; say what is wrong and what to do."""
    from nvshare.coordinator.cli.doctor.checks import examine
    from nvshare.coordinator.cli.doctor.gather import gather

    findings = examine(gather(directory_of(context, where), process_id))
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for finding in findings:
            typer.echo(_line(finding, colours=colours))
    raise typer.Exit(1 if any(finding.level == "problem" for finding in findings) else 0)


def _line(finding: Finding, *, colours: bool) -> str:
    mark = _MARKS[finding.level].ljust(7)
    mark = typer.style(mark, fg=_COLOURS[finding.level]) if colours else mark
    remedy = f"\n{'':9}{finding.remedy}" if finding.remedy else ""
    return f"{mark}  {finding.about}: {finding.text}{remedy}"
