"""Who holds which lease, in a file that survives the coordinator.

A file of fixed records, rewritten in place: a grant costs one system call of about a microsecond.  A killed process
loses nothing of it, since the kernel keeps the pages; after a crash of the node there is no holder to wait for.

Invariants: a record is believed only when its checksum fits, so a torn or foreign file costs no more than what it held;
a holder is believed only if a process with that id *and* that start time lives, so a reused id is not taken for it.
A record of this boot whose checksum does not fit may hide a holder: it counts as `MANY_HOLDERS`.
The file's space is allocated before the first record.  A record that cannot be written is kept and written with the
next one, and costs nothing else; so the file is not mapped, where a full file system is a SIGBUS and not an error.

May not go here: what a recovery does (engine/scheduler.py).
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvshare.coordinator.model.commands import MANY_HOLDERS

log: Final = logging.getLogger("nvshare")

_MAGIC: Final = b"nvshare-journal2"
_BOOT_BYTES: Final = 40
_HEADER_BYTES: Final = 64
_RECORD: Final = struct.Struct("=96sQqQI4x")  # uuid, lease id, process id, its start time, checksum
_BODY: Final = struct.Struct("=96sQqQ")


@dataclass(frozen=True, slots=True)
class Record:
    """What the journal says of one GPU.  `process_id` 0: nobody held it."""

    lease_id: int
    process_id: int
    started_at: int


class Journal:
    """One file, one record for each GPU that this coordinator serves."""

    def __init__(self, path: Path, uuids: Sequence[str], started_at: Callable[[int], int | None] | None = None) -> None:
        """Reads what an earlier coordinator left (`earlier`), then makes room for these GPUs.  Raises OSError.

        `started_at` replaces `start_time` where processes are models.
        """
        self._started_at = started_at or start_time
        self.earlier = _read(path)
        self.failure: OSError | None = None
        """Why the file does not say what it should; None while it does."""
        size = _HEADER_BYTES + _RECORD.size * max(1, len(uuids))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._path = path
        self._offsets = {uuid: _HEADER_BYTES + _RECORD.size * i for i, uuid in enumerate(uuids)}
        self._names = {uuid: uuid.encode()[:96] for uuid in uuids}
        self._started: dict[int, int] = {}
        self._unwritten: dict[int, bytes] = {}
        """By offset: what the file does not have yet."""
        self._last: tuple[str, Record] | None = None
        """Written last."""
        self._complained = True  # while it is made a failure is raised, not logged
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            os.ftruncate(self._descriptor, size)
            self._put(0, (_MAGIC + boot_id()).ljust(_HEADER_BYTES, b"\0"))
            for uuid in uuids:
                self._write(uuid, self.earlier.get(uuid, Record(0, 0, 0)))
            if self.failure is not None:
                raise self.failure
        except OSError:
            os.close(self._descriptor)
            raise
        self._complained = False

    def holder(self, uuid: str) -> int | None:
        """The process that held the lease when the earlier coordinator ended, if it lives still.

        MANY_HOLDERS for several, and for one whose process id is not known (negative): nobody can say whether it lives.
        """
        record = self.earlier.get(uuid)
        if record is not None and record.process_id < 0:
            return MANY_HOLDERS
        if record is None or not record.process_id or self._started_at(record.process_id) != record.started_at:
            return None
        return record.process_id

    def next_lease_id(self, uuid: str) -> int:
        """Ids go on where the earlier coordinator stopped; from 1 where that is lost (see engine/recovery.py)."""
        record = self.earlier.get(uuid)
        return record.lease_id + 1 if record is not None else 1

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        """Rewrites one record."""
        started = self._started.get(process_id)
        if started is None and process_id > 0:
            started = self._started[process_id] = self._started_at(process_id) or 0
        self._write(uuid, Record(lease_id, process_id, started or 0))

    def rewrite(self) -> None:
        """Writes the last record again.  Shortly before the next one it brings what that needs into the caches."""
        if self._last is not None:
            self._write(*self._last)

    def forget(self, process_id: int) -> None:
        """The process has no connection any more; its id may be reused."""
        self._started.pop(process_id, None)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, uuid: str, record: Record) -> None:
        self._last = (uuid, record)
        body = _BODY.pack(self._names[uuid], record.lease_id, record.process_id, record.started_at)
        self._put(self._offsets[uuid], body + struct.pack("=I4x", zlib.crc32(body)))

    def _put(self, offset: int, content: bytes) -> None:
        """Everything that the file lacks, this included.  What fails is said once and tried again the next time."""
        self._unwritten[offset] = content
        try:
            for at, lacking in self._unwritten.items():
                _write_all(self._descriptor, lacking, at)
        except OSError as error:
            self.failure = error
            if not self._complained:
                self._complained = True
                log.warning("%s", self.problem())
            return
        self._unwritten.clear()
        if self.failure is not None:
            self.failure = None
            log.info("%s is written again", self._path)

    def problem(self) -> str | None:
        """What the operator should know of it; None when all is well."""
        if self.failure is None:
            return None
        return (
            f"{self._path} cannot be written ({self.failure.strerror}): leases go on, but a coordinator that starts "
            "now does not know who holds them and may let another program run beside a holder"
        )


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    """Raises OSError also where a part had room."""
    if os.pwrite(descriptor, content, offset) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def start_time(process_id: int) -> int | None:
    """Clock ticks after boot at which the process started; None when it does not live (a zombie does not)."""
    fields = _stat(process_id)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def is_stopped(process_id: int) -> bool:
    """Whether the process lives and does nothing until somebody lets it go on: SIGSTOP, or a debugger."""
    return _stat(process_id)[:1] in ([b"T"], [b"t"])


def _stat(process_id: int) -> list[bytes]:
    """From the state on; empty when there is no such process."""
    try:
        content = Path(f"/proc/{process_id}/stat").read_bytes()
    except OSError:
        return []
    return content[content.rindex(b")") + 2 :].split()


def boot_id() -> bytes:
    """Process ids and start times mean something within one boot only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:_BOOT_BYTES]
    except OSError:
        return b""


def _read(path: Path) -> dict[str, Record]:
    """The records that can be believed.  After a reboot only the numbering counts."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    found: dict[str, Record] = {}
    if not content.startswith(_MAGIC):
        return found
    same_boot = content[len(_MAGIC) : _HEADER_BYTES].rstrip(b"\0") == boot_id()
    for offset in range(_HEADER_BYTES, len(content) - _RECORD.size + 1, _RECORD.size):
        name, lease_id, process_id, started_at, checksum = _RECORD.unpack_from(content, offset)
        uuid = name.rstrip(b"\0").decode("utf-8", "replace")
        if checksum != zlib.crc32(content[offset : offset + _BODY.size]):
            lease_id, process_id, started_at = 0, MANY_HOLDERS, 0
        if uuid:
            found[uuid] = Record(lease_id, process_id, started_at) if same_boot else Record(lease_id, 0, 0)
    return found
