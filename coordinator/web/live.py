"""One picture for all browsers: asks the coordinator, and gives each browser the text to show.

Invariants: the coordinator is asked only while a browser looks, at most twice a second, and at most one twentieth of
the time.  A browser that does not read is disconnected; it asks again and gets the whole picture.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from nvshare.coordinator.cli.trace.spans import Spans
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.web import view
from nvshare.coordinator.web.reader import Reader

log: Final = logging.getLogger("nvshare")

PERIOD_S: Final = 0.5
PAUSE_FACTOR: Final = 20.0
"""The shortest pause between two questions, as a multiple of the time that an answer takes."""
MAX_BROWSERS: Final = 64
MAX_SPANS: Final = 6000
KEPT_NS: Final = 300_000_000_000
MERGED_NS: Final = 5_000_000
"""About a pixel of the page."""
_QUEUED: Final = 4

_Queue = asyncio.Queue[str | None]


class Live:
    """The browsers that look now, and what they get."""

    def __init__(self, reader: Reader, period_s: float = PERIOD_S) -> None:
        self._reader = reader
        self._period_s = period_s
        self._timeline = Spans(merged_ns=MERGED_NS, most=MAX_SPANS)
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()  # the time line is filled by the thread of the events
        self._fresh: set[_Queue] = set()  # browsers that need the whole picture
        self._browsers: dict[_Queue, None] = {}  # oldest first
        self._someone = asyncio.Event()

    def follow_events(self) -> None:
        """Fills the time line from now on, in a thread of its own."""
        threading.Thread(target=self._reader.follow, args=(self.take_event,), name="events", daemon=True).start()

    def take_event(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._timeline.add(event)
            if "name" in event and event.get("client") is not None:
                self._names[event["client"]] = event["name"]
            if event["seq"] % 256 == 0:
                self._forget(event["at_ns"])

    def _forget(self, now_ns: int) -> None:
        """Forgets old spans, and names without a span."""
        self._timeline.forget(now_ns - KEPT_NS)
        if len(self._names) > 256:
            used = {span.client for span in self._timeline.spans()}
            self._names = {client: name for client, name in self._names.items() if client in used}

    def join(self) -> AsyncIterator[str]:
        """The pictures for one more browser.  Beyond `MAX_BROWSERS` the one that has looked longest ends."""
        if len(self._browsers) >= MAX_BROWSERS:
            self._end(next(iter(self._browsers)))
        queue: _Queue = asyncio.Queue(_QUEUED)
        self._browsers[queue] = None
        self._fresh.add(queue)
        self._someone.set()
        return self._pictures(queue)

    async def _pictures(self, queue: _Queue) -> AsyncIterator[str]:
        try:
            while (text := await queue.get()) is not None:
                yield text
        finally:
            self._leave(queue)

    def _leave(self, queue: _Queue) -> None:
        self._browsers.pop(queue, None)
        self._fresh.discard(queue)
        if not self._browsers:
            self._someone.clear()

    async def run(self) -> None:
        """Serves the browsers, for ever."""
        revision = 0
        while True:
            await self._someone.wait()
            began = time.monotonic()
            found = await asyncio.to_thread(self._ask)
            took_s = time.monotonic() - began
            revision = self._spread(found, revision)
            await asyncio.sleep(max(self._period_s, PAUSE_FACTOR * took_s))

    def _ask(self) -> dict[str, Any]:
        """A `status` reply, or its error."""
        try:
            reply: dict[str, Any] = self._reader.call(api.Status())
        except (api.ControlError, NoCoordinatorError) as error:
            return {"error": str(error)}
        return reply

    def _spread(self, status: dict[str, Any], revision: int) -> int:
        """Gives each browser the picture with the spans that it lacks.  Returns their revision."""
        if "error" in status:
            self._give(self._browsers.keys() - self._fresh, json.dumps(status))
            self._give(self._fresh, json.dumps(status))
            return revision
        with self._lock:
            self._forget(status["now_ns"])
            self._names |= {client["client"]: client["name"] for client in status["clients"]}
            picture = view.picture(status, self._names)
            newer = view.spans(self._timeline.spans(revision))
            every = view.spans(self._timeline.spans()) if self._fresh else []
            revision = self._timeline.revision
        self._give(self._browsers.keys() - self._fresh, json.dumps({**picture, "spans": newer}))
        if self._fresh:
            self._give(self._fresh, json.dumps({**picture, "spans": every, "whole": True}))
            self._fresh.clear()
        return revision

    def _give(self, browsers: set[_Queue], text: str) -> None:
        for queue in list(browsers):
            if queue.full():
                self._end(queue)
            else:
                queue.put_nowait(text)

    def _end(self, queue: _Queue) -> None:
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
        self._leave(queue)
