"""The table of `nvshare-ctl slots`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nvshare.coordinator.cli.views.table import layout, number, text, word
from nvshare.coordinator.cli.views.words import duration, size

_COLUMNS: Final = (
    *(text("SLOT", wide=True), text("POD"), word("GPU"), number("CLIENTS"), number("PRIO", wide=True)),
    *(number("WEIGHT", wide=True), text("GANG", wide=True), number("ALLOCATED"), number("LIMIT")),
    *(number("LEASES", wide=True), number("HELD"), number("WAITED", wide=True), word("HOOK")),
)


def pod_of(slot: Mapping[str, Any]) -> str:
    """`namespace/pod/container`; "-" while the pod is unknown."""
    return f"{slot['namespace']}/{slot['pod']}/{slot['container']}" if slot["pod"] else "-"


def lines(status: Mapping[str, Any], width: int | None = None, *, wide: bool = False) -> list[str]:
    """One line for each slot."""
    if not status.get("slots"):
        return ["no slots"]
    indices = {gpu["uuid"]: str(gpu["index"]) for gpu in status["gpus"]}
    return layout(_COLUMNS, [_row(slot, indices) for slot in status["slots"]], width, wide=wide)


def _row(slot: Mapping[str, Any], indices: Mapping[str, str]) -> tuple[str, ...]:
    hook = "other GPUs refused" if slot.get("refused") else "yes" if slot["registered"] else "never seen"
    return (
        slot["slot"],
        pod_of(slot) if slot["pod"] else slot["slot"],
        ",".join(indices.get(uuid, "?") for uuid in slot["gpus"]),
        str(slot["clients"]),
        "-" if slot["priority"] is None else str(slot["priority"]),
        "-" if slot["weight"] is None else str(slot["weight"]),
        slot["gang"] or "-",
        size(slot["allocated_bytes"]),
        size(slot["limit_bytes"]),
        str(slot["leases"]),
        duration(slot["used_ns"]),
        duration(slot["waited_ns"]),
        "removed, programs left" if slot.get("removed") else hook,
    )
