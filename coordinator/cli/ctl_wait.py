"""`nvshare-ctl wait`: returns when a program runs, has room, or has ended, so that a shell can go on."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from nvshare.coordinator.cli.ctl_call import (
    ClientName,
    Json,
    Where,
    call_patiently,
    directory_of,
    parse_argument,
    refusals,
)
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.units import parse_duration

PERIOD_S: Final = 0.5


class Until(enum.StrEnum):
    """A state of a program."""

    RUNNING = "running"
    ROOM = "room"
    DONE = "done"


_REACHED: Final[dict[Until, Callable[[Mapping[str, Any]], bool]]] = {
    Until.RUNNING: lambda client: any(seat["holding_since_ns"] is not None for seat in client["seats"]),
    Until.ROOM: lambda client: not any(seat["unschedulable"] for seat in client["seats"]),
    Until.DONE: lambda client: False,
}
"""Whether a program that has not ended is in the state."""


def wait(
    context: typer.Context,
    client: ClientName,
    until: Annotated[
        Until, typer.Option(help="it has a turn; the GPU has room for its memory; or it has ended")
    ] = Until.DONE,
    timeout: Annotated[str | None, typer.Option(metavar="TIME", help="the longest wait, such as 10m")] = None,
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Wait until a program runs, has room, or has ended; exit code 1 when it ends before, or the time is over."""
    longest_s = float("inf") if timeout is None else parse_argument(parse_duration, timeout, "--timeout") / 1e9
    directory, end_s = directory_of(context, where), time.monotonic() + longest_s
    with refusals(as_json):
        clients = call_patiently(directory, api.Status())["clients"]
        named = [each for each in clients if api.is_named(client, each["client"], each["process_id"], each["name"])]
        found = api.the_only(client, named, lambda each: f"c{each['client']} (pid {each['process_id']})")
        known = {"client": found["client"], "name": found["name"]}
        present: Mapping[str, Any] | None = found
        if not _REACHED[until](found):
            typer.echo(f"waiting for client c{known['client']} ({known['name']})", err=True)
        while present is not None and not _REACHED[until](present) and time.monotonic() < end_s:
            time.sleep(min(PERIOD_S, max(0.0, end_s - time.monotonic())))
            clients = call_patiently(directory, api.Status())["clients"]
            present = next((each for each in clients if each["client"] == known["client"]), None)
    reached = until is Until.DONE if present is None else _REACHED[until](present)
    state = "done" if present is None else until.value if reached else "waiting"
    words = {"done": "has ended", "running": "runs", "room": "has room", "waiting": f"is not {until.value} yet"}
    typer.echo(
        json.dumps({**known, "state": state})
        if as_json
        else f"client c{known['client']} ({known['name']}) {words[state]}"
    )
    if not reached:
        raise typer.Exit(1)
