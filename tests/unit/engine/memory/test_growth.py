"""Room for clients in `swap` mode that grow while they hold the lease."""

from __future__ import annotations

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import Harness, ScriptedClient, one_gpu


def crowded() -> tuple[Harness, ScriptedClient, ScriptedClient]:
    """`a` holds the lease with 40 of 100 bytes; `b` sits on 50."""
    harness = one_gpu(100)
    a = harness.client(wanted=True, mode=MemoryMode.SWAP)
    b = harness.client(mode=MemoryMode.SWAP)
    assert a.granted() is not None
    a.report(allocated=40, resident=40)
    b.report(allocated=50, resident=50)
    return harness, a, b


def test_what_fits_is_granted_at_once() -> None:
    """Broken: each allocation moves somebody, or is refused."""
    _, a, b = crowded()
    assert a.reserve(50) == 50
    assert not b.told()


def test_others_make_room_for_the_holder() -> None:
    """Broken: a program that grows is out of memory though others could move, or too much is moved."""
    _, a, b = crowded()
    a.ask_room(70)
    assert b.told() == [30]
    assert not a.reserved(), "not before the room is there"
    b.obeys()
    assert a.reserved() == [70]


def test_what_cannot_be_made_is_refused() -> None:
    """Broken: the program waits for room that will never come."""
    harness, a, b = crowded()
    b.report(allocated=50, resident=50, pinned=45)
    a.ask_room(70)
    assert max(a.reserved()) < 70
    assert not b.told()
    assert harness.notifications("refused")[0]["why"] == "capacity"


def test_a_failed_eviction_is_a_refusal() -> None:
    """Broken: the question is never answered."""
    _, a, b = crowded()
    a.ask_room(70)
    assert b.told()
    b.comes_to(45)
    assert max(a.reserved()) < 70


def test_a_death_makes_room() -> None:
    """Broken: the question waits for an eviction by a client that is gone."""
    _, a, b = crowded()
    a.ask_room(70)
    b.die()
    assert a.reserved() == [70]


@pytest.mark.parametrize("hangs", [False, True])
def test_growth_waits_for_a_process_that_ends(hangs: bool) -> None:
    """Broken: a program would be out of memory, or its allocation fail, while the driver frees that of another; or it
    would wait for ever for a process that hangs in its end."""
    harness, a, b = crowded()
    b.die(process_lives=True)
    a.ask_room(70)
    harness.milliseconds(4000)
    assert not a.reserved()
    if hangs:
        harness.milliseconds(2000)
    else:
        harness.handle(events.ProcessEnded(b.process_id))
    assert a.reserved() == [70]


def test_the_end_of_the_lease_answers_too() -> None:
    """Broken: a thread of the program hangs in its allocation after its lease has ended."""
    _, a, b = crowded()
    a.ask_room(70)
    assert b.told()
    a.release()
    assert len(a.reserved()) == 1


def test_growth_after_the_lease_must_fit_beside_immovable_memory() -> None:
    """Broken: the program has more than it can ever have on the GPU, and waits until another one gives its memory."""
    harness, a, b = crowded()
    a.ask_room(70)
    assert b.told()
    b.report(allocated=50, resident=50, pinned=45)
    a.release()
    assert max(a.reserved()) < 70
    assert harness.notifications("refused")[0]["why"] == "pins"


def test_memory_that_cannot_move_evicts_others_first() -> None:
    """Broken: an allocation in mode `device` is allowed while others fill the capacity, and exceeds it or fails in the
    driver, though others could move."""
    harness, _, b = crowded()
    device = harness.client(mode=MemoryMode.DEVICE)
    device.report(allocated=30, resident=30)  # a hook charges before it asks
    device.ask_room(30)
    assert b.told() == [30]
    assert not device.reserved(), "not before the room is there"
    b.obeys()
    assert device.reserved() == [30]
    assert device.reserve(10) == 10, "giving back needs no room"


def test_memory_that_cannot_move_ends_leases_that_do_not_fit_beside_it() -> None:
    """Broken: it is refused, or exceeds the capacity, because all others run side by side and hold leases."""
    harness = one_gpu(100, sharing=Sharing.CONCURRENT)
    both = [harness.client(wanted=True, mode=MemoryMode.SWAP) for _ in range(2)]
    for client in both:
        assert client.granted() is not None
        client.report(allocated=45, resident=45)
    device = harness.client(mode=MemoryMode.DEVICE)
    device.ask_room(50)
    (leaving,) = (client for client in both if client.take(messages.Revoke))
    assert not device.reserved()
    leaving.release(wanted=True)
    leaving.obeys()
    assert device.reserved() == [50]


def test_managed_memory_under_a_lease_gives_way() -> None:
    """Broken: a program in mode `device` is out of memory beside pages that leave by themselves."""
    harness = one_gpu(100)
    managed = harness.client(wanted=True, resident=90)
    assert managed.granted() is not None
    assert harness.client(mode=MemoryMode.DEVICE).reserve(50) == 50


def test_memory_that_cannot_move_and_finds_no_room_is_refused() -> None:
    """Broken: an allocation waits for room that will never come, or its program loses what it had."""
    harness, _, b = crowded()
    device = harness.client(mode=MemoryMode.DEVICE)
    assert device.reserve(10) == 10
    device.ask_room(40)
    assert b.told()
    b.comes_to(45)
    assert device.reserved() == [10]
    assert harness.notifications("refused")[-1]["why"] == "capacity"


def test_a_question_outlives_its_connection() -> None:
    """Broken: a program waits for ever for the answer to a question of an earlier connection, or is asked for twice."""
    _, a, b = crowded()
    a.ask_room(70)
    question = a.states[0].asks
    a.die()
    again = a.harness.client(wanted=True, mode=MemoryMode.SWAP, memory=40, process_id=a.process_id)
    assert again.granted() is not None
    again.state(asks=question, total_bytes=70)
    b.obeys()
    assert again.reserved() == [70]
    again.state()
    assert not again.reserved(), "the same question, which is answered"


def test_less_under_an_old_number_gives_back() -> None:
    """Broken: what a program has freed is kept from the others, or a repeated state takes what was promised."""
    harness = one_gpu(100)
    first, second = (harness.client(mode=MemoryMode.DEVICE) for _ in range(2))
    assert first.reserve(80) == 80
    first.state()
    assert second.reserve(40) == 0
    first.state(total_bytes=60)
    assert second.reserve(40) == 40
