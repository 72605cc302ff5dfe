"""Programs that are stopped while others wait: no turn for them, a bounded wait for the others, and a true reason."""

from __future__ import annotations

import pytest

from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, OverdueAction, Sharing
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import Harness, ScriptedClient, contended, one_gpu

SETTINGS = {"sharing": Sharing.EXCLUSIVE, "quantum_ns": 100 * MILLISECOND_NS}


def look(harness: Harness, *stopped: ScriptedClient) -> None:
    harness.handle(events.Look(tuple(client.process_id for client in stopped)))


def beyond_the_card() -> tuple[Harness, ScriptedClient, ScriptedClient]:
    """The second client is next: its memory must come in, and nothing is in its way.  A third one waits."""
    harness = one_gpu(100, **SETTINGS)
    harness.client(mode=MemoryMode.SWAP, resident=0, host=60)
    following = harness.client(mode=MemoryMode.SWAP, resident=0, host=60)
    following.request()
    assert following.seat().phase == "next"
    other = harness.client(mode=MemoryMode.SWAP, resident=10)
    other.request()
    return harness, following, other


def test_one_that_is_next_gets_no_turn() -> None:
    """Broken: it is granted a turn that it cannot use, and the others wait for its drain too."""
    harness, following, other = beyond_the_card()
    look(harness, following)
    assert other.granted() is not None
    assert following.seat().standing.state == "stopped"
    assert following.seat().turn.waiting_since_ns is None, "it does not wait for others"
    harness.advance(20 * SECOND_NS)
    assert following.granted() is None
    other.release(wanted=True)
    assert other.granted() is not None
    look(harness)
    assert following.seat().standing.state in ("next", "waiting")
    following.obeys()
    harness.until(lambda: other.seat().phase == "revoking")
    other.release(wanted=True)
    assert following.granted() is not None, "it goes on when it is continued"


def test_a_holder_loses_its_turn_at_the_second_look() -> None:
    """Broken: others wait for `drain_deadline`, or for the end of a long turn before it."""
    harness, holder, other = contended(**SETTINGS | {"quantum_ns": 60 * SECOND_NS})
    look(harness, holder)
    assert holder.seat().phase == "revoking"
    waits = harness.scheduler.wait_snapshot(other.client, 0)
    assert waits is not None
    assert (waits.standing.reason, waits.standing.blocker, waits.standing.blocker_stopped) == ("turn", 1, True)
    assert other.granted() is None, "its last work may not be over"
    look(harness, holder)
    assert holder.seat().phase == "overdue"
    assert other.granted() is not None
    look(harness)
    holder.release(wanted=True)
    assert holder.seat().standing.state in ("waiting", "in debt")


def test_a_holder_that_nobody_waits_for_keeps_its_lease() -> None:
    """Broken: a debugger takes the GPU from a program that is alone."""
    harness = one_gpu(**SETTINGS)
    holder = harness.client(wanted=True)
    for _ in range(3):
        look(harness, holder)
    assert holder.seat().phase == "holding"
    assert not harness.scheduler.wants_looks


@pytest.mark.parametrize("action", [OverdueAction.DEMOTE, OverdueAction.KILL])
def test_what_ends_or_demotes_a_program_waits_for_the_deadline(action: OverdueAction) -> None:
    """Broken: a program in a debugger is killed after a second."""
    harness, holder, _ = contended(**SETTINGS, overdue_action=action, drain_deadline_ns=10 * SECOND_NS)
    for _ in range(3):
        look(harness, holder)
    assert holder.seat().phase == "revoking"
    harness.advance(11 * SECOND_NS)
    assert holder.seat().phase == "overdue"
    assert any(isinstance(each, commands.Kill) for each in harness.commands) is (action is OverdueAction.KILL)


def test_its_memory_is_not_waited_for() -> None:
    """Broken: the next program waits for the eviction of one that cannot answer, or reads that nobody is in its way."""
    harness = one_gpu(100, **SETTINGS)
    idle = harness.client(mode=MemoryMode.SWAP, resident=60)
    following = harness.client(mode=MemoryMode.SWAP, resident=0, host=60)
    following.request()
    assert idle.told()
    look(harness, idle)
    waits = harness.scheduler.wait_snapshot(following.client, 0)
    assert waits is None or (waits.standing.reason, waits.standing.blocker_stopped) == ("stuck", True)
    assert harness.logged("does not move its memory")
    look(harness, idle)
    assert not idle.told(), "it is not asked again"


def test_only_processes_that_are_waited_for_are_looked_at() -> None:
    """Broken: the coordinator reads the state of a thousand idle processes each second."""
    harness, holder, other = contended(**SETTINGS)
    harness.client()
    assert harness.scheduler.wants_looks
    assert harness.scheduler.watched - {0} == {holder.process_id, other.process_id}
    look(harness, other)
    assert harness.scheduler.wants_looks, "until it continues"
    other.die()
    assert not harness.scheduler.wants_looks
