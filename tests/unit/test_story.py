"""The log of events: it reads back, replays to the same commands, and stands in our own mistakes."""

from __future__ import annotations

import pytest

from coordinator import events
from coordinator.scheduler import InvariantError, Scheduler, Settings
from coordinator.simulated_client import Plan
from coordinator.simulation import World
from coordinator.state import HOLDING, SECOND_NS
from coordinator.story import Story, read, replay
from coordinator.testing import GPU, Desk
from coordinator.wire import Sharing
from scheduler_policies.registry import create

SETTINGS = Settings(check_invariants=True, story_length=1_000_000)


def test_a_story_replays_to_the_same_commands() -> None:
    """Broken: a failure could not be run again from what was logged; or something hidden feeds the core."""
    world = World(5, Plan(memory_bytes=600, admin_every_ns=SECOND_NS, death_chance=0.05), create, SETTINGS)
    world.run()
    assert world.scheduler is not None
    told = world.scheduler.story
    assert told.complete
    again = Scheduler(create, SETTINGS)
    replay(again, read(told.lines()))
    assert again.story.tell(10_000_000) == told.tell(10_000_000)


def test_every_event_reads_back_equal() -> None:
    """Broken: a new kind of event or field would make stories unreadable."""
    desk = Desk(create, SETTINGS)
    desk.gpu()
    a = desk.client(wanted=True)
    desk.handle(events.SharingSet(Sharing.CONCURRENT))
    desk.handle(events.PolicySet("priority"))
    a.die()
    lines = list(desk.scheduler.story.lines())
    assert [event for _, event in read(lines)][-3:] == [
        events.SharingSet(Sharing.CONCURRENT),
        events.PolicySet("priority"),
        events.ClientGone(a.client),
    ]


@pytest.mark.parametrize("line", ["", "[]", "[1, 2]", '[1, "NoEvent", {}]', '[1, "Requested", {"client": 1}]', "[1"])
def test_what_is_no_story_is_refused(line: str) -> None:
    """Broken: a damaged file would end in a riddle instead of a message."""
    with pytest.raises(ValueError, match="not a line of a story"):
        read([line])


def test_a_story_is_bounded_and_says_so() -> None:
    """Broken: the log would grow without end, or a replay from its middle be trusted."""
    story = Story(2)
    for time in range(2):
        story.record(time, events.TimerFired(), [])
    assert story.complete
    story.record(2, events.TimerFired(), [])
    assert not story.complete
    assert len(story) == 2


def test_our_own_mistake_shows_the_story() -> None:
    """Broken: a breach of an invariant would go unseen, or be reported without what led to it."""
    desk = Desk(create, SETTINGS)
    desk.gpu()
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    gpu = desk.scheduler._node.gpus[GPU]
    seat = gpu.seats[b.client]  # break invariant 1 by hand
    seat.phase = HOLDING
    gpu.leases[b.client] = seat
    with pytest.raises(InvariantError, match="invariant 1") as caught:
        a.request()
    assert "Requested(client=1, gpu=0)" in str(caught.value)
    assert len(read(caught.value.lines)) == len(caught.value.lines) > 3


def test_any_failure_of_ours_shows_the_story() -> None:
    """Broken: a plain bug would come out without the events that led to it."""
    desk = Desk(create, SETTINGS)
    with pytest.raises(InvariantError, match="KeyError"):
        desk.handle(events.HolderGone("GPU-nowhere"))
