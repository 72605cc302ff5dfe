"""Events for people: clock time, GPU, program, and what has happened in milliseconds and bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from nvshare.coordinator.cli.views.words import program
from nvshare.coordinator.units import format_size

_SKIPPED: Final = frozenset(
    (
        *("seq", "at_ns", "kind", "uuid", "client", "name", "program", "process", "user"),
        *("lease", "order", "opened_at_ns", "running"),
    )
)
_PLAIN_VALUES: Final = ("why", "error")
"""Values that need no word in front of them."""


class Narrator:
    """Turns events into lines.  Knows the programs of one `status`, and those that events have named since."""

    def __init__(self, status: Mapping[str, Any], clock_offset_ns: int) -> None:
        """`clock_offset_ns`: the time of day less the node's monotonic clock."""
        self._offset_ns = clock_offset_ns
        self._gpus = {gpu["uuid"]: f"GPU {gpu['index']}" for gpu in status["gpus"]}
        self._names = {client["client"]: program(client) for client in status["clients"]}

    def line(self, event: Mapping[str, Any]) -> str:
        """One line of an event."""
        client = event.get("client")
        if event["kind"] == "registered" and "name" in event:
            self._names[event["client"]] = program({"name": event["name"], "user_id": event["user"]})
        who = "" if client is None else self._name(client, event.get("name"))
        if event.get("running"):  # of a plan
            who = ", ".join(self._name(int(each)) for each in event["running"].split(","))
        if event["kind"] == "gone":
            self._names.pop(event["client"], None)
        at_ns = event["at_ns"] + self._offset_ns
        clock = f"{time.strftime('%H:%M:%S', time.localtime(at_ns // 10**9))}.{at_ns // 10**6 % 1000:03}"
        where = self._gpus.get(event.get("uuid") or "", "")
        told = ", ".join(filter(None, (self._told(key, value) for key, value in event.items() if key not in _SKIPPED)))
        words = event["kind"].replace("_", " ")
        return f"{clock}  {where:<5}  {words:<10}  {': '.join(filter(None, (who, told)))}".rstrip()

    def _name(self, client: int, name: object = None) -> str:
        return self._names.get(client) or (str(name) if name else f"client c{client}")

    def _told(self, key: str, value: object) -> str:
        """`waited 12.3ms`; nothing for what is 0, empty or false."""
        if key == "drained":
            return "" if value else "not drained"
        if not value:
            return ""
        words = key.removesuffix("_ns").removesuffix("_bytes").replace("_", " ")
        if value is True:
            return words
        if key.endswith("_ns") and isinstance(value, (int, float)):
            shown = milliseconds(value)
        elif key.endswith("bytes") and isinstance(value, int):
            shown = format_size(value)
        else:
            shown = self._gpus.get(str(value), str(value))
        return shown if key in _PLAIN_VALUES or words == "bytes" else f"{words} {shown}"


def milliseconds(value_ns: float) -> str:
    """`0.12ms`, `12.3ms`, `1234ms`."""
    value = value_ns / 1e6
    return f"{value:.2f}ms" if value < 10 else f"{value:.1f}ms" if value < 1000 else f"{value:.0f}ms"
