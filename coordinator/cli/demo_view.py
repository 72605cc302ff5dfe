"""The demo's terminal output: a live timeline of each client, and a table at the end."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvshare.coordinator.cli.demo_ledger import ClientRecord, Ledger

STRIP_COLUMNS = 40
STRIP_NS = 2_000_000_000
_SHADES = "·░▒▓█"
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue")


def live(ledger: Ledger, where: str, remaining_s: float) -> RenderableType:
    """The last seconds of each client; darker cells mean longer leases."""
    table = Table(box=None, padding=(0, 1))
    table.add_column("client", no_wrap=True)
    table.add_column(f"held, the last {STRIP_NS / 1e9:.0f} s", width=STRIP_COLUMNS, no_wrap=True)
    for title in ("leases", "GPU s", "max wait"):
        table.add_column(title, justify="right", no_wrap=True)
    for record, colour in zip(ledger.clients.values(), itertools.cycle(_COLOURS), strict=False):
        table.add_row(
            Text(record.name, style=colour),
            Text(strip(record, ledger.latest_ns), style=colour),
            str(len(record.holds)),
            f"{record.held_ns / 1e9:.2f}",
            f"{record.max_wait_ns / 1e6:.1f} ms",
        )
    head = Text(f"{where}: {ledger.handovers} hand-overs, {max(0.0, remaining_s):.0f} s to go", style="bold")
    return Group(head, table)


def strip(record: ClientRecord, now_ns: int) -> str:
    """One character for each time slice, by the share of it in which the client held the GPU."""
    slice_ns = STRIP_NS // STRIP_COLUMNS
    first_ns = now_ns - STRIP_NS
    held = [0] * STRIP_COLUMNS
    for start_ns, end_ns in record.holds:
        start, end = max(0, start_ns - first_ns), end_ns - first_ns
        for cell in range(start // slice_ns, min(STRIP_COLUMNS, -(-end // slice_ns))):
            held[cell] += min(end, (cell + 1) * slice_ns) - max(start, cell * slice_ns)
    return "".join(_SHADES[-(-min(share, slice_ns) * (len(_SHADES) - 1) // slice_ns)] for share in held)


def summary(result: Mapping[str, Any], where: str, verdict: str) -> RenderableType:
    """The table at the end."""
    table = Table(title=where)
    table.add_column("client")
    for title in ("leases", "GPU seconds", "longest wait"):
        table.add_column(title, justify="right")
    for client in result["clients"]:
        table.add_row(
            client["name"], str(client["leases"]), f"{client['gpu_seconds']:.2f}", f"{client['max_wait_ms']:.1f} ms"
        )
    figures = result["handover_us"]
    cost = "" if figures["p50"] is None else f", {figures['p50']:.0f} us (p50) and {figures['p99']:.0f} us (p99) each"
    return Group(table, Text(f"{result['handovers']} hand-overs{cost} beyond the drain"), Text(verdict, style="bold"))
