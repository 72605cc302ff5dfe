"""Names of programs and figures as the views write them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from nvshare.coordinator.engine.standing import Standing
from nvshare.coordinator.system.users import user_name
from nvshare.coordinator.units import format_duration, format_size


def program(client: Mapping[str, Any]) -> str:
    """`train.py (alice)`."""
    return f"{client['name']} ({user_name(client['user_id'])})"


def programs(status: Mapping[str, Any]) -> dict[int, str]:
    """The programs by client.  Programs of one user and name have their process ids, where these are known."""
    named = {client["client"]: program(client) for client in status["clients"]}
    found = list(named.values())
    return {
        client["client"]: f"{client['name']} ({user_name(client['user_id'])}, {client['process_id']})"
        if found.count(named[client["client"]]) > 1 and client["process_id"] > 0
        else named[client["client"]]
        for client in status["clients"]
    }


def first_of(names: Iterable[str], most: int | None) -> str:
    """`a, b +2`; "-" for none.  Without `most` all of them."""
    every = list(names)
    rest = 0 if most is None else max(0, len(every) - most)
    return ", ".join(every[:most]) + (f" +{rest}" if rest else "") or "-"


def size(value_bytes: int) -> str:
    """A size; "-" for none."""
    return format_size(value_bytes) if value_bytes else "-"


def size_of(part_bytes: int, whole_bytes: int) -> str:
    """`3.2/139GiB`."""
    part, whole = format_size(part_bytes), format_size(whole_bytes)
    unit = whole.lstrip("0123456789.")
    same = part_bytes and part.lstrip("0123456789.") == unit
    return f"{part.removesuffix(unit) if same else '0' if not part_bytes else part}/{whole}"


def card_words(sensors: Mapping[str, Any]) -> str:
    """`87% busy, 63 C, 312 of 700 W, 41GiB of memory in use`, as far as the card tells; "" if it tells nothing."""
    busy, degrees, watts = sensors["busy"], sensors["temperature_c"], sensors["power_watts"]
    most, used = sensors["power_limit_watts"], sensors["used_bytes"]
    told = [
        "" if busy is None else f"{busy:.0%} busy",
        "" if degrees is None else f"{degrees} C",
        "" if watts is None else f"{watts:.0f}{'' if most is None else f' of {most:.0f}'} W",
        "" if used is None else f"{format_size(used)} of memory in use",
    ]
    return ", ".join(filter(None, told))


def quantum(gpu: Mapping[str, Any]) -> str:
    """`100ms`, or `100ms auto`."""
    return format_duration(gpu["quantum_ns"]) + (" auto" if gpu["quantum_automatic"] else "")


def state(client: Mapping[str, Any], seat: Mapping[str, Any] | None, now_ns: int | None) -> str:
    """`running`, `waiting 1.2s`, `paused`, ...; without `now_ns` no time."""
    if seat is None:
        return "paused" if client["paused"] else "idle"
    shown = str(seat["state"])
    if now_ns is not None and seat["waiting_since_ns"] is not None:
        shown += f" {duration(max(0, now_ns - seat['waiting_since_ns']))}"
    return shown


def why(client: Mapping[str, Any], seat: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Why it may not run now; "" if it may, or wants nothing."""
    if not seat["reason"]:
        return ""
    stands = Standing(**{each.name: seat[each.name] for each in fields(Standing)})
    blocker = next((program(each) for each in status["clients"] if each["client"] == stands.blocker), "")
    order = next(gpu["queue"] for gpu in status["gpus"] if gpu["uuid"] == seat["uuid"])
    place = order.index(client["client"]) if client["client"] in order else 0
    return stands.sentence(shlex.quote(client["name"]), blocker, place, seat["lacking_bytes"])


def duration(value_ns: int) -> str:
    """A time for people who watch: `350ms`, `1.2s`, `12s`, `3m20s`, `2h05m`."""
    seconds = value_ns // 1_000_000_000
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    if seconds >= 60:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds >= 10:
        return f"{seconds}s"
    return f"{value_ns / 1e9:.1f}s" if seconds else f"{value_ns // 1_000_000}ms"
