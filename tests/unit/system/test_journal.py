"""Facts that a restarted coordinator reads from the journal."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.model.commands import MANY_HOLDERS
from nvshare.coordinator.system.journal import Journal, start_time

GPU = "GPU-00000000-0000-0000-0000-000000000000"
OTHER = "MIG-11111111-0000-0000-0000-000000000000"


def test_a_living_holder_is_found_again(tmp_path: Path) -> None:
    """Broken if a restart forgot who holds the lease, or gave an old id again."""
    first = Journal(tmp_path / "journal", [GPU, OTHER])
    assert (first.holder(GPU), first.next_lease_id(GPU)) == (None, 1)
    first.record(GPU, 7, os.getpid())
    first.close()
    second = Journal(tmp_path / "journal", [OTHER, GPU])  # the cards may come in another order
    assert (second.holder(GPU), second.next_lease_id(GPU)) == (os.getpid(), 8)
    assert (second.holder(OTHER), second.next_lease_id(OTHER)) == (None, 1)
    second.close()
    third = Journal(tmp_path / "journal", [GPU])  # nothing was recorded meanwhile
    assert (third.holder(GPU), third.next_lease_id(GPU)) == (os.getpid(), 8)


def test_a_freed_lease_has_no_holder_but_a_number(tmp_path: Path) -> None:
    """Broken if a restart waited for a client that has given its lease back."""
    first = Journal(tmp_path / "journal", [GPU])
    first.record(GPU, 9, os.getpid())
    first.record(GPU, 9, 0)
    second = Journal(tmp_path / "journal", [GPU])
    assert (second.holder(GPU), second.next_lease_id(GPU)) == (None, 10)


def test_a_holder_without_a_known_process_is_waited_for(tmp_path: Path) -> None:
    """Broken if a holder in another PID namespace were taken for nobody, which makes two holders."""
    Journal(tmp_path / "journal", [GPU]).record(GPU, 3, -17)
    assert Journal(tmp_path / "journal", [GPU]).holder(GPU) == MANY_HOLDERS


def test_a_dead_holder_is_not_waited_for(tmp_path: Path) -> None:
    """Broken if a process that has ended, or is a zombie, were taken for a holder."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    Journal(tmp_path / "journal", [GPU]).record(GPU, 5, child.pid)
    assert Journal(tmp_path / "journal", [GPU]).holder(GPU) == child.pid
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert start_time(child.pid) is None
    assert Journal(tmp_path / "journal", [GPU]).holder(GPU) is None
    child.wait()
    assert Journal(tmp_path / "journal", [GPU]).holder(GPU) is None
    assert child.stdin is not None
    child.stdin.close()


def test_a_reused_process_id_is_not_the_holder(tmp_path: Path) -> None:
    """Broken if another process with the same id were waited for."""
    journal = Journal(tmp_path / "journal", [GPU])
    journal._started[os.getpid()] = 1  # what the file would say if this id had belonged to an older process
    journal.record(GPU, 5, os.getpid())
    assert Journal(tmp_path / "journal", [GPU]).holder(GPU) is None


class FullDisk:
    """`os.pwrite` as it is on a file system that has no room, or room for half of a record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: int | None = None
        """The error; 0: a short write."""
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._write)

    def _write(self, descriptor: int, content: bytes, offset: int) -> int:
        if self.full:
            raise OSError(self.full, os.strerror(self.full))
        return self._pwrite(descriptor, content if self.full is None else content[: len(content) // 2], offset)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, 0])
def test_a_journal_that_cannot_be_written_is_said_once_and_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    """Broken if a full disk ended the coordinator, filled the log, or left records behind when it had room again."""
    disk = FullDisk(monkeypatch)
    journal = Journal(tmp_path / "journal", [GPU, OTHER])
    assert journal.problem() is None
    disk.full = error
    with caplog.at_level(logging.INFO, "nvshare"):
        for lease in range(5, 8):
            journal.record(GPU, lease, os.getpid())
        journal.record(OTHER, 3, MANY_HOLDERS)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert os.strerror(error or errno.ENOSPC) in str(journal.problem())
        disk.full = None
        journal.record(GPU, 8, os.getpid())
    assert journal.problem() is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    again = Journal(tmp_path / "journal", [GPU, OTHER])
    assert (again.holder(GPU), again.next_lease_id(GPU)) == (os.getpid(), 9)
    assert (again.holder(OTHER), again.next_lease_id(OTHER)) == (MANY_HOLDERS, 4)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, 0])
def test_a_journal_that_cannot_be_made_raises_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    """Broken if a coordinator began without a journal, or said so in more than the one message that ends it."""
    disk = FullDisk(monkeypatch)
    disk.full = error
    with pytest.raises(OSError, match=os.strerror(error or errno.ENOSPC)):
        Journal(tmp_path / "journal", [GPU])
    assert not caplog.records


def test_the_space_of_a_journal_is_there_before_it_is_used(tmp_path: Path) -> None:
    """Broken if the file had only a length: a record would then need space when it is written."""
    path = tmp_path / "journal"
    path.write_bytes(b"")
    os.truncate(path, 100_000)  # as an earlier version left it: a length without space
    uuids = [f"GPU-{number}" for number in range(64)]
    journal = Journal(path, uuids)
    found = path.stat()
    assert found.st_blocks * 512 >= found.st_size >= 64 * 96
    os.truncate(path, 0)  # somebody else's mistake is no SIGBUS
    journal.record(uuids[5], 1, os.getpid())
    assert journal.problem() is None


@pytest.mark.parametrize("same_boot", [True, False])
def test_a_record_that_cannot_be_believed_may_hide_a_holder(
    same_boot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a grant without the recovery window would meet the holder of a torn record (invariant 1).  No holder
    survives a reboot, and the record of another GPU keeps its meaning."""
    path = tmp_path / "journal"
    journal = Journal(path, [GPU, OTHER])
    journal.record(GPU, 7, os.getpid())
    journal.record(OTHER, 3, os.getpid())
    journal.close()
    content = bytearray(path.read_bytes())
    content[64 + 96] ^= 1  # the lease id of the first record
    path.write_bytes(content)
    if not same_boot:
        monkeypatch.setattr("nvshare.coordinator.system.journal.boot_id", lambda: b"another boot")
    for _ in range(2):  # a second restart within the window knows the same
        again = Journal(path, [GPU, OTHER])
        assert again.holder(GPU) == (MANY_HOLDERS if same_boot else None)
        assert again.next_lease_id(GPU) > (7 if same_boot else 0)
        assert (again.holder(OTHER), again.next_lease_id(OTHER)) == (os.getpid() if same_boot else None, 4)
        again.close()


def flip(at: int, content: bytes) -> bytes:
    """One bit of the content is wrong."""
    return content[:at] + bytes((content[at] ^ 4,)) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole.replace(b"nvshare-journal", b"another-journal"),
        lambda whole: b"",
        lambda whole: whole[:100],
        lambda whole: whole[:-1],
        *(partial(flip, at) for at in (5, 20, 57, 61, 70, 165)),
    ],
)
def test_an_unknown_past_is_no_empty_past(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """Broken: invariant 7, another program is granted beside the holder of a journal that cannot be read, by its id."""
    path = tmp_path / "journal"
    for _ in range(2):  # the second time it is known to be lost
        with closing(Journal(path, [GPU])) as journal:
            journal.record(GPU, max(7, journal.next_lease_id(GPU)), os.getpid())
            last = journal.next_lease_id(GPU)
        path.write_bytes(damage(path.read_bytes()))
        for _ in range(2):  # also after one more restart
            with closing(Journal(path, [GPU])) as again:
                assert again.holder(GPU) == MANY_HOLDERS
                assert again.next_lease_id(GPU) > max(8, last)


@given(damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8), cut=st.integers(0, 400))
def test_damage_costs_at_most_what_it_hit(damage: list[tuple[int, int]], cut: int) -> None:
    """Broken if a damaged file raised, or gave a holder that was never recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = Journal(path, [GPU, OTHER])
        journal.record(GPU, 7, os.getpid())
        journal.close()
        content = bytearray(path.read_bytes())
        for at, value in damage:
            if at < len(content):
                content[at] = value
        path.write_bytes(content[: max(0, len(content) - cut)])
        again = Journal(path, [GPU, OTHER])
        assert again.holder(GPU) in (None, os.getpid(), MANY_HOLDERS)
        assert again.next_lease_id(GPU) >= 8
        assert again.holder(OTHER) in (None, MANY_HOLDERS)
        again.close()
