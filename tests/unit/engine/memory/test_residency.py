"""Targets: what is claimed, who is lowered, and the rank of wishes, each as a small world."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.engine.memory import claims, residency
from nvshare.coordinator.model import events
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, RemoteProtocolError
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
    assert b.told() == [40], "ahead of its turn"
    b.obeys()
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
    assert a.told() == [40]
    a.obeys()
    assert b.told() == [60]
    assert record(harness).memory.claimed_bytes == 100
    b.comes_to(45, error=2)
    assert b.granted() is not None
    b.release(wanted=False, idle=True)
    assert a.told() == [55], "what b did not fill is free"


def test_all_targets_that_a_client_may_still_obey_are_claimed() -> None:
    """Broken: invariant 4, a client comes to a target that was taken back, where others have its room by then."""
    harness, a, b = at_a_switch()
    memory, client = record(harness).memory, record(harness).seats
    assert a.told() == [40]
    a.comes_to(45, at_rest=False)
    (high,) = b.take(messages.Target)
    assert (high.bytes, high.rises) == (55, True)
    harness.handle(events.Set("paused", True, client=b.client))
    assert harness.gpu_snapshot().leases.preparing == a.client
    assert (a.told(), b.told()) == ([45], [40]), "its turn again, and b's room is taken back"
    assert client[b.client].memory.claimed_bytes == 55, "b may not know that yet"
    b.state(target=high.number, at_rest=False, resident_bytes=50)
    assert (client[b.client].memory.claimed_bytes, a.told()) == (55, [])
    b.comes_to(40)
    assert (client[b.client].memory.claimed_bytes, a.told()) == (40, [60])
    a.obeys()
    assert memory.claimed_bytes <= 100


def test_a_state_that_is_at_rest_with_an_earlier_target_leaves_the_later_one_claimed() -> None:
    """Broken: a message that crossed the target makes its room free for another client."""
    harness, a, b = at_a_switch()
    a.obeys()
    assert b.told() == [60]
    b.state(at_rest=True)
    assert record(harness).seats[b.client].memory.claimed_bytes == 60


def test_a_client_that_answers_no_target_is_told_so_many_and_no_more() -> None:
    """Broken: a program that says nothing makes each event dearer for all, without end."""
    harness = one_gpu(100)
    client = swapping(harness, resident=10, host=90)
    seat, node = record(harness).seats[client.client], harness.scheduler._node
    for size in (20, 30) * residency.MOST_OPEN:
        residency.aim(node, seat, size, harness.clock.now_ns)
    assert len(seat.moves.open) == residency.MOST_OPEN
    client.state(target=seat.moves.told.number, at_rest=False)
    residency.aim(node, seat, 40, harness.clock.now_ns)
    assert list(seat.moves.open.values())[-1] == 40


def test_a_target_that_was_never_told_is_a_breach() -> None:
    """Broken: a client that names targets from the future is at rest with whatever it is told later."""
    _, a, b = at_a_switch()
    with pytest.raises(RemoteProtocolError, match="names target 9 of GPU 0, and was told of 1"):
        b.state(target=9)
    assert a.seat().memory.resident_bytes == 60


@pytest.mark.parametrize("sums", [(1 << 62, 0), (0, 1 << 62), (5, 5)])
def test_sums_that_jump_or_fall_count_for_no_more_than_there_is(sums: tuple[int, int]) -> None:
    """Broken: a client's word makes figures of the node absurd, or room free or taken."""
    harness = one_gpu(100)
    client = swapping(harness, resident=30, host=10)
    client.state(moved_out_bytes=10, moved_in_bytes=10)
    claimed = record(harness).memory.claimed_bytes
    for out_bytes, in_bytes in (sums, (0, 0)):
        client.state(moved_out_bytes=out_bytes, moved_in_bytes=in_bytes)
    found = client.seat().moves
    assert 10 <= found.moved_out_bytes <= 50
    assert 10 <= found.moved_in_bytes <= 50
    assert record(harness).memory.claimed_bytes == claimed == 30


def test_a_move_that_waits_for_room_is_not_waited_for() -> None:
    """Broken: a turn waits until a deadline for memory that comes only when the turn has begun."""
    harness, a, b = at_a_switch()
    a.comes_to(45, at_rest=False)
    b.obeys()
    assert (b.granted(), b.seat().moving) == (None, "in"), "a goes on"
    a.comes_to(45, error=999)
    assert b.granted() is not None, "nobody makes more room"
    assert b.seat().moving is None
    assert [note["moved_bytes"] for note in harness.notifications("moved") if note["client"] == b.client] == [20, 15]


def test_a_client_turns_at_once_when_its_turn_comes() -> None:
    """Broken: the next client's memory leaves to the end before it comes back."""
    harness = one_gpu(100)
    a, b, c = clients = [swapping(harness, resident=size, host=45 - size) for size in (45, 10, 45)]
    for client in clients:
        client.request()
    assert c.told() == [10], "for b, which is next"
    c.comes_to(30, at_rest=False)
    b.die()
    a.release(wanted=False, idle=True)
    assert c.told() == [45]
    c.comes_to(25, at_rest=False)
    c.obeys()
    assert c.granted() is not None
    assert harness.gpu_snapshot().memory.resident_bytes == 90


def test_a_connection_claims_what_it_says_first() -> None:
    """Broken: a client that connects again is held to a target of its earlier connection."""
    harness, a, b = at_a_switch()
    a.obeys()
    assert b.told() == [60]
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
    assert b.told() == [10]
    a.report(allocated=50, resident=50)
    assert a.reserve(50) == 50
    b.obeys()
    assert b.told() == [50]


def growing_beside_a_switch() -> tuple[Harness, ScriptedClient, ScriptedClient, ScriptedClient]:
    """`a` has 30 and holds, `b` holds too and has left; the memory of `c`, which waits at 20 of 60, comes in."""
    harness = one_gpu(100)
    a = harness.client(mode=MemoryMode.DEVICE)
    assert a.reserve(30) == 30
    a.report(allocated=30, resident=30)
    b, c = swapping(harness, wanted=True, resident=50), swapping(harness, resident=10, host=50)
    c.request()
    harness.milliseconds(QUANTUM_MS)
    assert c.told() == [20]
    c.obeys()
    b.release(wanted=True)
    return harness, a, b, c


def test_a_question_has_a_higher_rank_than_the_next_turn() -> None:
    """Broken: the two take turns with the same room and undo each other, message by message."""
    harness, a, b, c = growing_beside_a_switch()
    assert b.told() == [10]
    a.ask_room(40)
    b.comes_to(40, at_rest=False)
    assert not c.told(), "the question comes first"
    assert a.reserved() == [40]
    sent = len(harness.commands)
    for number in range(20):
        b.comes_to(40 - number, at_rest=False)
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
    assert a.told() == [60]
    assert harness.gpu_snapshot().leases.preparing == b.client
    device.ask_room(15)
    assert a.told() == [55], "a gives the rest, which is farther"
    a.comes_to(60, error=999)
    assert b.told() == [25], "a gives no more"


def test_a_target_that_rises_is_one_move() -> None:
    """Broken: both directions of the link wait for each other at each piece."""
    harness, a, b = at_a_switch()
    for size in (55, 50, 45):
        a.comes_to(size, at_rest=False)
    rising = b.take(messages.Target)
    assert [(target.bytes, target.rises) for target in rising] == [(45, True), (50, True), (55, True)]
    assert record(harness).memory.claimed_bytes == 100
    a.obeys()
    assert [(target.bytes, target.rises) for target in b.take(messages.Target)] == [(60, False)]
    b.obeys()
    assert [note["bytes"] for note in harness.notifications("restoring")] == [20, 20], "ahead, and at the switch"


def test_what_importers_of_a_dead_program_hold_is_not_free() -> None:
    """Broken: memory comes in for which the card has no room, fails, and is tried again at each turn."""
    harness = one_gpu(100)
    a, b = swapping(harness, resident=60), swapping(harness, resident=0, host=70)
    a.report(allocated=60, resident=60, pinned=40)
    a.die(process_lives=True)
    b.request()
    harness.handle(events.ProcessEnded(a.process_id))
    assert b.told() == [40, 60], "nobody knows yet who holds the rest"
    harness.handle(events.MemoryChecked(GPU, {}, 40))  # it was asked for before the end
    assert not b.told()
    harness.handle(events.MemoryChecked(GPU, {}, 35))
    assert b.told() == [65]
