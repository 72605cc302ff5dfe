"""The use of the GPUs: sums of each hour, kept over restarts, for `nvshare-ctl usage`.

Each minute with a client, and when a client leaves, the growth of its counters is added to the present hour by `Key`.
GPU time is time with a lease; a minute in which programs ran side by side is divided among them, so a GPU has 60
minutes an hour.  Memory counts as the larger of the amounts at both ends of a minute.

A line of the files has an hour (seconds since 1970), a key and its sums; a line that is read twice counts once.
`usage.now.jsonl` has the present hour and is replaced after a minute that changed it.  A finished hour is appended to
`usage.jsonl`, which becomes `usage.old.jsonl` when it is full.

Invariants: an hour has some `MAX_KEYS` keys at most; use beyond them is counted without slot and pod, then as `OTHERS`.
So the files have a week at least.  A thread writes, so a slow disk delays no grant.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nvshare.coordinator.engine.snapshot import ClientSnapshot, SeatSnapshot, Snapshot
    from nvshare.coordinator.kubernetes.slots.slot import Slot

log: Final = logging.getLogger("nvshare")

PERIOD_NS: Final = 60_000_000_000
HOUR_S: Final = 3600
MAX_KEYS: Final = 512
MAX_FILE_BYTES: Final = 12 << 20
_NOW, _PAST, _OLD = "usage.now.jsonl", "usage.jsonl", "usage.old.jsonl"


@dataclass(frozen=True, slots=True)
class Key:
    """The user of a GPU.  Text is empty outside of slots and pods; their names are bounded by slot.py."""

    user: int
    slot: str
    namespace: str
    pod: str
    job_class: str
    gpu: str


OTHERS: Final = Key(-1, "", "", "", "", "")


@dataclass(slots=True)
class Sums:
    """The use of one key in one hour."""

    used_ns: int = 0
    waited_ns: int = 0
    moved_bytes: int = 0
    byte_seconds: int = 0

    def add(self, more: Sums) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(more, name))


@dataclass(slots=True)
class _Seen:
    """A client's counters on one GPU."""

    used_ns: int
    waited_ns: int
    moved_bytes: int
    allocated_bytes: int
    at_ns: int


class Usage:
    """The record of one coordinator.  Belongs to the loop's thread."""

    def __init__(
        self,
        directory: Path,
        now_ns: int,
        snapshot: Callable[[int], Snapshot],
        slot_of: Callable[[int], Slot | None] = lambda _: None,
        hidden: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`hidden`: only the coordinator's user may read the files.  `idle`: no client is registered.

        Raises OSError for an unusable directory.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._snapshot, self._slot_of, self._hidden, self._clock, self._idle = snapshot, slot_of, hidden, clock, idle
        self._hour = self._present_hour()
        self._sums: dict[Key, Sums] = {}
        self._seen: dict[tuple[int, str], _Seen] = {}
        self._ran: dict[Key, int] = {}
        """Time with a lease since the last look, before its division among programs that ran side by side."""
        self._looked_ns = now_ns
        self._due_ns = now_ns + PERIOD_NS
        self._finished: list[str] = []
        self._writer: threading.Thread | None = None
        self._changed = False
        """The sums, since the last write began."""
        self._mode: int | None = None
        """Of the files that were written last."""
        self.failure = ""
        for hour, key, sums in _lines_of(directory / _NOW):
            if hour == self._hour:
                self._sums[key] = sums
            else:
                self._finished.append(_line(hour, key, sums))

    def _present_hour(self) -> int:
        now_s = int(self._clock())
        return now_s - now_s % HOUR_S

    # --- counting -----------------------------------------------------------------------------------------------------

    def left(self, client: ClientSnapshot, now_ns: int) -> None:
        """A client is about to leave."""
        self._count(client, now_ns)
        for seat in client.seats:
            self._seen.pop((client.client, seat.uuid), None)

    def next_deadline_ns(self) -> int | None:
        """When `expire` is due; None while no client is registered and the files are as they should be."""
        return None if self._idle() and not self._is_unwritten() and not self._is_writing() else self._due_ns

    def expire(self, now_ns: int) -> None:
        """Counts all clients and writes the files if they should change."""
        self.look(now_ns)
        self._due_ns = now_ns + PERIOD_NS
        if self._is_unwritten() and not self._is_writing():  # else the disk hangs
            self._writer = threading.Thread(target=self._write, args=self._texts(), name="usage", daemon=True)
            self._writer.start()

    def look(self, now_ns: int) -> None:
        """Counts all clients.  The minute belongs to the hour in which it began."""
        if not self._seen and not self._ran:  # maybe hours without a look
            self._begin_hour()
        clients = self._snapshot(now_ns).clients
        for client in clients:
            self._count(client, now_ns)
        present = {(client.client, seat.uuid) for client in clients for seat in client.seats}
        self._seen = {key: seen for key, seen in self._seen.items() if key in present}
        elapsed_ns, ran_ns = now_ns - self._looked_ns, Counter[str]()
        for key, used_ns in self._ran.items():
            ran_ns[key.gpu] += used_ns
        for key, used_ns in self._ran.items():
            self._sums[key].used_ns += used_ns * elapsed_ns // max(1, elapsed_ns, ran_ns[key.gpu])
        self._ran, self._looked_ns = {}, now_ns
        self._begin_hour()

    def _begin_hour(self) -> None:
        if (hour := self._present_hour()) > self._hour:
            if sum(map(len, self._finished)) < MAX_FILE_BYTES:
                self._finished += self._present_lines()
                self._changed = True
            self._hour, self._sums = hour, {}

    def _count(self, client: ClientSnapshot, now_ns: int) -> None:
        for seat in client.seats:
            times, moved_bytes, has_bytes = seat.statistics, seat.moves.moved_bytes, seat.memory.allocated_bytes
            since_ns = max(self._looked_ns, client.registered_at_ns)
            before = self._seen.get((client.client, seat.uuid)) or _Seen(0, 0, 0, 0, since_ns)
            self._seen[client.client, seat.uuid] = _Seen(times.used_ns, times.waited_ns, moved_bytes, has_bytes, now_ns)
            ran_ns = max(0, times.used_ns - before.used_ns)
            grown = Sums(
                waited_ns=max(0, times.waited_ns - before.waited_ns),
                moved_bytes=max(0, moved_bytes - before.moved_bytes),
                byte_seconds=max(has_bytes, before.allocated_bytes) * max(0, now_ns - before.at_ns) // 1_000_000_000,
            )
            if ran_ns or grown != Sums():
                self._changed = True
                key = self._bounded(self._key(client, seat))
                self._ran[key] = self._ran.get(key, 0) + ran_ns
                self._sums.setdefault(key, Sums()).add(grown)

    def _key(self, client: ClientSnapshot, seat: SeatSnapshot) -> Key:
        who, slot = client.identity, self._slot_of(client.client)
        pod = None if slot is None else slot.pod
        names = ("", "") if pod is None else (pod.namespace, pod.name)
        return Key(who.user_id, who.group, *names, client.rank.job_class.name.lower(), seat.uuid)

    def _bounded(self, key: Key) -> Key:
        for each, most in ((key, MAX_KEYS), (replace(key, slot="", pod=""), MAX_KEYS + MAX_KEYS // 8)):
            if each in self._sums or len(self._sums) < most:
                return each
        return OTHERS

    # --- files --------------------------------------------------------------------------------------------------------

    def close(self, now_ns: int) -> None:
        """Counts all clients once more and writes the files."""
        try:
            self.look(now_ns)
        except Exception:
            log.warning("the use of the last minute is lost", exc_info=True)  # the core is broken
        if self._writer is not None:
            self._writer.join(1.0)
        if not self._is_writing():
            self._write(*self._texts())

    def problem(self) -> str | None:
        """The files' fault, for the operator; None without one."""
        return f"{self.failure}: `nvshare-ctl usage` lacks these hours" if self.failure else None

    def _present_lines(self) -> list[str]:
        return [_line(self._hour, key, sums) for key, sums in self._sums.items()]

    def _is_unwritten(self) -> bool:
        return self._changed or self._mode != self._wanted_mode() or bool(self.failure)

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _wanted_mode(self) -> int:
        return 0o600 if self._hidden() else 0o644

    def _texts(self) -> tuple[str, str, int]:
        """The present hour, the lines that have finished since the last call, and the files' mode."""
        finished, self._finished = "".join(self._finished), []
        self._changed, self._mode = False, self._wanted_mode()
        return "".join(self._present_lines()), finished, self._mode

    def _write(self, present: str, finished: str, mode: int) -> None:
        past, fresh = self.directory / _PAST, self.directory / f".{_NOW}.new"
        try:
            if finished:
                with contextlib.suppress(FileNotFoundError):
                    if past.stat().st_size + len(finished) > MAX_FILE_BYTES:
                        past.replace(self.directory / _OLD)
                _put(past, finished, mode, os.O_APPEND)
            _put(fresh, present, mode, os.O_TRUNC)
            fresh.replace(self.directory / _NOW)
            for other in (past, self.directory / _OLD):
                with contextlib.suppress(FileNotFoundError):
                    other.chmod(mode)
            self.failure = ""
        except OSError as error:
            if not self.failure:
                log.warning("%s: %s", self.directory, error.strerror)
            self.failure = f"cannot write in {self.directory} ({error.strerror})"


def _put(path: Path, text: str, mode: int, how: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)
        file.write(text)


def _line(hour: int, key: Key, sums: Sums) -> str:
    return json.dumps([hour, *astuple(key), *astuple(sums)], separators=(",", ":")) + "\n"


_LINE: Final = [int, int, *[str] * 5, *[int] * 4]
Row = tuple[int, Key, Sums]
"""Hour (seconds since 1970), key, sums."""


def read(directory: Path) -> Iterator[Row]:
    """All rows that are kept, each hour and key once.  Raises OSError for files that may not be read."""
    found: dict[tuple[int, Key], Sums] = {}
    for name in (_OLD, _PAST, _NOW):
        found |= {(hour, key): sums for hour, key, sums in _lines_of(directory / name)}
    for (hour, key), sums in found.items():
        yield hour, key, sums


def _lines_of(path: Path) -> Iterator[Row]:
    """The rows of a file, without those that a full disk or a crash has damaged."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError):
                values = json.loads(line)
                if [type(each) for each in values] == _LINE:
                    yield values[0], Key(*values[1:7]), Sums(*values[7:])
