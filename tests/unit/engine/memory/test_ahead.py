"""Moves while a client computes: for the next in line, for one that grows, and down to a resident limit."""

from __future__ import annotations

from functools import partial

from nvshare.coordinator.engine.memory.residency import PIECE_BYTES
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness, ScriptedClient, one_gpu

QUANTUM_MS = 100
MIB = 1 << 20


make_harness = partial(one_gpu, capacity=100)


def three(unit: int = 1, **settings: object) -> tuple[Harness, list[ScriptedClient]]:
    """Three of 45 on 100: the first holds, the second waits and has 10, the third waits behind it and has 45."""
    harness = make_harness(capacity=100 * unit, **settings)
    clients = [harness.client(mode=MemoryMode.SWAP) for _ in range(3)]
    for client, resident in zip(clients, (45, 10, 45), strict=True):
        client.report(allocated=45 * unit, resident=resident * unit, host=(45 - resident) * unit)
    for client in clients:
        client.request()
    assert clients[0].granted() is not None
    return harness, clients


def test_the_next_is_brought_in_beside_the_holder_and_its_switch_moves_nothing() -> None:
    """Broken: everybody waits for memory that could have moved before."""
    harness, (a, b, c) = three()
    assert c.told() == [10], "what the next lacks, from the one behind it"
    assert not a.told(), "nothing moves under running work"
    assert not b.told(), "there is no room yet"
    c.obeys()
    assert b.told() == [45]
    b.obeys()
    harness.milliseconds(QUANTUM_MS)
    a.release(wanted=True)
    assert b.granted() is not None, "at once"
    gpu = harness.gpu_snapshot()
    assert (gpu.moves.moved_ns, gpu.moves.exposed_move_ns) == (0, 0)
    assert a.told() == [10], "and the same for the one after it"


def test_free_memory_is_filled_although_there_is_no_time_to_evict() -> None:
    """Broken: room that nobody has is left empty."""
    harness = make_harness()
    a, b = harness.client(wanted=True, resident=60), harness.client(resident=20, host=40)
    b.request()
    (target,) = b.take(messages.Target)
    assert (target.bytes, target.rises) == (40, False)
    assert not a.told()


def test_room_that_is_smaller_than_a_piece_of_memory_is_no_reason_to_grant_without_it() -> None:
    """Broken: after a little was left over ahead, the switch moves nothing, and both have all of theirs on the GPU."""
    harness = make_harness()
    a, b = harness.client(wanted=True, mode=MemoryMode.SWAP, resident=60), harness.client(mode=MemoryMode.SWAP)
    b.report(allocated=60, resident=20, host=40)
    b.request()
    assert b.told() == [40]
    b.comes_to(35)
    assert not b.told(), "5 are left, and it has no piece so small"
    harness.milliseconds(QUANTUM_MS)
    a.release(wanted=True)
    assert b.granted() is None
    assert a.told() == [40]
    a.obeys()
    assert b.told() == [60]
    b.obeys()
    assert b.granted() is not None
    assert harness.gpu_snapshot().moves.failed_orders == 0


def test_memory_moves_in_pieces_so_that_a_change_of_mind_costs_little() -> None:
    """Broken: a large move for somebody who will not be next any more goes on to its end."""
    harness, (_, b, c) = three(unit=40 * MIB, quantum_ns=2000 * MILLISECOND_NS)
    unit = 40 * MIB
    assert c.told() == [45 * unit - PIECE_BYTES], "not all that b lacks"
    c.obeys()
    assert c.told() == [45 * unit - 2 * PIECE_BYTES]
    assert b.told() == [10 * unit + PIECE_BYTES], "one comes in while the next one goes out"
    b.die()
    c.obeys()
    assert c.told() == [45 * unit - PIECE_BYTES], "nobody needs more, and c is next"
    assert harness.gpu_snapshot().moves.failed_orders == 0


def test_nothing_is_evicted_ahead_without_time_for_all_of_it() -> None:
    """Broken: with short quanta the same bytes would move ahead, and more of them at the switch."""
    _, (_, b, c) = three(unit=400 * MIB)
    assert not c.told(), "14 GiB in 100 ms"
    assert not b.told()


def test_with_nobody_waiting_nothing_moves() -> None:
    """Broken: idle programs' memory is moved back and forth."""
    harness = make_harness()
    a, b = harness.client(wanted=True, resident=60), harness.client(resident=0, host=60)
    a.report(allocated=60, resident=60)
    assert not a.told()
    assert not b.told()
    assert harness.timer_ns is None


def test_who_does_not_ask_gives_before_those_who_wait() -> None:
    """Broken: memory goes out that is needed sooner."""
    harness = make_harness()
    quiet = harness.client(memory=30)
    harness.client(wanted=True, resident=50)
    harness.client(resident=20, host=30).request()
    assert quiet.told() == [0]


def test_a_priority_client_that_comes_is_brought_in_instead() -> None:
    """Broken: memory for the old order of turns goes on moving, or the new next one waits for all of it."""
    harness, (_, b, c) = three(policy="priority")
    assert c.told() == [10]
    high = harness.client(mode=MemoryMode.SWAP, priority=5, resident=0, host=20)
    harness.handle(events.Set("priority", 5, client=1))  # the holder, so that it is not preempted
    high.request()
    c.obeys()
    assert not b.told()
    assert high.told() == [20], "into the room that was made for another"


def test_a_holder_that_grows_goes_first() -> None:
    """Broken: room that the holder needs now goes to one that needs it later, or growth finds no room at all."""
    _, (a, b, c) = three()
    assert c.told() == [10]
    a.ask_room(75)
    assert not a.reserved()
    c.obeys()
    assert a.reserved() == [75], "the whole room is its"
    assert not b.told()
    c.obeys()
    assert b.told() == [25], "only what is left"


def test_what_was_brought_in_ahead_makes_room_again() -> None:
    """Broken: growth is refused although what was brought in for later could go."""
    harness = make_harness()
    a, b = harness.client(wanted=True, mode=MemoryMode.SWAP, resident=60), harness.client(mode=MemoryMode.SWAP)
    b.report(allocated=60, resident=0, host=60)
    b.request()
    assert b.told() == [40]
    a.ask_room(80)
    assert b.told() == [20]
    b.comes_to(40, at_rest=False)
    assert not a.reserved(), "it had got there"
    b.obeys()
    assert a.reserved() == [80]


def test_growth_does_not_wait_for_ever_for_a_hung_neighbour() -> None:
    """Broken: a thread of the holder hangs in its allocation because another program is stopped."""
    harness, (a, _, c) = three(move_deadline_ns=500 * MILLISECOND_NS)
    assert c.told()
    a.ask_room(75)
    harness.milliseconds(600)
    (reserved,) = a.reserved()
    assert reserved < 75


def test_a_failed_piece_is_not_asked_for_again_and_again() -> None:
    """Broken: targets without end for a client that cannot obey."""
    harness, (_, _, c) = three()
    assert c.told()
    c.comes_to(45, error=2)
    c.report(allocated=45, resident=45)
    assert not c.told()
    assert harness.gpu_snapshot().moves.failed_orders == c.seat().moves.failed_orders == 1


def test_a_turn_does_not_begin_while_the_clients_own_memory_moves() -> None:
    """Broken: invariant 3, memory would move under running work."""
    harness, (a, b, c) = three()
    assert c.told() == [10]
    b.die()
    a.release(wanted=False, idle=True)
    assert harness.gpu_snapshot().leases.preparing == c.client
    c.comes_to(30, at_rest=False)
    assert c.granted() is None, "it comes back first"
    assert c.told() == [45]
    c.obeys()
    assert c.granted() is not None


def test_hidden_and_exposed_time_are_told_apart() -> None:
    """Broken: the operator and the automatic quantum would be told that hidden moves cost time."""
    harness, (a, b, c) = three()
    assert c.told() == [10]
    harness.milliseconds(10)
    c.obeys()
    assert b.told() == [45]
    harness.milliseconds(5)
    a.release(wanted=False, idle=True)
    assert harness.gpu_snapshot().leases.preparing == b.client, "its last piece is still coming"
    harness.milliseconds(3)
    b.obeys()
    assert b.granted() is not None
    gpu = harness.gpu_snapshot()
    assert gpu.moves.moved_ns == gpu.moves.exposed_move_ns == b.seat().moves.exposed_move_ns == 3 * MILLISECOND_NS
    assert c.seat().moves.hidden_move_ns == 10 * MILLISECOND_NS
    assert b.seat().moves.hidden_move_ns == 5 * MILLISECOND_NS
    assert (c.seat().moves.moved_out_bytes, b.seat().moves.moved_in_bytes) == (35, 35)
    assert [note["hidden_ns"] for note in harness.notifications("moved")] == [10 * MILLISECOND_NS, 5 * MILLISECOND_NS]


def restarted() -> Harness:
    """A coordinator whose predecessor gave a lease; its holder has died meanwhile."""
    harness = Harness(create, quantum_ns=100 * MILLISECOND_NS)
    harness.gpu(capacity=100, next_lease_id=9, expected_holder=4242)
    harness.handle(events.ProcessEnded(4242))
    return harness


def test_after_a_restart_nothing_comes_in_before_all_can_be_back() -> None:
    """Broken: invariant 4, room is given away that belongs to a client whose connection is not back yet."""
    harness = restarted()
    b = harness.client(mode=MemoryMode.SWAP, resident=0, host=60)
    b.request()
    assert harness.gpu_snapshot().leases.preparing == b.client
    harness.milliseconds(500)
    assert not b.told()
    late = harness.client(mode=MemoryMode.SWAP, memory=70)
    harness.milliseconds(499)
    assert not b.told()
    harness.milliseconds(1)
    (target,) = b.take(messages.Target)
    assert (target.bytes, target.rises) == (30, True)
    assert late.told() == [40]


def test_after_a_restart_growth_waits_for_those_who_may_come_back() -> None:
    """Broken: as above, or a thread of the holder waits in its allocation for ever."""
    harness = restarted()
    a = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert a.granted() is not None
    a.ask_room(80)
    assert not a.reserved()
    harness.client(mode=MemoryMode.DEVICE, memory=50)
    harness.milliseconds(1000)
    assert a.reserved() == [0], "there is no room for it after all"


def test_a_new_coordinator_without_survivors_lets_nobody_wait() -> None:
    """Broken: the first allocations of every program that brings its own coordinator take a second."""
    harness = Harness(create)
    harness.gpu(capacity=100, next_lease_id=9)
    a = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert a.reserve(80) == 80


# --- host memory to have ready --------------------------------------------------------------------------------------


def prepared(client: ScriptedClient) -> list[int]:
    """Sizes that the client was told since the last call."""
    return [told.prepare_host_bytes for told in client.take(messages.GpuSettings)]


def test_clients_hear_how_much_host_memory_to_have_ready() -> None:
    """Broken: the first eviction pins its memory while everybody waits, or nobody will ever need what was pinned."""
    harness = make_harness(capacity=1000 * MIB)
    a = harness.client(wanted=True, mode=MemoryMode.SWAP)
    a.report(allocated=900 * MIB, resident=900 * MIB)
    assert prepared(a)[-1] == 0, "it is alone"
    b = harness.client(wanted=True, mode=MemoryMode.SWAP)
    prepared(a)
    b.report(allocated=356 * MIB, resident=0)
    assert prepared(a)[-1] == 256 * MIB, "the overflow"
    assert prepared(b)[-1] == 256 * MIB
    b.report(allocated=340 * MIB, resident=0)
    assert prepared(a) == [], "not for every few bytes"
    a.report(allocated=900 * MIB, resident=900 * MIB, pinned=800 * MIB)
    assert prepared(a) == [128 * MIB], "no more than it can move, in steps"
    b.die()
    assert prepared(a)[-1] == 0


def test_others_than_swap_prepare_nothing() -> None:
    """Broken: memory is pinned that is never used."""
    harness = make_harness()
    a, b = harness.client(wanted=True, resident=90), harness.client(wanted=True, mode=MemoryMode.DEVICE)
    b.report(allocated=50, resident=10)
    assert set(prepared(a)) == set(prepared(b)) == {0}
