"""Clients that are parked because contexts have the room that others need."""

from __future__ import annotations

from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import GPU, Harness, ScriptedClient, one_gpu
from tests.unit.engine.parking.test_parking import SIZE, asked, evicted, idle_client, parked, state

LACKING = 4 * SIZE


def short_of_room(*idle: float) -> tuple[Harness, ScriptedClient, list[ScriptedClient]]:
    """A holder whose allocation found no memory on the card, and clients that have been idle for these seconds."""
    harness = one_gpu()
    others = {}
    for seconds in sorted(idle, reverse=True):
        others[seconds] = idle_client(harness)
        harness.advance(round(SECOND_NS * (seconds - max((s for s in idle if s < seconds), default=0))))
    needy = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert needy.granted() is not None
    needy.ask_room(LACKING)
    assert needy.reserved() == [LACKING]
    needy.ask_room(LACKING, lacking=LACKING)
    return harness, needy, [others[seconds] for seconds in idle]


def leave(harness: Harness, client: ScriptedClient) -> None:
    """From the end of its eviction until it is parked."""
    client.say(messages.ParkAnswer(True))
    assert len(asked(harness, commands.Checkpoint)) == 1
    harness.handle(events.Saved(client.client))


def test_evictions_come_first_then_the_client_that_was_idle_longest() -> None:
    """Broken: a program gets an out-of-memory error because of its neighbours' contexts, or a busy one is parked."""
    harness, needy, (short, long) = short_of_room(5, 10)
    for client in (short, long):
        evicted(client)
    assert not needy.reserved(), "less was evicted than it lacks"
    assert harness.scheduler.wants_looks
    harness.handle(events.Look())
    assert [state(harness, client)[0] for client in (short, long)] == ["running", "closing"]
    harness.handle(events.Look())
    assert state(harness, short)[0] == "running", "one after the other"
    leave(harness, long)
    assert state(harness, long) == ("parked", "others need its room")
    assert needy.reserved() == [LACKING]
    needy.ask_room(LACKING, lacking=LACKING)
    harness.handle(events.Look())
    leave(harness, short)
    assert needy.reserved() == [LACKING]


def test_the_program_hears_when_there_is_nothing_to_park() -> None:
    """Broken: a program waits for ever for room that nobody can make; or one that must stay is parked."""
    harness, needy, (never,) = short_of_room(9)
    harness.handle(events.Settled(never.client, Facts(park_after_ns=0)))
    evicted(never)
    harness.handle(events.Look())
    assert state(harness, never)[0] == "running"
    assert needy.reserved() == [LACKING], "evictions may suffice"
    needy.ask_room(LACKING, lacking=LACKING)
    assert not needy.reserved()
    harness.handle(events.Look())
    assert needy.reserved() == [0]
    assert not harness.scheduler.wants_looks


def test_a_client_that_cannot_be_parked_is_followed_by_the_next() -> None:
    """Broken: one program that refuses keeps the others from making room."""
    harness, needy, (second, first) = short_of_room(5, 10)
    for client in (second, first):
        evicted(client)
    harness.handle(events.Look())
    first.say(messages.ParkAnswer(False, "a stream is being captured"))
    assert not needy.reserved()
    harness.handle(events.Look())
    leave(harness, second)
    assert len(needy.reserved()) == 1


def test_a_restoration_that_finds_no_memory_asks_for_room() -> None:
    """Broken: a program whose memory does not come back waits beside idle contexts, or is not tried again."""
    harness = one_gpu(capacity=2 * SIZE)
    idle, needy = idle_client(harness), idle_client(harness)
    holder = harness.client(mode=MemoryMode.SWAP)
    holder.report(allocated=2 * SIZE, resident=0)
    holder.request()
    for client in (idle, needy):
        evicted(client)
    holder.comes_to(SIZE, error=2)
    assert harness.scheduler.wants_looks
    harness.advance(3 * SECOND_NS)
    harness.handle(events.Look())
    assert state(harness, idle)[0] == "closing"
    leave(harness, idle)
    harness.advance(MILLISECOND_NS)
    assert holder.granted() is not None


def test_a_restoration_that_ends_at_a_segment_parks_nobody() -> None:
    """Broken: an idle notebook is parked though the card has room: a segment was larger than what was left to move."""
    harness = one_gpu(capacity=2 * SIZE)
    clients = [idle_client(harness) for _ in range(2)]
    holder = harness.client(mode=MemoryMode.SWAP)
    holder.report(allocated=2 * SIZE, resident=0)
    holder.request()
    for client in clients:
        evicted(client)
    holder.comes_to(SIZE)
    assert not harness.scheduler.wants_looks


def test_the_drivers_figures_tell_that_contexts_leave_no_room() -> None:
    """Broken: parking begins only after an allocation has failed, though the card's figures show that it must."""
    harness = one_gpu(capacity=4 * SIZE)
    idle = idle_client(harness)
    harness.advance(3 * SECOND_NS)
    harness.handle(events.MemoryChecked(GPU, {str(idle.process_id): 3 * SIZE}, 0))
    assert harness.scheduler.wants_looks
    harness.handle(events.Look())
    assert state(harness, idle)[0] == "running", "nobody needs the room"
    harness.client(mode=MemoryMode.SWAP, memory=2 * SIZE, wanted=True)
    harness.handle(events.Look())
    assert state(harness, idle)[0] == "leaving"


def test_an_idle_holder_makes_room_for_one_that_comes_back() -> None:
    """Broken: a program that nobody waits for keeps its lease, and a parked one waits for its room for ever."""
    harness = one_gpu()
    away = idle_client(harness)
    parked(harness, away)
    holder = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert holder.granted() is not None
    away.request()
    harness.handle(events.Restored(away.client, "no room"))
    harness.advance(3 * SECOND_NS)
    harness.handle(events.Look())
    assert len(holder.take(messages.Revoke)) == 1
    holder.release()
    evicted(holder)
    assert state(harness, holder) == ("closing", "others need its room")


def test_idle_clients_that_keep_their_leases_make_room() -> None:
    """Broken: where programs run side by side nobody counts as idle, and a newcomer is out of memory."""
    harness = one_gpu(sharing=Sharing.CONCURRENT)
    idle, busy = (harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True) for _ in range(2))
    leases = idle.lease(), busy.lease()
    assert all(leases)
    harness.advance(3 * SECOND_NS)
    needy = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert needy.granted() is not None
    harness.advance(3 * SECOND_NS)  # it waits for its first allocation, and submits nothing either
    busy.progress(leases[1], harness.clock.now_ns, 1, 0, 0)
    needy.ask_room(LACKING, lacking=LACKING)
    harness.handle(events.Look())
    assert [state(harness, client)[0] for client in (idle, busy, needy)] == ["leaving", "running", "running"]
    idle.release()
    evicted(idle)
    leave(harness, idle)
    assert needy.reserved() == [LACKING]
    harness.advance(3 * SECOND_NS)
    needy.ask_room(LACKING, lacking=LACKING)
    harness.handle(events.Look())
    assert [state(harness, client)[0] for client in (busy, needy)] == ["leaving", "running"]


def test_who_will_soon_count_as_idle_is_waited_for() -> None:
    """Broken: a program is out of memory beside idle ones whose leases end just now, or that worked a moment ago."""
    harness = one_gpu()
    idle = harness.client(mode=MemoryMode.SWAP, wanted=True)
    harness.advance(3 * SECOND_NS)
    late = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert len(idle.take(messages.Revoke)) == 1, "on a busy machine the release takes a while"
    needy = harness.client(mode=MemoryMode.DEVICE)
    needy.ask_room(LACKING, lacking=LACKING)
    harness.handle(events.Look())
    assert state(harness, idle)[0] == "leaving"
    idle.release()
    leave(harness, idle)
    assert needy.reserved() == [LACKING]
    lease = late.lease()
    needy.ask_room(LACKING, lacking=LACKING)
    for work in (1, 2):
        harness.handle(events.Look())
        assert not needy.reserved()
        harness.advance(3 * SECOND_NS // 2)
        late.progress(lease, harness.clock.now_ns, work, 0, 0)
    harness.handle(events.Look())
    assert needy.reserved() == [0]
    assert state(harness, late)[0] == "running", "it works"


def test_one_that_does_not_leave_keeps_nobody_from_making_room() -> None:
    """Broken: a program that keeps its lease while it is parked by its owner starves those of other users."""
    harness, needy, (idle,) = short_of_room(9)
    evicted(idle)
    stuck = harness.client(mode=MemoryMode.SWAP, memory=SIZE)
    harness.handle(events.Set("sharing", "concurrent"))
    stuck.request()
    assert stuck.granted() is not None
    harness.handle(events.Set("parked", True, client=stuck.client))
    harness.handle(events.Look())
    assert [state(harness, client)[0] for client in (stuck, idle)] == ["leaving", "running"], "one after the other"
    harness.advance(harness.scheduler.settings.move_stall_ns)
    harness.handle(events.Look())
    assert [state(harness, client)[0] for client in (stuck, idle)] == ["leaving", "closing"]
    leave(harness, idle)
    assert needy.reserved() == [LACKING]
