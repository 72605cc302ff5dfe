"""`nvshare-ctl usage`: who has used the GPUs, from the files that the coordinator keeps (daemon/usage.py)."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from nvshare.coordinator.cli.ctl_call import Json, Where, call, directory_of, fail, parse_argument, refusals
from nvshare.coordinator.cli.views.output import terminal_width
from nvshare.coordinator.cli.views.table import layout, number, text
from nvshare.coordinator.cli.views.words import duration, size
from nvshare.coordinator.daemon import usage as records
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.usage import HOUR_S, OTHERS, Key, Row, Sums
from nvshare.coordinator.system.users import user_name
from nvshare.coordinator.units import parse_duration

By = Literal["user", "slot", "namespace", "pod", "class", "gpu"]
_NAMES: Final[Mapping[By, Callable[[Key], str]]] = {
    "user": lambda key: user_name(key.user),
    "slot": lambda key: key.slot,
    "namespace": lambda key: key.namespace,
    "pod": lambda key: f"{key.namespace}/{key.pod}" if key.pod else "",
    "class": lambda key: key.job_class.replace("_", "-"),
    "gpu": lambda key: key.gpu,
}


def usage(
    context: typer.Context,
    since: Annotated[str, typer.Option(metavar="DURATION", help="such as 12h or 7d; whole hours")] = "7d",
    by: Annotated[By, typer.Option(help="whose use is a line")] = "user",
    as_json: Json = False,
    where: Where = None,
) -> None:
    """Say who has used the GPUs: GPU time, share, memory over time, memory moved, and waits."""
    since_ns = parse_argument(parse_duration, since, "--since")
    with refusals(as_json):
        directory = Path(call(directory_of(context, where), api.Ping())["usage_dir"])
    try:
        found = report(records.read(directory), by, int(time.time()) - since_ns // 10**9)
    except OSError as error:
        why = "; only root and the coordinator's user may read it (hide_other_users)" * (error.errno == errno.EACCES)
        fail(ControlError("usage", f"{error.filename}: {error.strerror}{why}"), as_json)
    typer.echo(json.dumps(found) if as_json else "\n".join(lines(found, terminal_width())))


def report(rows: Iterable[Row], by: By, since_s: int) -> dict[str, Any]:
    """The sums of all hours that ended after `since_s`, most GPU time first."""
    sums: dict[str, Sums] = {}
    first_s = since_s - since_s % HOUR_S
    for hour, key, used in rows:
        if hour >= first_s:
            name = "others" if key == OTHERS else _NAMES[by](key)
            sums.setdefault(name, Sums()).add(used)
    all_ns = sum(each.used_ns for each in sums.values()) or 1
    ordered = sorted(sums.items(), key=lambda item: (-item[1].used_ns, item[0]))
    found = [
        {
            "name": name,
            "gpu_seconds": used.used_ns / 1e9,
            "share": used.used_ns / all_ns,
            "memory_byte_hours": used.byte_seconds / HOUR_S,
            "moved_bytes": used.moved_bytes,
            "wait_seconds": used.waited_ns / 1e9,
        }
        for name, used in ordered
    ]
    return {"since_s": first_s, "by": by, "usage": found}


def lines(found: Mapping[str, Any], width: int | None = None) -> list[str]:
    """The report as a table."""
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["since_s"]))
    if not found["usage"]:
        return [f"no use since {begun}"]
    columns = (
        *(text(found["by"].upper()), number("GPU TIME"), number("SHARE")),
        *(number("MEMORY x HOURS"), number("MOVED"), number("WAITED")),
    )
    rows = [
        (
            each["name"] or "-",
            duration(int(each["gpu_seconds"] * 1e9)),
            f"{each['share']:.1%}",
            size(int(each["memory_byte_hours"])),
            size(each["moved_bytes"]),
            duration(int(each["wait_seconds"] * 1e9)),
        )
        for each in found["usage"]
    ]
    return [f"since {begun}", *layout(columns, rows, width)]
