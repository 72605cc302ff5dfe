"""The table of `nvshare-ctl slots`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nvshare.coordinator.cli.views.table import layout, number, text, word
from nvshare.coordinator.cli.views.words import duration, size, size_of

_COLUMNS: Final = (
    *(word("GPU"), number("CLIENTS"), word("CLASS"), number("SHARE"), number("PRIO", wide=True)),
    *(number("WEIGHT", wide=True), text("GANG", wide=True), number("MEMORY"), number("LEASES", wide=True)),
    *(number("HELD", wide=True), number("WAITED", wide=True), word("HOOK")),
)


def pod_of(slot: Mapping[str, Any]) -> str:
    """`namespace/pod/container`; "-" while the pod is unknown."""
    return f"{slot['namespace']}/{slot['pod']}/{slot['container']}" if slot["pod"] else "-"


def lines(status: Mapping[str, Any], width: int | None = None, *, wide: bool = False) -> list[str]:
    """One line for each slot."""
    if not status.get("slots"):
        return ["no slots"]
    indices = {gpu["uuid"]: str(gpu["index"]) for gpu in status["gpus"]}
    pods = any(slot["pod"] for slot in status["slots"])
    names = (text("SLOT", wide=True), text("POD")) if pods else (text("SLOT"),)
    rows = [(*_names(slot)[: len(names)], *_row(slot, indices)) for slot in status["slots"]]
    return layout((*names, *_COLUMNS), rows, width, wide=wide)


def _names(slot: Mapping[str, Any]) -> tuple[str, str]:
    return slot["slot"], pod_of(slot) if slot["pod"] else slot["slot"]


def _row(slot: Mapping[str, Any], indices: Mapping[str, str]) -> tuple[str, ...]:
    used, limit = slot["allocated_bytes"], slot["limit_bytes"]
    most = 1.0 if slot["share_limit"] is None else slot["share_limit"]
    missing = "missing" if slot.get("hook_missing") else "never seen"
    hook = "other GPUs refused" if slot.get("refused") else "yes" if slot["registered"] else missing
    return (
        ",".join(indices.get(uuid, "?") for uuid in slot["gpus"]),
        str(slot["clients"]),
        slot["class"] or "batch",
        f"{slot['share_request'] or 0:.0%} to {most:.0%}",
        "-" if slot["priority"] is None else str(slot["priority"]),
        "-" if slot["weight"] is None else str(slot["weight"]),
        slot["gang"] or "-",
        size_of(used, limit) if limit else size(used),
        str(slot["leases"]),
        duration(slot["used_ns"]),
        duration(slot["waited_ns"]),
        "removed, programs left" if slot.get("removed") else hook,
    )
