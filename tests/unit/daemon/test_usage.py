"""Hourly sums of use: what is counted, what the files keep, and what `nvshare-ctl usage` makes of them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from nvshare.coordinator.cli import usage as report
from nvshare.coordinator.daemon import usage as records
from nvshare.coordinator.daemon.usage import HOUR_S, OTHERS, Key, Sums, Usage, read
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot
from nvshare.coordinator.model.settings import Sharing
from nvshare.scheduler_policies.registry import create
from tests.harness import GPU, Harness, ScriptedClient

GIB = 1 << 30
S = 1_000_000_000
FIRST_S = 500 * HOUR_S


class Node(Harness):
    """One GPU and its record of use, on clocks of the test's own."""

    def __init__(self, directory: Path, sharing: Sharing = Sharing.EXCLUSIVE) -> None:
        super().__init__(create, sharing=sharing, quantum_ns=30 * S)
        self.directory, self.clock_s, self.hidden = directory, FIRST_S, False
        self.slots: dict[int, Slot] = {}
        self.gpu(capacity=80 * GIB)
        self.usage = self.start()

    def start(self) -> Usage:
        asked = (self.scheduler.snapshot, self.slots.get, lambda: self.hidden, lambda: self.clock_s)
        return Usage(self.directory, self.clock.now_ns, *asked, lambda: not self.clients)

    def program(self, user: int, *, memory: int = 0, wanted: bool = True) -> ScriptedClient:
        return self.client("twin", user_id=user, memory=memory, wanted=wanted)

    def leave(self, client: ScriptedClient) -> None:
        last = self.scheduler.client_snapshot(client.client, self.clock.now_ns)
        assert last is not None
        self.usage.left(last, self.clock.now_ns)
        client.die()

    def after(self, seconds: int) -> None:
        self.advance(seconds * S)
        self.clock_s += seconds

    def written(self) -> bool:
        """Whether the next minute writes the present hour."""
        file = self.directory / "usage.now.jsonl"
        file.unlink(missing_ok=True)
        self.after(60)
        due_ns = self.usage.next_deadline_ns()
        if due_ns is not None and due_ns <= self.clock.now_ns:
            self.usage.expire(self.clock.now_ns)
            if self.usage._writer is not None:
                self.usage._writer.join()
        return file.exists()

    def kept(self) -> dict[int, Sums]:
        """What the files have, by user."""
        self.usage.close(self.clock.now_ns)
        found: dict[int, Sums] = {}
        for _, key, sums in read(self.directory):
            found.setdefault(key.user, Sums()).add(sums)
        return found


def test_turns_waits_and_memory_are_counted(tmp_path: Path) -> None:
    """Broken: a bill names the wrong user, or leaves out who came and went between two looks."""
    node = Node(tmp_path)
    first, second = node.program(7, memory=GIB), node.program(8)
    node.after(30)
    first.release()
    node.after(20)
    node.leave(second)
    node.after(10)
    assert node.kept() == {7: Sums(30 * S, 0, 0, 60 * GIB), 8: Sums(20 * S, 30 * S, 0, 0)}


def test_a_gpu_has_sixty_minutes_an_hour(tmp_path: Path) -> None:
    """Broken: programs side by side are each billed the whole GPU."""
    node = Node(tmp_path, Sharing.CONCURRENT)
    _, second = node.program(7), node.program(8)
    node.after(30)
    node.leave(second)
    node.after(30)
    assert {user: sums.used_ns for user, sums in node.kept().items()} == {7: 40 * S, 8: 20 * S}


def test_hours_outlast_restarts_and_are_counted_once(tmp_path: Path) -> None:
    """Broken: a restart loses or doubles hours, also one between the two files' writing."""
    node = Node(tmp_path)
    client = node.program(7)
    for _ in range(2):
        node.after(60)
        node.usage.close(node.clock.now_ns)
        node.usage = node.start()  # the hook connects to it again with new counters
        client.die()
        client = node.program(7)
    assert node.kept()[7].used_ns == 120 * S
    present = (tmp_path / "usage.now.jsonl").read_text()
    node.after(HOUR_S)
    node.usage.look(node.clock.now_ns)
    node.after(60)
    assert node.kept()[7].used_ns == (120 + HOUR_S + 60) * S
    assert {hour for hour, _, _ in read(tmp_path)} == {FIRST_S, FIRST_S + HOUR_S}
    with (tmp_path / "usage.jsonl").open("a") as past:
        past.write((tmp_path / "usage.jsonl").read_text() + "damaged\n[]\n[[]]\n7\n" + present[:20])
    node.usage = node.start()
    assert node.kept()[7].used_ns == (120 + HOUR_S + 60) * S


def test_nothing_makes_the_files_or_the_hour_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a user with many ids, or a year of uptime, fills the disk or the coordinator's memory."""
    monkeypatch.setattr(records, "MAX_KEYS", 8)
    monkeypatch.setattr(records, "MAX_FILE_BYTES", 3000)
    node = Node(tmp_path, Sharing.CONCURRENT)
    for number in range(1, 13):
        user = min(9, number)  # of many pods
        pod = PodRef(namespace="ml", name=f"p{number}", container="main")
        node.slots[number] = Slot(slot="s", allocation="1", allocated_at_s=0, gpus=(GPU,), device_ids=(GPU,), pod=pod)
        node.program(user, memory=GIB)
    node.program(20, memory=GIB)
    for _ in range(8):
        node.after(HOUR_S)
        node.usage.look(node.clock.now_ns)
        node.usage._write(*node.usage._texts())
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["usage.jsonl", "usage.now.jsonl", "usage.old.jsonl"]
    assert all(file.stat().st_size <= 3000 and stat.S_IMODE(file.stat().st_mode) == 0o644 for file in files)
    node.hidden = True
    node.usage.close(node.clock.now_ns)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    kept = list(read(tmp_path))
    assert 0 < len({hour for hour, _, _ in kept}) < 8
    last = {(key.user, key.pod): sums for hour, key, sums in kept if hour == max(hour for hour, _, _ in kept)}
    others = [(9, ""), (OTHERS.user, "")]
    assert sorted(last) == sorted([*((user, f"p{user}") for user in range(1, 9)), *others])
    assert [last[each].byte_seconds // (HOUR_S * GIB) for each in others] == [4, 1]


def test_an_idle_coordinator_sleeps(tmp_path: Path) -> None:
    """Broken: an idle node wakes and writes each minute, or a change of the files waits for the next program."""
    node = Node(tmp_path / "kept")
    assert node.written(), "a directory that cannot be written is known before the first program"
    assert node.usage.next_deadline_ns() is None
    client = node.program(7, memory=GIB)
    assert node.written()
    node.after(10)
    node.leave(client)
    assert node.written()
    assert not node.written()
    node.hidden = True
    assert node.written()
    node.hidden = False
    (tmp_path / "kept").rename(tmp_path / "away")
    assert not node.written()
    (tmp_path / "away").rename(tmp_path / "kept")
    assert node.written()
    assert node.usage.next_deadline_ns() is None
    node.after(5 * HOUR_S)
    node.program(8, wanted=False)
    assert node.written(), "the hour of the first program has ended"
    assert not node.written()
    node.program(9)
    node.after(1)
    assert node.kept()[9].used_ns == S
    assert {key.user: hour for hour, key, _ in read(node.directory)} == {7: FIRST_S, 9: FIRST_S + 5 * HOUR_S}


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Broken: hours are missing on the bill, and nobody knows since when."""
    node = Node(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    node.usage.close(node.clock.now_ns)
    assert "No such file or directory" in (node.usage.problem() or "")
    (tmp_path / "gone").mkdir()
    node.usage.close(node.clock.now_ns)
    assert node.usage.problem() is None


def test_the_report_has_a_line_for_each_user_slot_pod_or_class(tmp_path: Path) -> None:
    """Broken: a team is billed for another's pods, or hours outside of the period count."""
    node = Node(tmp_path)
    pod = PodRef(namespace="ml", name="train", container="main")
    node.slots[1] = Slot(slot="s1", allocation="1", allocated_at_s=0, gpus=(GPU,), device_ids=(GPU,), pod=pod)
    node.program(7, memory=GIB)
    node.program(8, wanted=False, memory=3 * GIB)
    node.after(60)
    node.usage.close(node.clock.now_ns)

    def shown(by: report.By, since_s: int = FIRST_S) -> list[tuple[str, float, float, float]]:
        found = report.report(read(tmp_path), by, since_s)["usage"]
        return [(each["name"], each["gpu_seconds"], each["share"], each["memory_byte_hours"]) for each in found]

    job, idle = (60.0, 1.0, GIB / 60), (0.0, 0.0, 3 * GIB / 60)
    assert shown("pod") == [("ml/train", *job), ("", *idle)]
    assert shown("namespace") == [("ml", *job), ("", *idle)]
    assert shown("class") == [("batch", 60.0, 1.0, 4 * GIB / 60)]
    assert [line[1:] for line in shown("user")] == [job, idle]
    assert [name for name, *_ in shown("gpu")] == [GPU]
    assert shown("slot", FIRST_S + HOUR_S) == []
    assert report.lines({"since_s": 0, "by": "slot", "usage": []})[0].startswith("no use since ")
    others = report.report([(FIRST_S, OTHERS, Sums(used_ns=S)), (FIRST_S, Key(-2, *[""] * 5), Sums())], "user", FIRST_S)
    assert others["usage"][0]["name"] == "others"
    table = report.lines(report.report(read(tmp_path), "pod", FIRST_S))
    assert table[1].split() == ["POD", "GPU", "TIME", "SHARE", "MEMORY", "x", "HOURS", "MOVED", "WAITED"]
    assert table[2].split() == ["ml/train", "1m00s", "100.0%", "17.07MiB", "-", "0ms"]
