"""The table of `nvshare-ctl slots`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nvshare.coordinator.units import format_duration, format_share, format_size

_TITLES: Final = (
    *("slot", "pod", "GPU", "clients", "priority", "weight", "class", "shares", "gang"),
    *("allocated", "limit", "leases", "held", "waited", "hook"),
)


def pod_of(slot: Mapping[str, Any]) -> str:
    """`namespace/pod/container`; "-" while the pod is unknown."""
    return f"{slot['namespace']}/{slot['pod']}/{slot['container']}" if slot["pod"] else "-"


def shares_of(slot: Mapping[str, Any]) -> str:
    """`30% to 50%`; "-" without either."""
    request, most = slot["share_request"], slot["share_limit"]
    if request is None and most is None:
        return "-"
    return f"{format_share(request or 0.0)} to {format_share(1.0 if most is None else most)}"


def show_slots(status: Mapping[str, Any]) -> None:
    """Prints one line for each slot."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=240)  # whole lines for scripts
    if not status.get("slots"):
        console.print("no slots")
        return
    indices = {gpu["uuid"]: str(gpu["index"]) for gpu in status["gpus"]}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in _TITLES:
        table.add_column(title)
    for slot in status["slots"]:
        table.add_row(
            escape(slot["slot"]),
            escape(pod_of(slot)),
            ",".join(indices.get(uuid, "?") for uuid in slot["gpus"]),
            str(slot["clients"]),
            "-" if slot["priority"] is None else str(slot["priority"]),
            "-" if slot["weight"] is None else str(slot["weight"]),
            slot["class"] or "-",
            shares_of(slot),
            escape(slot["gang"] or "-"),
            format_size(slot["allocated_bytes"]),
            format_size(slot["limit_bytes"]) if slot["limit_bytes"] else "-",
            str(slot["leases"]),
            format_duration(slot["used_ns"]),
            format_duration(slot["waited_ns"]),
            "registered" if slot["registered"] else "never registered",
        )
    console.print(table)
