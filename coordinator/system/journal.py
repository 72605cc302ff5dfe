"""The journal: a file with the lease holder of each GPU, for recovery after a coordinator's crash.

The file has fixed records, rewritten in place: a grant costs one system call of about a microsecond.  It survives a
killed process because the kernel keeps the pages.  After a crash of the node there are no holders.

Invariants:
- Header and records count only with a correct checksum.  A file that is damaged, cut, or of another version may hide a
  holder and the last lease id: a GPU without a correct record in it has `MANY_HOLDERS`, and a lease id above any that
  was given (microseconds since boot: no coordinator grants that often).  Without a file there is no past.
- A holder counts only if a process with its id *and* start time lives, so a reused id is not mistaken for it.
- The file's space is allocated before the first record.  A failed write is repeated with the next one.  The file is
  not memory-mapped, because a full file system would then be a SIGBUS instead of an error.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvshare.coordinator.model.commands import MANY_HOLDERS

log: Final = logging.getLogger("nvshare")

_MAGIC: Final = b"nvshare-journal3"
_BOOT_BYTES: Final = 40
_HEADER: Final = struct.Struct("=16s40sI")  # magic, boot, number of records; a checksum follows
_HEADER_BYTES: Final = 64
_RECORD: Final = struct.Struct("=96sQqQI4x")  # uuid, lease id, process id, its start time, checksum
_BODY: Final = struct.Struct("=96sQqQ")


@dataclass(frozen=True, slots=True)
class Record:
    """The last lease of one GPU.  `process_id` 0: none is held."""

    lease_id: int
    process_id: int
    started_at: int


class Journal:
    """One file, one record for each GPU that this coordinator serves."""

    def __init__(
        self,
        path: Path,
        uuids: Sequence[str],
        started_at: Callable[[int], int | None] | None = None,
        lost_lease_id: int | None = None,
    ) -> None:
        """Reads the earlier records into `earlier`, then prepares the file for these GPUs.  Raises OSError.

        `started_at` replaces `start_time` in simulations, `lost_lease_id` the time since boot.
        """
        self._started_at = started_at or start_time
        self.earlier = _read(path, uuids, lost_lease_id or time.monotonic_ns() // 1000)
        self.failure: OSError | None = None
        """Reason of the last failed write; None while the file is current."""
        size = _HEADER_BYTES + _RECORD.size * max(1, len(uuids))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._path = path
        self._offsets = {uuid: _HEADER_BYTES + _RECORD.size * i for i, uuid in enumerate(uuids)}
        self._names = {uuid: uuid.encode()[:96] for uuid in uuids}
        self._started: dict[int, int] = {}
        self._unwritten: dict[int, bytes] = {}
        """Unwritten content by offset."""
        self._complained = True  # a failure during construction is raised, not logged
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            os.ftruncate(self._descriptor, size)
            header = _HEADER.pack(_MAGIC, boot_id(), len(uuids))
            self._put(0, header + struct.pack("=I", zlib.crc32(header)))
            for uuid in uuids:
                self._write(uuid, self.earlier.get(uuid, Record(0, 0, 0)))
            if self.failure is not None:
                raise self.failure
        except OSError:
            os.close(self._descriptor)
            raise
        self._complained = False

    def holder(self, uuid: str) -> int | None:
        """The living process that held the lease when the earlier coordinator ended.

        MANY_HOLDERS for several holders, and for one of unknown process id (negative), which may be alive.
        """
        record = self.earlier.get(uuid)
        if record is not None and record.process_id < 0:
            return MANY_HOLDERS
        if record is None or not record.process_id or self._started_at(record.process_id) != record.started_at:
            return None
        return record.process_id

    def next_lease_id(self, uuid: str) -> int:
        """Continues the earlier coordinator's numbering; 1 without a record (see engine/recovery.py)."""
        record = self.earlier.get(uuid)
        return record.lease_id + 1 if record is not None else 1

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        """Writes the record of one GPU."""
        started = self._started.get(process_id)
        if started is None and process_id > 0:
            started = self._started[process_id] = self._started_at(process_id) or 0
        self._write(uuid, Record(lease_id, process_id, started or 0))

    def forget(self, process_id: int) -> None:
        """Drops the cached start time of a process without connections, whose id may be reused."""
        self._started.pop(process_id, None)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, uuid: str, record: Record) -> None:
        body = _BODY.pack(self._names[uuid], record.lease_id, record.process_id, record.started_at)
        self._put(self._offsets[uuid], body + struct.pack("=I4x", zlib.crc32(body)))

    def _put(self, offset: int, content: bytes) -> None:
        """Writes this and all earlier unwritten content.  Logs the first of several failures."""
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
            log.info("%s is writable again", self._path)

    def problem(self) -> str | None:
        """The file's fault, for the operator; None without one."""
        if self.failure is None:
            return None
        return (
            f"cannot write {self._path} ({self.failure.strerror}): after a restart the coordinator would not know the "
            "lease holders and could let another program run beside one"
        )


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    """Writes all of `content`.  Raises OSError, also after a partial write."""
    if os.pwrite(descriptor, content, offset) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def start_time(process_id: int) -> int | None:
    """Start time of a process in clock ticks after boot; None for a dead process or a zombie."""
    fields = _stat(process_id)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def is_stopped(process_id: int) -> bool:
    """Whether the process is stopped by SIGSTOP or a debugger."""
    return _stat(process_id)[:1] in ([b"T"], [b"t"])


def _stat(process_id: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on; empty without such a process."""
    try:
        content = Path(f"/proc/{process_id}/stat").read_bytes()
    except OSError:
        return []
    return content[content.rindex(b")") + 2 :].split()


def boot_id() -> bytes:
    """The id of this boot: process ids and start times are valid within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:_BOOT_BYTES]
    except OSError:
        return b""


def _read(path: Path, uuids: Sequence[str], lost_lease_id: int) -> dict[str, Record]:
    """The records of these GPUs.  After a reboot only their lease ids remain."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    header, found = content[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"), dict[str, Record]()
    magic, boot, count = _HEADER.unpack_from(header)
    whole = magic == _MAGIC and header[_HEADER.size :] == struct.pack("=I", zlib.crc32(header[: _HEADER.size]))
    same_boot = not whole or boot.rstrip(b"\0") == boot_id()
    for offset in range(_HEADER_BYTES, _HEADER_BYTES + _RECORD.size * count if whole else 0, _RECORD.size):
        record = content[offset : offset + _RECORD.size]
        if len(record) < _RECORD.size or _RECORD.unpack(record)[4] != zlib.crc32(record[: _BODY.size]):
            whole = False
            continue
        name, lease_id, process_id, started_at, _ = _RECORD.unpack(record)
        uuid = name.rstrip(b"\0").decode("utf-8", "replace")
        found[uuid] = Record(lease_id, process_id, started_at) if same_boot else Record(lease_id, 0, 0)
    if not whole and same_boot:
        log.warning("%s is damaged or of another version: an earlier lease holder may be at work", path)
        return dict.fromkeys(uuids, Record(lost_lease_id, MANY_HOLDERS, 0)) | found
    return found
