"""Clients that are refused room for what they have already, because others hang: when they are tried again."""

from __future__ import annotations

from functools import partial

from nvshare.coordinator.cli.views.sentences import room_lines
from nvshare.coordinator.engine.memory.pinning import RETRY_NS
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import Harness, ScriptedClient, one_gpu
from tests.unit.cli.replies import status

PATIENCE_NS = 200 * MILLISECOND_NS
"""How long a hook keeps a lease that it can do nothing with, after the first attempts."""


make_harness = partial(one_gpu, capacity=100)


def swapping(harness: Harness, *, resident: int, host: int = 0) -> ScriptedClient:
    """A client whose memory can move, and partly has."""
    return harness.client(mode=MemoryMode.SWAP, resident=resident, host=host)


def try_to_run(client: ScriptedClient, size: int) -> bool:
    """As a hook: what is missing at a grant comes in, or the lease goes back unused.  Whether it could run."""
    if client.reserve(size) >= size:
        client.report(allocated=size, resident=size)
        return True
    client.harness.advance(PATIENCE_NS)
    lease = client.seat().lease_id
    client.say(messages.Release(0, lease, messages.ReleaseReason.REVOKED, True, True, 0, 0, 0))
    return False


def beside_one_that_hangs(harness: Harness) -> tuple[ScriptedClient, ScriptedClient]:
    """Two that do not fit together; one has been stopped, and moves nothing; the other one wants to run."""
    stopped, willing = swapping(harness, resident=60), swapping(harness, resident=40, host=20)
    willing.request()
    assert stopped.told() == [40]
    harness.until(lambda: bool(willing.take(messages.Grant)))
    assert not try_to_run(willing, 60)
    return stopped, willing


def test_what_cannot_be_had_is_not_asked_for_again_and_again() -> None:
    """Broken: one stopped program, and another one is granted and gives back several times a second, for ever."""
    harness = make_harness()
    _, willing = beside_one_that_hangs(harness)
    harness.commands.clear()
    began_ns, tries = harness.clock.now_ns, 0
    while harness.clock.now_ns < began_ns + 120 * SECOND_NS:
        harness.until(lambda: bool(willing.take(messages.Grant)))
        assert not try_to_run(willing, 60)
        tries += 1
    assert 3 <= tries <= 32, "now and then, since an eviction that failed may not fail for ever"
    assert len(harness.commands) < 20 * tries


def test_it_is_tried_again_after_a_while() -> None:
    """Broken: a program that found no room waits for ever, though others can be moved by now."""
    harness = make_harness()
    stopped, willing = beside_one_that_hangs(harness)
    assert willing.seat().memory.unschedulable
    (line,) = room_lines(status(harness))
    assert line.startswith("c2 (1002), no room on GPU 0: the memory of c1 (")
    stopped.obeys()
    harness.advance(RETRY_NS)
    assert willing.told()[-1] == 60
    willing.obeys()
    assert willing.take(messages.Grant)
    assert not willing.seat().memory.unschedulable


def test_the_waiting_program_hears_of_the_one_that_hangs() -> None:
    """Broken: a program reads that no program holds the GPU, and not whose memory is in its way."""
    harness = make_harness()
    stopped, willing = beside_one_that_hangs(harness)
    wait = harness.scheduler.wait_snapshot(willing.client, 0)
    assert wait is not None
    client = harness.scheduler.client_snapshot(stopped.client, 0)
    assert client is not None
    assert (wait.standing.reason, wait.blocker) == ("stuck", client.identity)
    stopped.obeys()
    wait = harness.scheduler.wait_snapshot(willing.client, 0)
    assert wait is None or wait.standing.reason != "stuck"


def test_the_death_of_the_one_that_hangs_is_enough() -> None:
    """Broken: nobody looks again when the last one that had memory is gone."""
    harness = make_harness()
    stopped, willing = beside_one_that_hangs(harness)
    assert willing.seat().memory.unschedulable
    stopped.die()
    assert willing.told()


def test_the_others_have_their_turns_meanwhile() -> None:
    """Broken: who cannot run takes turns from those who can, or is preferred to them by its priority."""
    harness = make_harness()
    _, willing = beside_one_that_hangs(harness)
    other = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert other.take(messages.Grant)
    harness.handle(events.Set("priority", 5, client=willing.client))
    harness.milliseconds(50)
    assert not other.take(messages.Revoke)


def test_one_beyond_its_own_limit_holds_no_turn_from_others() -> None:
    """Broken: a program whose limit was lowered below what it has is refused at each grant, and its priority has it
    granted again at once, for ever."""
    harness = make_harness(policy="priority", sharing=Sharing.EXCLUSIVE)
    limited = harness.client(mode=MemoryMode.SWAP, priority=3, limit=50, resident=50, host=50)
    other = swapping(harness, resident=40)
    limited.request()
    other.request()
    assert limited.take(messages.Grant)
    assert not try_to_run(limited, 100)
    assert any(refused["why"] == "limit" for refused in harness.notifications("refused"))
    harness.until(lambda: bool(other.take(messages.Grant)))
    harness.advance(RETRY_NS // 2)
    assert not limited.take(messages.Grant)


def test_a_promise_that_nobody_uses_does_not_keep_others_out() -> None:
    """Broken: a program that was large once would keep its room for ever, and one that needs it would ask for ever."""
    harness = make_harness(sharing=Sharing.CONCURRENT)
    large, small = swapping(harness, resident=10), swapping(harness, resident=0, host=50)
    large.request()
    assert large.reserve(90) == 90
    large.report(allocated=10, resident=10)  # it has freed the rest, and may allocate it again without asking
    small.request()
    small.ask_room(50)
    assert not harness.notifications("refused")
    assert small.granted() is None, "they take turns, in which promises end"
    harness.until(lambda: bool(large.take(messages.Revoke)))
    large.release(wanted=True)
    while small.told():
        small.obeys()
    assert set(harness.gpu_snapshot().leases.holders) == {large.client, small.client}, "side by side again"
    small.reserved()
    assert small.reserve(50) == 50


def test_one_that_hangs_is_told_of_no_other_target() -> None:
    """Broken: each new target has others wait for it again."""
    harness = make_harness()
    hanging, other = swapping(harness, resident=60, host=20), swapping(harness, resident=40, host=20)
    other.request()
    assert hanging.told()
    harness.until(lambda: bool(other.take(messages.Grant)))
    hanging.request()
    other.die()
    assert hanging.take(messages.Grant), "there is room, but nothing comes in before it is heard of"
    assert not hanging.told()
