"""`notify_command`: a shell command for events that people want to hear of, so that "GPU 0 is free" reaches a chat.

Invariants: one command runs at a time, in a thread, for at most `LONGEST_S`; events beyond `QUEUED` are lost, which the
log says.  The words of programs reach the command in variables and as JSON, never as words of the shell.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

log: Final = logging.getLogger("nvshare")

QUEUED: Final = 64
LONGEST_S: Final = 30.0
TEXTS: Final = {
    "free": "GPU {gpu} is free: no program is attached to it",
    "registered": "{name} has started",
    "gone": "{name} has ended",
    "lacks_room": "{name} waits: GPU {gpu} has no room for its memory",
    "has_room": "GPU {gpu} has room for {name} again",
    "refused": "{name} was refused memory",
    "overdue": "{name} still uses GPU {gpu} after its turn",
    "policy": "policy {policy} decides on GPU {gpu}",
}
"""The sentence of each kind of event that people want to hear of."""


class Notifications:
    """Events become runs of the command, from `start` to `close`."""

    def __init__(self, command: str, uuids: Sequence[str], environment: Mapping[str, str]) -> None:
        """`uuids`: the GPUs, by index."""
        self._command = command
        self._indices = {uuid: index for index, uuid in enumerate(uuids)}
        self._environment = environment
        self._names: dict[int, str] = {}
        self._queue: queue.Queue[dict[str, str] | None] = queue.Queue(QUEUED)
        self._losing = False
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def observe(self, kind: str, values: Mapping[str, Any]) -> None:
        """An event of the loop; returns at once."""
        client = values.get("client")
        if kind == "registered":
            self._names[values["client"]] = values["name"]
        name = self._names.get(client, "") if client is not None else ""
        if kind == "gone":
            self._names.pop(values["client"], None)
        if kind not in TEXTS:
            return
        words = {"name": name, "gpu": str(self._indices.get(values.get("uuid", ""), "")), "policy": ""}
        text = TEXTS[kind].format(**words | {key: str(value) for key, value in values.items() if key in words})
        variables = {"KIND": kind, "TEXT": text, "NAME": name, "GPU": words["gpu"], "JSON": json.dumps(values)}
        try:
            self._queue.put_nowait({f"NVSHARE_EVENT_{key}": value for key, value in variables.items()})
            self._losing = False
        except queue.Full:
            if not self._losing:
                log.warning("notify_command is too slow: events are lost")
            self._losing = True

    def close(self) -> None:
        """Ends the thread after what waits, unless the coordinator ends before; a command that runs goes on."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _run(self) -> None:
        while (variables := self._queue.get()) is not None:
            self._carry_out(variables)

    def _carry_out(self, variables: Mapping[str, str]) -> None:
        try:
            running = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env={**self._environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("notify_command: %s", error)
            return
        try:
            code = running.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            log.warning("notify_command was ended after %g s", LONGEST_S)
            return
        if code:
            log.warning("notify_command ended with %d for %r", code, variables["NVSHARE_EVENT_TEXT"])
