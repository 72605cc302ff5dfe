"""Concurrent sharing while memory allows it, and in turns while it does not."""

from __future__ import annotations

from nvshare.coordinator.model import events
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, Sharing
from nvshare.coordinator.simulation.harness import Harness, ScriptedClient
from nvshare.scheduler_policies.registry import create


def side_by_side(mode: MemoryMode = MemoryMode.SWAP) -> tuple[Harness, ScriptedClient, ScriptedClient]:
    """`a` has 40 of 100 bytes, `b` 50; both run."""
    harness = Harness(create, sharing=Sharing.CONCURRENT)
    harness.gpu(capacity=100)
    a, b = (harness.client(wanted=True, mode=mode) for _ in range(2))
    assert a.granted() is not None
    assert b.granted() is not None
    a.report(allocated=40, resident=40)
    b.report(allocated=50, resident=50)
    return harness, a, b


def in_turns() -> tuple[Harness, ScriptedClient, ScriptedClient]:
    """`a` has asked for 70 bytes in all, and has given its lease back; `b` has it, or is about to."""
    harness, a, b = side_by_side()
    harness.handle(events.ReservationAsked(a.client, 0, 7, 70))
    assert len(a.take(messages.Revoke)) == len(b.take(messages.Revoke)) == 1
    assert not a.take(messages.MemoryReserved), "neither refused nor granted yet"
    a.release(wanted=True)
    (answer,) = a.take(messages.MemoryReserved)
    assert answer.bytes == 70, "without a lease it needs no physical memory"
    a.report(allocated=70, resident=40, host=30)
    b.release(wanted=True)
    return harness, a, b


def test_what_fits_runs_side_by_side() -> None:
    """Broken: each growth would end concurrent sharing."""
    harness, a, b = side_by_side()
    assert a.reserve(50) == 50
    assert harness.gpu_snapshot().rules.sharing is Sharing.CONCURRENT
    assert not b.take(messages.Revoke)


def test_growth_beyond_the_card_begins_turns() -> None:
    """Broken: invariant 4: it is granted beside what others have, or a program is out of memory that could take
    turns."""
    harness, a, b = in_turns()
    assert harness.gpu_snapshot().rules.sharing is Sharing.EXCLUSIVE
    assert harness.logged("take turns")
    first, second = (a, b) if a.seat().phase in {"next", "holding"} else (b, a)
    for evict in second.take(messages.Evict):
        second.moved(evict.order_id, evict.bytes)
    for restore in first.take(messages.Restore):
        first.moved(restore.order_id, restore.bytes)
    assert first.granted() is not None
    assert second.granted() is None
    assert harness.gpu_snapshot().memory.resident_bytes <= 100


def test_the_other_one_first() -> None:
    """Broken: a growth is refused while the one who could make room has just begun to drain."""
    harness, a, b = side_by_side()
    harness.handle(events.ReservationAsked(a.client, 0, 7, 70))
    b.release(wanted=False)
    (evict,) = b.take(messages.Evict)
    assert evict.bytes == 20
    b.moved(evict.order_id, 20)
    assert [answer.bytes for answer in a.take(messages.MemoryReserved)] == [70]
    a.release(wanted=True)


def test_alone_on_the_card_nobody_is_revoked() -> None:
    """Broken: the only one at work gives its lease back for a growth for which somebody idle makes room."""
    harness, a, b = side_by_side()
    b.release(wanted=False)
    harness.handle(events.ReservationAsked(a.client, 0, 7, 70))
    (evict,) = b.take(messages.Evict)
    b.moved(evict.order_id, evict.bytes)
    assert [answer.bytes for answer in a.take(messages.MemoryReserved)] == [70]
    assert not a.take(messages.Revoke)


def test_pages_that_would_thrash_take_turns() -> None:
    """Broken: in mode `managed` programs that together have more than the card fault each other's pages out."""
    harness, a, b = side_by_side(MemoryMode.MANAGED)
    a.report(allocated=70, resident=50)
    assert harness.gpu_snapshot().rules.sharing is Sharing.EXCLUSIVE
    assert len(a.take(messages.Revoke)) == len(b.take(messages.Revoke)) == 1


def test_side_by_side_again_when_there_is_room() -> None:
    """Broken: turns for ever after, or back and forth with each byte."""
    harness, a, b = in_turns()
    a.report(allocated=48, resident=40, host=8)
    assert harness.gpu_snapshot().rules.sharing is Sharing.EXCLUSIVE, "98 of 100: the next byte would end it again"
    a.report(allocated=40, resident=40)
    assert harness.gpu_snapshot().rules.sharing is Sharing.CONCURRENT
    for client in (a, b):
        if client.seat().phase != "holding":
            for restore in client.take(messages.Restore):
                client.moved(restore.order_id, restore.bytes)
    assert a.seat().phase == b.seat().phase == "holding"


def test_exclusive_stays_exclusive() -> None:
    """Broken: what the operator wants is overruled."""
    harness, a, b = side_by_side()
    harness.handle(events.SharingSet(Sharing.EXCLUSIVE))
    assert len(a.take(messages.Revoke)) == len(b.take(messages.Revoke)) == 1
    a.release()
    b.release()
    a.report(allocated=10, resident=10)
    assert harness.gpu_snapshot().rules.sharing is Sharing.EXCLUSIVE
    harness.handle(events.SharingSet(Sharing.CONCURRENT))
    assert harness.gpu_snapshot().rules.sharing is Sharing.CONCURRENT
