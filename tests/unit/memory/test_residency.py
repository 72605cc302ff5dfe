"""Targets: what is claimed, who is lowered, and the rank of wishes, each as a small world."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.memory import claims, residency
from nvshare.coordinator.model import events
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import GPU, Harness, ScriptedClient, one_gpu

QUANTUM_MS = 100
swapping = partial(Harness.client, mode=MemoryMode.SWAP)


def record(harness: Harness) -> Gpu:
    """The engine's own record of the GPU."""
    return harness.scheduler._node.gpus[GPU]


def at_a_switch(capacity: int = 100) -> tuple[Harness, ScriptedClient, ScriptedClient]:
    """`a` has run with 60 on the GPU and gives way to `b`, which has 20 of its 60."""
    harness = one_gpu(capacity)
    a, b = swapping(harness, wanted=True, resident=60), swapping(harness, resident=20, host=40)
    b.request()
    harness.milliseconds(QUANTUM_MS)
    for restore in b.take(messages.Restore):  # ahead of its turn
        b.moved(restore.order_id, restore.bytes)
    a.release(wanted=True)
    return harness, a, b


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-10, 200)), min_size=1, max_size=20))
def test_nothing_is_raised_but_into_free_room(wishes: list[tuple[int, int]]) -> None:
    """Broken: invariant 4, whichever caller wishes for too much."""
    harness = one_gpu(100)
    for resident in (40, 30, 10, 0):
        swapping(harness, resident=resident, host=100 - resident)
    gpu, node = record(harness), harness.scheduler._node
    seats = list(gpu.seats.values())
    for who, size in wishes:
        residency.aim(node, seats[who], size, harness.clock.now_ns, goal=200)
        assert gpu.memory.claimed_bytes <= 100
        assert all(claims.claimed_bytes(seat) >= seat.memory.resident_bytes for seat in seats)


def test_what_may_still_come_in_is_claimed_until_the_client_is_at_rest() -> None:
    """Broken: room is promised twice, or the rest of a target that nobody will reach is lost for all."""
    harness, a, b = at_a_switch()
    (evict,) = a.take(messages.Evict)
    a.moved(evict.order_id, evict.bytes)
    (restore,) = b.take(messages.Restore)
    claimed = record(harness).memory.claimed_bytes
    assert claimed == 100
    b.moved(restore.order_id, 5, error=2)
    assert b.granted() is not None
    b.release(wanted=False, idle=True)
    assert a.take(messages.Restore), "what b did not fill is free"


def test_a_connection_claims_what_it_says_first() -> None:
    """Broken: a client that connects again is held to a target of its earlier connection."""
    harness, a, b = at_a_switch()
    a.moved(a.take(messages.Evict)[0].order_id, 20)
    assert b.take(messages.Restore)
    b.die(process_lives=True)
    back = swapping(harness, process_id=b.process_id, resident=45, host=15)
    assert record(harness).seats[back.client].memory.claimed_bytes == 45


def test_what_a_holder_gives_back_comes_to_the_next_one() -> None:
    """Broken: a holder that frees memory keeps it from the next one until its turn ends."""
    harness = one_gpu(100)
    a, b = swapping(harness, wanted=True), swapping(harness, resident=0, host=60)
    assert a.granted() is not None
    assert a.reserve(90) == 90
    a.report(allocated=90, resident=90)
    b.request()
    assert [restore.bytes for restore in b.take(messages.Restore)] == [10]
    a.report(allocated=50, resident=50)
    assert a.reserve(50) == 50
    b.moved(1, 10)
    assert [restore.bytes for restore in b.take(messages.Restore)] == [40]


def growing_beside_a_switch() -> tuple[Harness, ScriptedClient, ScriptedClient, ScriptedClient]:
    """`a` has 30 and holds, `b` holds too and has left; the memory of `c`, which waits at 20 of 60, comes in."""
    harness = one_gpu(100)
    a = harness.client(mode=MemoryMode.DEVICE)
    assert a.reserve(30) == 30
    a.report(allocated=30, resident=30)
    b, c = swapping(harness, wanted=True, resident=50), swapping(harness, resident=10, host=50)
    c.request()
    harness.milliseconds(QUANTUM_MS)
    for restore in c.take(messages.Restore):
        c.moved(restore.order_id, restore.bytes)
    b.release(wanted=True)
    return harness, a, b, c


def test_a_question_has_a_higher_rank_than_the_next_turn() -> None:
    """Broken: the two take turns with the same room and undo each other, message by message."""
    harness, a, b, c = growing_beside_a_switch()
    (out,) = b.take(messages.Evict)
    a.say(messages.ReserveMemory(0, 7, 40))
    b.moved(out.order_id, 10, finished=False)
    assert not c.take(messages.Restore), "the question comes first"
    assert [answer.bytes for answer in a.take(messages.MemoryReserved)] == [40]
    sent = len(harness.commands)
    for number in range(20):
        b.report(allocated=50, resident=40 - number)
    assert len(harness.commands) - sent < 40, "each report leads to no more than one raise"


def test_a_question_may_lower_the_next_client() -> None:
    """Broken: the only one that could make room is on its way in, and both wait until a deadline."""
    harness = one_gpu(100)
    device = harness.client(mode=MemoryMode.DEVICE)
    a, b = swapping(harness, wanted=True, resident=70), swapping(harness, resident=30, host=10)
    b.request()
    harness.milliseconds(QUANTUM_MS)
    a.report(allocated=70, resident=70, pinned=45)
    a.release(wanted=True)
    assert [evict.bytes for evict in a.take(messages.Evict)] == [10]
    assert harness.gpu_snapshot().leases.preparing == b.client
    device.say(messages.ReserveMemory(0, 1, 15))
    (evict,) = b.take(messages.Evict)
    assert evict.bytes == 5, "the other 10 leave already"


def test_a_target_that_rises_needs_no_second_order() -> None:
    """Broken: both directions of the link wait for each other at each piece."""
    harness, a, b = at_a_switch()
    (out,) = a.take(messages.Evict)
    for moved in (5, 10, 15):
        a.moved(out.order_id, moved, finished=False)
    (restore,) = b.take(messages.Restore)
    assert [credit.credit_bytes for credit in b.take(messages.MoveCredit)] == [10, 15]
    assert restore.bytes == 20
    assert record(harness).memory.claimed_bytes == 100


def test_what_importers_of_a_dead_program_hold_is_not_free() -> None:
    """Broken: memory comes in for which the card has no room, fails, and is tried again at each turn."""
    harness = one_gpu(100)
    a, b = swapping(harness, resident=60), swapping(harness, resident=0, host=70)
    a.report(allocated=60, resident=60, pinned=40)
    a.die(process_lives=True)
    b.request()
    harness.handle(events.ProcessEnded(a.process_id))
    assert [restore.credit_bytes for restore in b.take(messages.Restore)] == [40]
    assert [more.credit_bytes for more in b.take(messages.MoveCredit)] == [60], "nobody knows yet who holds the rest"
    harness.handle(events.MemoryChecked(GPU, {}, 40))  # it was asked for before the end
    assert not b.take(messages.MoveCredit)
    harness.handle(events.MemoryChecked(GPU, {}, 35))
    assert [more.credit_bytes for more in b.take(messages.MoveCredit)] == [65]
