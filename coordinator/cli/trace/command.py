"""The command `nvshare-ctl trace`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from nvshare.coordinator.cli.ctl_call import REFUSED, Where, call, check_reachable, directory_of, refusals
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import EventReader, NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.units import count

Seconds = Annotated[float, typer.Option("--seconds", min=0.1, max=3600, help="how long; Ctrl-C ends it earlier")]
Out = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="the trace, for https://ui.perfetto.dev")]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command()(trace)


def trace(
    context: typer.Context, seconds: Seconds = 10.0, out: Out = Path("trace.json"), where: Where = None
) -> None:
    """Record leases, waits, memory moves and plans, and write them for Perfetto."""
    from nvshare.coordinator.cli.trace import perfetto, recording

    directory = directory_of(context, where)
    with refusals(as_json=False):
        check_reachable(directory)
        before, events, after = _listen(directory, seconds)
    found = recording.record(events, before, after or recording.NO_STATUS)
    try:
        out.write_text(json.dumps(perfetto.trace(found)), encoding="utf-8")
    except OSError as error:
        typer.echo(f"nvshare-ctl: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(REFUSED) from None
    lost = f"; {found.lost} events were lost" if found.lost else ""
    programs = len({span.client for span in (*found.leases, *found.waits)})
    told = f"{count(len(found.leases), 'lease')}, {count(programs, 'program')}{lost}"
    print(f"{out}: {told}; open it in https://ui.perfetto.dev")


def _listen(directory: RuntimeDir, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The events until the time is over, Ctrl-C or the coordinator's end, and the status before and after them."""
    events: list[dict[str, Any]] = []
    reader = EventReader(directory.events_socket)
    try:
        before: dict[str, Any] = call(directory, api.Status())
        if sys.stderr.isatty():
            sys.stderr.write(f"recording for {seconds:g} s\n")
        end_s = time.monotonic() + seconds
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                quiet_s, since_s = min(left_s, 0.2), time.monotonic()
                for frame in reader.frames(int(quiet_s * 1000) + 1):
                    events.append(api.decode_event(frame))
                    since_s = time.monotonic()
                    if since_s >= end_s:
                        break
                if (
                    time.monotonic() - since_s < quiet_s / 2
                ):  # no timeout: the coordinator has ended, or the time is over
                    break
        except KeyboardInterrupt:
            pass
    finally:
        reader.close()
    after: dict[str, Any] = {}
    with contextlib.suppress(NoCoordinatorError):
        after = call(directory, api.Status())
    return before, [event for event in events if event["at_ns"] >= before["now_ns"]], after
