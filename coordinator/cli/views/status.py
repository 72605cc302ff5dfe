"""`nvshare-ctl status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nvshare.coordinator.cli.views.sentences import (
    gang_lines,
    host_lines,
    integrated_lines,
    live_lines,
    mps_line,
    room_lines,
)
from nvshare.coordinator.cli.views.table import layout, number, text, word
from nvshare.coordinator.cli.views.words import first_of, programs, quantum, size_of
from nvshare.coordinator.units import count, format_duration, format_share

_COLUMNS: Final = (
    *(number("GPU"), text("NAME"), text("POLICY"), word("SHARING", wide=True), word("QUANTUM")),
    *(number("SWITCH SHARE", wide=True), number("MEMORY"), number("CLIENTS", wide=True), number("WAITING")),
    *(number("LEASES", wide=True), number("HAND-OVER", wide=True), number("SWITCH", wide=True)),
    *(number("OVERDUE", wide=True), text("RUNNING")),
)


def lines(status: Mapping[str, Any], width: int | None = None, *, wide: bool = False) -> list[str]:
    """One line for each GPU, then problems, memory, live settings and gangs."""
    names = programs(status)
    gpus = count(len(status["gpus"]), "simulated GPU" if status["simulated"] else "GPU")
    head = f"coordinator {status['pid']} in {status['runtime_dir']}, {gpus}"
    found = [head, *_table(status, names, width, wide=wide)]
    found += [f"problem: {problem}" for problem in status.get("problems", ())]
    found += [mps_line(status["mps"]), *integrated_lines(status), *host_lines(status), *room_lines(status)]
    for gpu in status["gpus"]:
        if gpu.get("expected_stopped"):
            text = f"GPU {gpu['index']} is not granted: process {gpu['expected_process']} held it before the restart"
            found.append(f"{text} and is stopped; continue it (kill -CONT) or end it")
    found += [f"live setting: {line}" for line in live_lines(status.get("live", ()), status)]
    return found + gang_lines(status, names)


def _table(status: Mapping[str, Any], names: Mapping[int, str], width: int | None, *, wide: bool) -> list[str]:
    """The table with as many names of running programs as the width allows."""
    found = []
    for most in (None,) if width is None or wide else (None, 3, 2, 1):
        found = layout(_COLUMNS, [_row(gpu, names, most) for gpu in status["gpus"]], width, wide=wide)
        if not any("…" in line for line in found):
            break
    return found


def _row(gpu: Mapping[str, Any], names: Mapping[int, str], most: int | None) -> tuple[str, ...]:
    shown = first_of((names.get(client, f"client c{client}") for client in gpu["holders"]), most)
    return (
        str(gpu["index"]),
        gpu["name"],
        gpu["policy"],
        gpu["sharing"],
        quantum(gpu),
        format_share(gpu["switch_share"]),
        size_of(gpu["resident_bytes"], gpu["capacity_bytes"]),
        str(gpu["clients"]),
        str(gpu["waiting"]),
        str(gpu["grants"]),
        f"{gpu['handovers_us']['p50']:.0f}us" if gpu["handovers_us"] else "-",
        format_duration(gpu["switch_cost_ns"]) if gpu["switch_cost_ns"] else "-",
        str(gpu["overdue"]),
        "recovering" if gpu["recovering"] else shown,
    )
