"""The directory of slots, followed while the coordinator runs: slots come and go without a restart.

Invariants: changes are heard by inotify; where the system has none left, the directory is looked at every five
seconds; one turn reads a bounded number of slots, so the loop's other work waits no longer than for a few small files;
a slot whose file is broken is logged once and keeps what it had.

May not go here: what a slot may (kubernetes/slots/slot_book.py).
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.kubernetes.slots import inotify
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.slot import SlotError

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.transport import HookListener
    from nvshare.coordinator.kubernetes.slots.slot import Slot
    from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
    from nvshare.coordinator.model import events

log: Final = logging.getLogger("nvshare")

SLOTS_PER_TURN: Final = 16
LOOK_AGAIN_NS: Final = 5_000_000_000
_COMES_OR_GOES: Final = inotify.CREATE | inotify.MOVED_TO | inotify.MOVED_FROM | inotify.DELETE


class SlotWatch:
    """Keeps the book and the listening sockets as the directory is."""

    def __init__(self, directory: Path, hooks: HookListener, book: SlotBook) -> None:
        """The directory must be prepared."""
        self._directory = directory
        self._hooks = hooks
        self._book = book
        book.first_hello = self._hook_came
        self._dirty: dict[str, None] = {}  # an ordered set
        self._complained: dict[str, str] = {}
        self._watches: dict[int, str] = {}  # inotify's number -> slot
        self._watched: dict[str, int] = {}
        self._notices: inotify.Inotify | None = None
        self._polls = False
        self._look_at_ns: int | None = 0
        self._above = self._root = -1
        try:
            self._notices = inotify.Inotify()
            self._above = self._notices.add(directory.parent, _COMES_OR_GOES)
            self._root = self._notices.add(directory, _COMES_OR_GOES)
        except OSError as error:
            self._poll_instead(error)

    @property
    def descriptor(self) -> int | None:
        """Readable when something changed; None without inotify."""
        return None if self._notices is None else self._notices.descriptor

    def next_deadline_ns(self) -> int | None:
        """When `turn` has something to do besides."""
        return 0 if self._dirty else self._look_at_ns

    def turn(self, now_ns: int, ready: bool) -> list[events.Event]:
        """Reads what changed.  The events are for the scheduler."""
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
                self._look_at_ns = now_ns
        if self._look_at_ns is not None and now_ns >= self._look_at_ns:
            self._look_around()
            self._look_at_ns = now_ns + LOOK_AGAIN_NS if self._polls else None
        changes: list[events.Event] = []
        for name in list(self._dirty)[:SLOTS_PER_TURN]:
            del self._dirty[name]
            changes += self._refresh(name)
        return changes

    def close(self) -> None:
        """Of the listening sockets the transport takes care."""
        if self._notices is not None:
            self._notices.close()

    def _watch_root(self, name: str, now_ns: int) -> None:
        """The directory itself went or came.  (Its own watch may never say so: connections keep a removed one.)"""
        if name == self._directory.name and self._notices is not None:
            with contextlib.suppress(OSError):
                self._root = self._notices.add(self._directory, _COMES_OR_GOES)
            self._look_at_ns = now_ns

    def _look_around(self) -> None:
        try:
            found = [place.name for place in self._directory.iterdir() if not place.name.startswith(".")]
        except OSError as error:
            self._complain("", f"{self._directory}: {error.strerror}")
            found = []
        self._dirty |= dict.fromkeys([*found, *self._watched, *self._hooks.slots()])

    def _refresh(self, name: str) -> list[events.Event]:
        place = self._directory / name
        try:
            slots.check_name(name)
            if place.is_dir():
                self._watch(name, place)  # before reading: nothing can change unseen
                slot = slots.read(place)
            else:
                self._unwatch(name)
                slot = None
            if slot is None:
                self._forget(name)
                return []
            if name in self._hooks.slots() and not (place / slots.SOCKET_FILE).exists():
                self._hooks.unlisten(name)  # another directory of the same name
            if name not in self._hooks.slots():
                self._hooks.listen(place / slots.SOCKET_FILE, 0o666, name)
                log.info("slot %s: %s", name, ", ".join(slot.gpus))
        except (SlotError, OSError) as error:
            self._complain(name, f"slot {name}: {error}")
            return []
        self._complained.pop(name, None)
        return self._book.put(slot, registered=slots.hook_came(self._directory, slot))

    def _hook_came(self, slot: Slot) -> None:
        try:
            slots.note_hook_came(self._directory, slot)
        except OSError as error:
            self._complain(slot.slot, f"slot {slot.slot}: {error}")

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
        if before is not None:  # of an earlier directory of this name
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
            log.warning("inotify: %s; slots are looked for every %d s", error.strerror, LOOK_AGAIN_NS // 10**9)
        self._polls = True
        self._look_at_ns = 0

    def _forget(self, name: str) -> None:
        if name in self._hooks.slots():
            self._hooks.unlisten(name)
            log.info("slot %s is gone", name)
        self._complained.pop(name, None)
        self._book.take_away(name)

    def _complain(self, name: str, text: str) -> None:
        if self._complained.get(name) != text:
            self._complained[name] = text
            log.warning("%s", text)
