"""Slots: their files, what the coordinator makes of them, and the limit that a slot's processes share."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.daemon.peers import Limits
from nvshare.coordinator.daemon.transport import PeerListener
from nvshare.coordinator.kubernetes.slots import metrics
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot, SlotError
from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
from nvshare.coordinator.kubernetes.slots.watch import LOOK_AGAIN_NS, SlotWatch
from nvshare.coordinator.model import events
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness
from tests.waiting import eventually

A, B = "GPU-a", "GPU-b"
GIB = 1 << 30


def a_slot(name: str = "GPU-a--0", **changes: Any) -> Slot:
    """Valid, changed."""
    facts: dict[str, Any] = {"allocation": "1", "allocated_at_s": 1.0, "gpus": (A,), "device_ids": ("GPU-a::0",)}
    return Slot.model_validate({"slot": name, **facts, **changes})


def own(**values: Any) -> Facts:
    """What a program says of itself."""
    return Facts().having(**values)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_slot_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Else limits and pods are lost between plugin and coordinator."""
    slot = a_slot(
        policy={"priority": "-3", "class": "batch", "gang": "n/g", "weight": "2", "memory_limit": "1GiB"},
        pod=PodRef(namespace="n", name="p", container="c"),
    )
    slots.write(tmp_path, slot)
    assert slots.read(tmp_path / slot.slot) == slot
    changed = slot.model_copy(update={"pod": None})
    slots.write(tmp_path, changed)
    assert slots.read_all(tmp_path) == {slot.slot: changed}
    assert json.loads((tmp_path / slot.slot / "slot.json").read_text())["policy"]["class"] == "batch"
    slots.remove(tmp_path, slot.slot)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "content: Invalid JSON"),
        ("[]", "content: "),
        ("{}", "slot: Field required"),
        (a_slot("other").model_dump_json(), "slot: is 'other', but the directory is 'GPU-a--0'"),
        (json.dumps({**a_slot().model_dump(), "gpus": []}), "gpus: "),
        (json.dumps({**a_slot().model_dump(), "policy": {"memory_limit": -1}}), "policy: Value error, memory_limit: "),
        (json.dumps({**a_slot().model_dump(), "policy": {"weight": 0}}), "policy: Value error, weight: "),
        (json.dumps({**a_slot().model_dump(), "policy": {"share_limit": 0}}), "policy: Value error, share_limit: "),
        ("x" * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_broken_slot_file_names_the_field(tmp_path: Path, content: str, text: str) -> None:
    """Else a slot is missing and nobody knows why."""
    place = tmp_path / "GPU-a--0"
    place.mkdir()
    (place / slots.SLOT_FILE).write_text(content)
    with pytest.raises(SlotError, match=text):
        slots.read(place)
    assert slots.read_all(tmp_path) == {}


def test_names_are_file_names_and_paths_fit(tmp_path: Path) -> None:
    """Else a device id escapes the directory, or the socket cannot be bound."""
    mig = "MIG-11111111-2222-3333-4444-555555555555"
    assert slots.name_for(f"{mig}::12") == f"{mig}--12"
    assert slots.name_for("MIG-GPU-1/3/0::1") == "MIG-GPU-1_3_0--1"
    for wrong in ("", "..", ".x", "a b", "a" * 57, "GPU:0"):
        with pytest.raises(SlotError):
            slots.check_name(wrong)
    with pytest.raises(SlotError, match="too long: a socket path has at most 107 bytes"):
        slots.prepare(tmp_path / ("d" * 90))


def test_a_directory_that_others_may_write_to_is_refused(base: Path) -> None:
    """Else any user of the node gives himself a slot without a limit."""
    place = base / "open"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(SlotError, match="writable by nobody else"):
        slots.prepare(place)
    place.chmod(0o711)
    slots.prepare(place)


# --- the coordinator's book -------------------------------------------------------------------------------------------


def test_the_slot_wins_over_what_a_hook_asks_for() -> None:
    """Else a pod gives itself a priority or lifts its limit by its own environment."""
    book = SlotBook()
    book.put(a_slot(policy={"priority": "5", "memory_limit": "1GiB"}))
    assert book.register("GPU-a--0", 1)
    facts = book.within(1, own(priority=1000, limit_bytes=64 * GIB))
    assert (facts.rank.priority, facts.limit_bytes) == (5, GIB)
    assert not book.register("GPU-a--1", 2)
    assert book.refuses(1, A) is None
    assert book.refuses(1, B) == "no GPU GPU-b in slot GPU-a--0; it has GPU-a"
    assert book.refuses(7, B) is None  # in no slot: a host's process


def test_a_hook_without_annotations_has_the_default_rank() -> None:
    """Else a pod outranks all others by its own environment."""
    book = SlotBook()
    book.put(a_slot())
    book.register("GPU-a--0", 1)
    facts = book.within(1, own(priority=(1 << 31) - 1, weight=10_000, limit_bytes=5))
    assert facts == own(limit_bytes=5)


def test_a_slot_that_was_taken_away_names_no_gpu() -> None:
    """Else a process that outlives its slot takes any GPU of the node, or has what the slot's next owner has."""
    book = SlotBook()
    book.put(a_slot(policy={"memory_limit": "1GiB"}))
    book.register("GPU-a--0", 1)
    book.remove("GPU-a--0")
    for again in (False, True):
        for uuid in (A, B):
            assert "the slot was removed" in (book.refuses(1, uuid) or ""), again
        book.put(a_slot(allocation="2"))
    assert book.put(a_slot(allocation="2", policy={"priority": "9"})) == []
    assert book.within(1, own(priority=3)) == own(limit_bytes=GIB)
    assert book.has(1)
    assert [(each.slot.allocation, each.removed) for each in book.snapshots(())] == [("2", False), ("1", True)]
    book.leave(1, None)
    assert not book.has(1)
    assert book.snapshots(())[0].figures.clients == 0


def test_changes_reach_the_clients_that_are_there() -> None:
    """Else `kubectl annotate` needs a restart of the container."""
    book = SlotBook()
    book.put(a_slot())
    for client in (1, 2):
        book.register("GPU-a--0", client)
    changed = a_slot(policy={"priority": "9", "memory_limit": "1GiB"})
    assert book.put(changed) == [1, 2]
    assert book.within(2, own(priority=3)) == own(priority=9, limit_bytes=GIB)
    assert book.put(changed) == []
    assert book.put(a_slot()) == [1, 2]
    assert book.within(2, own(priority=3)) == own()


def test_weight_and_gang_are_what_the_slot_says() -> None:
    """Else annotations do nothing, a pod takes more by its environment, or pods of two users share a gang by number."""
    book = SlotBook()
    book.put(a_slot())
    book.register("GPU-a--0", 1)
    wish = own(weight=9000, gang="user:0/pair")
    assert book.within(1, wish) == own(gang="slot:GPU-a--0/pair")
    book.put(a_slot(policy={"weight": "3", "gang": "ml/pair"}))
    assert book.within(1, wish) == own(weight=3, gang="ml/pair")


def test_class_and_shares_are_the_slots_and_the_environment_only_lowers_them() -> None:
    """Else a pod makes itself interactive, or lifts its share limit, by its own environment."""
    book = SlotBook()
    book.put(a_slot())
    book.register("GPU-a--0", 1)
    greedy = own(job_class=JobClass.INTERACTIVE, share_request=0.9, spatial=True)
    modest = greedy.having(job_class=JobClass.BEST_EFFORT, share_limit=0.2)
    assert book.within(1, greedy) == own(spatial=True)
    assert book.within(1, modest) == modest.having(share_request=0.0)
    policy = {"class": "interactive", "share_request": "0.3", "share_limit": "50%"}
    book.put(a_slot(policy=policy))
    assert book.within(1, greedy) == greedy.having(share_request=0.3, share_limit=0.5)
    assert book.within(1, modest) == modest.having(share_request=0.2)
    assert book.within(9, greedy) == greedy, "a program of the host"


def test_a_programs_own_time_until_it_is_parked_comes_before_its_slots() -> None:
    """Broken: the annotation does nothing, or a program that must stay is parked."""
    book = SlotBook()
    book.put(a_slot(policy={"park_after": "5ns"}))
    book.register("GPU-a--0", 1)
    assert book.within(1, Facts()).park_after_ns == 5
    assert book.within(1, Facts(park_after_ns=0)).park_after_ns == 0
    assert book.put(a_slot(policy={"park_after": "7ns"})) == [1]
    assert book.within(1, Facts()).park_after_ns == 7


def test_class_of_an_earlier_plugin_is_none(tmp_path: Path) -> None:
    """Else an upgrade takes every slot away whose file names a class of the version before."""
    old = a_slot().model_dump() | {"policy": {"class": "opportunistic", "priority": -100}}
    (tmp_path / "GPU-a--0").mkdir()
    (tmp_path / "GPU-a--0" / slots.SLOT_FILE).write_text(json.dumps(old, default=str))
    slot = slots.read(tmp_path / "GPU-a--0")
    assert slot is not None
    assert slot.policy == {"priority": "-100"}


def test_figures_outlive_processes_but_not_the_allocation() -> None:
    """Else a counter falls when a process ends, or a pod inherits what another one used."""
    harness = Harness(create)
    harness.gpu(A)
    book = SlotBook()
    book.put(a_slot())
    client = harness.client(attach=False, group="GPU-a--0")
    book.register("GPU-a--0", client.client)
    client.attach(A, wanted=True)

    def figures() -> tuple[int, int, int]:
        harness.advance(1000)
        found = book.snapshots(harness.scheduler.snapshot(harness.clock.now_ns).clients)[0]
        assert found.registered
        return found.figures.clients, found.figures.leases, found.figures.used_ns

    assert figures() == (1, 1, 1000)
    book.leave(client.client, harness.scheduler.client_snapshot(client.client, harness.clock.now_ns))
    client.die()
    assert figures() == (0, 1, 1000)
    book.put(a_slot(allocation="2"))
    fresh = book.snapshots(())[0]
    assert (fresh.registered, fresh.figures.used_ns) == (False, 0)
    book.remove("GPU-a--0")
    assert len(book) == 0


@pytest.mark.parametrize("mode", MemoryMode)
def test_processes_of_one_slot_share_its_limit(mode: MemoryMode) -> None:
    """Else a container doubles its quota by starting a second process; in every memory mode, at the same moment too."""
    harness = Harness(create)
    harness.gpu(A, 8 * GIB)
    book = SlotBook()
    book.put(a_slot(policy={"memory_limit": "1GiB"}))
    clients = [harness.client(attach=False, mode=mode, group="GPU-a--0") for _ in range(2)]
    for client in clients:
        book.register("GPU-a--0", client.client)
        harness.handle(events.Settled(client.client, book.within(client.client, own())))
        client.attach(A)
        found = client.take(messages.GpuSettings)
        assert all(each.reserve and each.memory_limit_bytes == GIB for each in found)
    first, second = clients
    assert first.reserve(600 << 20) == 600 << 20
    assert second.reserve(600 << 20) == 0
    assert second.reserve(424 << 20) == 424 << 20
    first.die()
    assert second.reserve(GIB) == GIB


def test_series_are_bounded_by_the_slots() -> None:
    """Else pods that come and go fill Prometheus: documented are 14 series for a slot with one GPU."""
    book = SlotBook()
    pod = PodRef(namespace="n", name="p", container="c")
    for number in range(3):
        book.put(a_slot(f"GPU-a--{number}", pod=pod))
    for client in range(50):
        book.register("GPU-a--0", client)
        book.leave(client, None)
    found = [sample for family in metrics.families(book.snapshots(())) for sample in family.samples]
    assert len(found) == 3 * 14
    labels = {tuple(sample.labels[name] for name in ("namespace", "pod", "container")) for sample in found}
    assert labels == {("n", "p", "c")}
    unregistered = [sample.value for sample in found if sample.name == "nvshare_slot_unregistered"]
    assert unregistered == [0, 1, 1]


# --- following the directory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_inotify", [True, False])
def test_slots_come_change_and_go(base: Path, with_inotify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pod waits for a coordinator that does not know its slot; also on a node that is out of inotify."""
    if not with_inotify:

        def none_left() -> Any:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("nvshare.coordinator.kubernetes.slots.inotify.Inotify", none_left)
    directory = base / "slots"
    slots.prepare(directory)
    slots.write(directory, a_slot("early"))
    hooks = PeerListener(base / "hooks.sock", 0o600, Limits())
    book = SlotBook(partial(slots.note_hook_registered, directory))
    watch = SlotWatch(directory, hooks, book)
    now_ns = [0]

    def settled(condition: Any) -> bool:
        now_ns[0] += 0 if with_inotify else LOOK_AGAIN_NS
        watch.turn(now_ns[0], ready=True)
        return bool(condition())

    assert (watch.descriptor is not None) == with_inotify
    eventually(lambda: settled(lambda: "early" in book), "the slot that was there")
    slots.write(directory, a_slot("late"))
    eventually(lambda: settled(lambda: hooks.slots() == {"early", "late"}), "a new slot's socket")
    slots.write(directory, a_slot("late", policy={"memory_limit": "1GiB"}))
    eventually(lambda: settled(lambda: book.snapshots(())[1].slot.limit_bytes == GIB), "the new limit")
    (directory / "early" / slots.SLOT_FILE).write_text("{")
    (directory / "late" / slots.SLOT_FILE).unlink()
    eventually(lambda: settled(lambda: "late" not in book), "the slot without a file to go")
    slots.write(directory, a_slot("late"))
    eventually(lambda: settled(lambda: "late" in hooks.slots()), "it to come back in the same directory")
    slots.remove(directory, "late")
    (directory / "not a slot").mkdir()
    (directory / "file").touch()
    eventually(lambda: settled(lambda: hooks.slots() == {"early"}), "the removed slot to go")
    assert "early" in book  # what is broken keeps what it had
    book.register("early", 1)
    assert slots.hook_registered(directory, a_slot("early"))
    assert not slots.hook_registered(directory, a_slot("early", allocation="2"))
    slots.write(directory, a_slot("early"))
    afresh = SlotBook()
    restarted = SlotWatch(directory, hooks, afresh)
    eventually(lambda: restarted.turn(0, ready=False) or "early" in afresh, "a restarted coordinator's book")
    assert [picture.registered for picture in afresh.snapshots(())] == [True]
    restarted.close()
    if with_inotify:
        assert watch.next_deadline_ns() is None  # nothing polls
    watch.close()
    hooks.close()


def test_one_slot_cannot_use_up_the_connections(base: Path) -> None:
    """Else one pod keeps all others from the GPU."""
    hooks = PeerListener(base / "hooks.sock", 0o600, Limits(connections=10, connections_per_slot=2))
    hooks.listen(base / "slot.sock", 0o666, "greedy")
    opened = []
    for _ in range(5):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(base / "slot.sock"))
        opened.append(client)
        hooks.receive(0)
    assert (len(hooks), hooks.refusals.total()) == (2, 3)
    ordinary = socket.socket(socket.AF_UNIX)
    ordinary.connect(str(base / "hooks.sock"))
    hooks.receive(0)
    assert len(hooks) == 3
    hooks.unlisten("greedy")
    assert len(hooks) == 3  # who came already stays
    for client in (*opened, ordinary):
        client.close()
    hooks.close()
    assert not list(base.glob("*.sock"))
