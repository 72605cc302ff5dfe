"""`nvshare-ctl memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nvshare.coordinator.cli.views.sentences import host_lines, integrated_lines, room_lines
from nvshare.coordinator.cli.views.table import layout, number, text, word
from nvshare.coordinator.cli.views.words import program, size
from nvshare.coordinator.units import format_duration, format_size

_COLUMNS: Final = (
    *(number("GPU"), text("PROGRAM"), word("MODE"), number("ALLOCATED"), number("RESIDENT"), number("EVICTED")),
    *(number("LIMIT"), number("PINNED", wide=True), number("HOST", wide=True)),
    *(number(title, wide=True) for title in ("MOVED OUT", "MOVED IN", "HIDDEN", "EXPOSED", "WAITED", "LATE", "FAILED")),
    word("ORDER", wide=True),
)


def lines(status: Mapping[str, Any], width: int | None = None, *, wide: bool = False) -> list[str]:
    """One line for each GPU, one for each of its clients, and the host memory."""
    rows = []
    for gpu in status["gpus"]:
        rows.append(_gpu_row(gpu))
        rows += [
            _client_row(client, seat)
            for client in status["clients"]
            for seat in client["seats"]
            if seat["uuid"] == gpu["uuid"]
        ]
    found = layout(_COLUMNS, rows, width, wide=wide)
    found += [*integrated_lines(status), *host_lines(status), *room_lines(status)]
    found += [
        f"  c{client['client']} {program(client)}: {format_size(client['host_share_bytes'])} pinned"
        for client in status["clients"]
        if client["host_share_bytes"]
    ]
    for client in status["clients"]:
        who = f"c{client['client']} {program(client)}"
        if expected := sum(seat.get("prepare_bytes", 0) for seat in client["seats"]):
            ready = min(expected, sum(seat.get("prepared_bytes", 0) for seat in client["seats"]))
            found.append(f"  {who}: {format_size(ready)} of host memory ready to evict {format_size(expected)}")
        if released := sum(seat.get("released_bytes", 0) for seat in client["seats"]):
            found.append(f"  {who}: freed {format_size(released)} itself under pressure")
    return found


def _gpu_row(gpu: Mapping[str, Any]) -> list[str]:
    return [
        str(gpu["index"]),
        f"all {gpu['clients']}",
        "",
        *(size(gpu[f"{kind}_bytes"]) for kind in ("allocated", "resident")),
        size(gpu["allocated_bytes"] - gpu["resident_bytes"]),  # `evicted_bytes` counts what was ever moved out
        format_size(gpu["capacity_bytes"]),
        *(size(gpu[f"{kind}_bytes"]) for kind in ("pinned", "host", "evicted", "restored")),
        *(format_duration(gpu[f"{kind}_ns"]) for kind in ("hidden_move", "exposed_move", "moved")),
        str(gpu["late_switches"]),
        str(gpu["failed_orders"]),
        f"{gpu['moving']} open" if gpu["moving"] else "-",
    ]


def _client_row(client: Mapping[str, Any], seat: Mapping[str, Any]) -> list[str]:
    return [
        "",
        program(client),
        client["memory_mode"],
        *(size(seat[f"{kind}_bytes"]) for kind in ("allocated", "resident", "evicted", "limit", "pinned", "host")),
        *(size(seat[f"{kind}_bytes"]) for kind in ("moved_out", "moved_in")),
        *(format_duration(seat[f"{kind}_ns"]) for kind in ("hidden_move", "exposed_move")),
        "",
        "",
        str(seat["failed_orders"]),
        seat["moving"] or "-",
    ]
