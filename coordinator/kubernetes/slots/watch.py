"""Watches the directory of slots, so that slots appear and disappear while the coordinator runs.

Invariants: inotify reports changes; without inotify the watch scans the directory every five seconds.  One turn reads a
bounded number of slots, to keep the loop responsive.  An invalid slot file is logged once, and its slot keeps its
settings.

Non-goals: the rights of a slot (kubernetes/slots/slot_book.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.kubernetes.slots import inotify
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.slot import SlotError

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.transport import PeerListener
    from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook

log: Final = logging.getLogger("nvshare")

SLOTS_PER_TURN: Final = 16
LOOK_AGAIN_NS: Final = 5_000_000_000
_COMES_OR_GOES: Final = inotify.CREATE | inotify.MOVED_TO | inotify.MOVED_FROM | inotify.DELETE


class SlotWatch:
    """Keeps the slot book and the listening sockets equal to the directory."""

    def __init__(self, directory: Path, hooks: PeerListener, book: SlotBook) -> None:
        """The directory must exist: `slot.prepare`."""
        self._directory = directory
        self._hooks = hooks
        self._book = book
        self._dirty: dict[str, None] = {}  # an ordered set
        self._logged: dict[str, str] = {}
        self._watches: dict[int, str] = {}  # inotify's number -> slot
        self._watched: dict[str, int] = {}
        self._notices: inotify.Inotify | None = None
        self._polls = False
        self._scan_at_ns: int | None = 0
        self._above = self._root = -1
        try:
            self._notices = inotify.Inotify()
            self._above = self._notices.add(directory.parent, _COMES_OR_GOES)
            self._root = self._notices.add(directory, _COMES_OR_GOES)
        except OSError as error:
            self._poll_instead(error)

    @property
    def descriptor(self) -> int | None:
        """Readable after a change; None without inotify."""
        return None if self._notices is None else self._notices.descriptor

    def next_deadline_ns(self) -> int | None:
        """The next time at which `turn` has work without a change; None: never."""
        return 0 if self._dirty else self._scan_at_ns

    def turn(self, now_ns: int, ready: bool) -> list[int]:
        """Applies the changes; returns the clients whose slot has changed."""
        if ready and self._notices is not None:
            for change in self._notices.read():
                if change.watch == self._above:
                    self._watch_root(change.name, now_ns)
                    continue
                name = change.name if change.watch == self._root else self._watches.get(change.watch, "")
                if name and not name.startswith("."):
                    self._dirty[name] = None
            if self._notices.overflowed:
                self._notices.overflowed = False
                self._scan_at_ns = now_ns
        if self._scan_at_ns is not None and now_ns >= self._scan_at_ns:
            self._scan()
            self._scan_at_ns = now_ns + LOOK_AGAIN_NS if self._polls else None
        clients: list[int] = []
        for name in list(self._dirty)[:SLOTS_PER_TURN]:
            del self._dirty[name]
            clients += self._refresh(name)
        return clients

    def close(self) -> None:
        """Closes inotify; the transport closes the listening sockets."""
        if self._notices is not None:
            self._notices.close()

    def _watch_root(self, name: str, now_ns: int) -> None:
        """Rewatches the directory after its removal or creation, which its own watch may not report."""
        if name == self._directory.name and self._notices is not None:
            with contextlib.suppress(OSError):
                self._root = self._notices.add(self._directory, _COMES_OR_GOES)
            self._scan_at_ns = now_ns

    def _scan(self) -> None:
        try:
            found = [place.name for place in self._directory.iterdir() if not place.name.startswith(".")]
        except OSError as error:
            self._log_once("", f"{self._directory}: {error.strerror}")
            found = []
        self._dirty |= dict.fromkeys([*found, *self._watched, *self._hooks.slots()])

    def _refresh(self, name: str) -> list[int]:
        place = self._directory / name
        try:
            slots.check_name(name)
            if place.is_dir():
                self._watch(name, place)  # before reading, so that no change is missed
                slot = slots.read(place)
            else:
                self._unwatch(name)
                slot = None
            if slot is None:
                self._forget(name)
                return []
            if name in self._hooks.slots() and not (place / slots.SOCKET_FILE).exists():
                self._hooks.unlisten(name)  # the directory was replaced
            if name not in self._hooks.slots():
                self._hooks.listen(place / slots.SOCKET_FILE, 0o666 if slot.user_id is None else 0o600, name)
                if slot.user_id is not None:
                    os.chown(place / slots.SOCKET_FILE, slot.user_id, -1)
                log.info("slot %s: %s", name, ", ".join(slot.gpus))
        except (SlotError, OSError) as error:
            self._log_once(name, f"slot {name}: {error}")
            return []
        self._logged.pop(name, None)
        return self._book.put(slot, registered=slots.hook_registered(self._directory, slot))

    def _watch(self, name: str, place: Path) -> None:
        if self._notices is None:
            return
        try:
            watch = self._notices.add(place, inotify.MOVED_TO | inotify.DELETE)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._poll_instead(error)
            return
        before = self._watched.get(name)
        if before == watch:
            return
        if before is not None:  # a replaced directory of this name
            self._unwatch(name)
        self._watched[name] = watch
        self._watches[watch] = name

    def _unwatch(self, name: str) -> None:
        watch = self._watched.pop(name, None)
        if watch is not None and self._notices is not None:
            self._watches.pop(watch, None)
            self._notices.remove(watch)

    def _poll_instead(self, error: OSError) -> None:
        if not self._polls:
            log.warning("inotify: %s; scanning for slots every %d s", error.strerror, LOOK_AGAIN_NS // 10**9)
        self._polls = True
        self._scan_at_ns = 0

    def _forget(self, name: str) -> None:
        if name in self._hooks.slots():
            self._hooks.unlisten(name)
            log.info("slot %s is removed", name)
        self._logged.pop(name, None)
        self._book.remove(name)

    def _log_once(self, name: str, text: str) -> None:
        if self._logged.get(name) != text:
            self._logged[name] = text
            log.warning("%s", text)
