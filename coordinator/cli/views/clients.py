"""`nvshare-ctl clients`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvshare.coordinator.cli.views.explain import class_name, percent
from nvshare.coordinator.cli.views.sentences import mode_lines
from nvshare.coordinator.cli.views.slots import pod_of
from nvshare.coordinator.cli.views.table import layout, number, text, word
from nvshare.coordinator.cli.views.words import duration, size, state
from nvshare.coordinator.system.users import user_name
from nvshare.coordinator.units import format_duration


def lines(status: Mapping[str, Any], width: int | None = None, *, wide: bool = False) -> list[str]:
    """One line for each client on each GPU.  In a cluster its pod stands for its user."""
    if not status["clients"]:
        return ["no clients"]
    slots = status.get("slots", ())
    pods = {slot.get("allocation"): pod_of(slot) for slot in slots if slot["pod"]}
    removed = {slot.get("allocation") for slot in slots if slot.get("removed")}
    columns = (
        *(number("ID"), number("PID", wide=True), text("NAME"), text("USER", wide=bool(pods))),
        *(number("GPU", wide=len(status["gpus"]) == 1), word("CLASS"), word("MODE"), word("STATE"), number("SHARE")),
        *(number(title, wide=True) for title in ("PROGRESS", "PRIO", "WEIGHT", "LEASES", "HELD", "MAX WAIT")),
        *(number("ALLOCATED", wide=True), text("GANG", wide=True), text("PLACED", wide=True)),
        *((text("SLOT", wide=bool(pods)), text("POD", wide=not pods)) if slots else ()),
    )
    indices = {gpu["uuid"]: str(gpu["index"]) for gpu in status["gpus"]}
    rows = []
    for client in status["clients"]:
        tail = [client["gang"] or "-", client["placed_why"] or "-"]
        slot = f"{client['group'] or '-'}{' (removed)' if client.get('allocation') in removed else ''}"
        tail += [slot, pods.get(client.get("allocation"), "-")] if slots else []
        for seat in client["seats"] or (None,):
            figures = _figures(client, seat)
            on = "-" if seat is None else indices[seat["uuid"]]
            shown_state = state(client, seat, status["now_ns"])
            rows.append([*_who(client), on, *_kind(client), shown_state, *figures, *tail])
    return [*layout(columns, rows, width, wide=wide), *mode_lines(status)]


def _who(client: Mapping[str, Any]) -> list[str]:
    return [f"c{client['client']}", str(client["process_id"]), client["name"], user_name(client["user_id"])]


def _kind(client: Mapping[str, Any]) -> list[str]:
    return [class_name(client), client["memory_mode"]]


def _figures(client: Mapping[str, Any], seat: Mapping[str, Any] | None) -> list[str]:
    """The columns from SHARE to ALLOCATED."""
    rank = [str(client["priority"]), str(client["weight"])]
    if seat is None:
        return ["-", "-", *rank, "-", "-", "-", "-"]
    return [
        f"{seat['recent_share']:.0%}",
        percent(seat["progress_normalised"]),
        *rank,
        str(seat["leases"]),
        duration(seat["used_ns"]),
        format_duration(seat["max_wait_ns"]),
        size(seat["allocated_bytes"]),
    ]
