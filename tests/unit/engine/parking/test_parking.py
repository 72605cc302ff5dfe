"""Clients that leave their GPUs while they are idle."""

from __future__ import annotations

import pytest

from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness, ScriptedClient, one_gpu

SIZE = 1 << 20


def idle_client(harness: Harness) -> ScriptedClient:
    """A client in mode `swap` that has had its turn and has memory on the GPU."""
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert client.granted() is not None
    client.release()
    return client


def park(harness: Harness, client: ScriptedClient, on: bool = True) -> None:
    harness.handle(events.Set("parked", on, client=client.client))


def state(harness: Harness, client: ScriptedClient) -> tuple[str, str]:
    found = harness.scheduler.client_snapshot(client.client, harness.clock.now_ns)
    assert found is not None
    return found.parking, found.parking_why


def evicted(client: ScriptedClient) -> None:
    """The client moves its memory to the host, as it was told."""
    assert client.told() == [0]
    client.obeys()


def brought_in(client: ScriptedClient) -> None:
    """The client moves its memory back."""
    assert client.told() == [SIZE]
    client.obeys()


def on_the_way(harness: Harness, client: ScriptedClient, to: str) -> None:
    """Goes on from its eviction to this state; later ones than `waking` are the caller's."""
    if to != "leaving":
        evicted(client)
    if to not in ("leaving", "closing"):
        client.say(messages.ParkAnswer(True))
        assert len(asked(harness, commands.Checkpoint)) == 1
    if to not in ("leaving", "closing", "saving"):
        harness.handle(events.Saved(client.client))
    if to == "waking":
        client.request()


def parked(harness: Harness, client: ScriptedClient) -> None:
    """All the way out."""
    park(harness, client)
    on_the_way(harness, client, "parked")
    assert state(harness, client) == ("parked", "")


def asked(harness: Harness, kind: type[commands.DriverCall]) -> list[commands.Command]:
    """What the driver is asked for since the last call."""
    found: list[commands.Command] = [command for command in harness.commands if isinstance(command, kind)]
    harness.commands = [command for command in harness.commands if not isinstance(command, kind)]
    return found


def test_memory_leaves_before_the_hook_closes_and_the_driver_saves() -> None:
    """Broken: the driver's checkpoint carries the memory, far below the link's speed; or a call runs into it."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    assert not client.take(messages.Park)
    evicted(client)
    assert client.take(messages.Park) == [messages.Park(True)]
    assert not asked(harness, commands.Checkpoint)
    client.say(messages.ParkAnswer(True))
    assert asked(harness, commands.Checkpoint) == [commands.Checkpoint(client.client, client.process_id, 0)]
    harness.handle(events.Saved(client.client))
    assert state(harness, client) == ("parked", "")


def test_a_request_wakes_it_and_its_turn_follows() -> None:
    """Broken: a parked program waits for ever, or runs before the driver has brought it back."""
    harness = one_gpu()
    client = idle_client(harness)
    parked(harness, client)
    client.take(messages.Park)
    client.request()
    assert asked(harness, commands.Restore) == [commands.Restore(client.client, client.process_id, 0)]
    client.request()
    assert not asked(harness, commands.Restore), "once"
    assert client.granted() is None
    harness.handle(events.Restored(client.client))
    assert client.take(messages.Park) == [messages.Park(False)]
    brought_in(client)
    assert client.granted() is not None
    assert state(harness, client) == ("running", "")


@pytest.mark.parametrize("step", ["leaving", "closing", "saving"])
def test_a_request_on_the_way_out(step: str) -> None:
    """Broken: who wants the GPU while it is being parked loses its request, or is parked for nothing."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    on_the_way(harness, client, step)
    assert state(harness, client)[0] == step
    client.request()
    if step == "saving":
        harness.handle(events.Saved(client.client))
        assert len(asked(harness, commands.Restore)) == 1
        harness.handle(events.Restored(client.client))
    elif step == "leaving":
        assert client.told() == [0, SIZE], "it turns at once"
        client.comes_to(SIZE // 2, at_rest=False)
        client.obeys()
    if step != "leaving":
        brought_in(client)
    assert client.granted() is not None
    assert not asked(harness, commands.Checkpoint)


def test_a_late_answer_of_the_hook_does_nothing() -> None:
    """Broken: an answer that crosses the end of the attempt has the driver save a program that runs."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    evicted(client)
    client.request()
    assert client.take(messages.Park) == [messages.Park(True), messages.Park(False)]
    client.say(messages.ParkAnswer(True))
    assert not asked(harness, commands.Checkpoint)


def test_a_holder_gives_its_lease_back_first() -> None:
    """Broken: memory moves, or the driver stops, under running work."""
    harness = one_gpu()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    park(harness, client)
    assert len(client.take(messages.Revoke)) == 1
    assert not client.told()
    client.release()
    evicted(client)
    assert client.take(messages.Park) == [messages.Park(True)]


def test_a_holder_that_wants_to_go_on_goes_on() -> None:
    """Broken: parking a busy program stops it."""
    harness = one_gpu()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert client.granted() is not None
    park(harness, client)
    client.release(wanted=True)
    assert client.granted() is not None
    assert state(harness, client) == ("running", "it wants the GPU")


def test_what_cannot_be_parked_says_so_and_runs() -> None:
    """Broken: memory moves for nothing, or the operator learns no reason."""
    harness = one_gpu()
    managed = harness.client(mode=MemoryMode.MANAGED, memory=SIZE)
    park(harness, managed)
    assert "managed memory" in state(harness, managed)[1]
    refusing = idle_client(harness)
    park(harness, refusing)
    evicted(refusing)
    refusing.say(messages.ParkAnswer(False, "a stream is being captured"))
    assert state(harness, refusing) == ("running", "a stream is being captured")
    failing = idle_client(harness)
    park(harness, failing)
    evicted(failing)
    failing.say(messages.ParkAnswer(True))
    harness.handle(events.Saved(failing.client, "the driver is too old"))
    assert state(harness, failing) == ("running", "the driver is too old")
    assert failing.take(messages.Park) == [messages.Park(True), messages.Park(False)]


def test_memory_that_does_not_move() -> None:
    """Broken: a program whose mover hangs stays half parked."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    harness.handle(events.Look())
    harness.advance(harness.scheduler.settings.move_stall_ns + SECOND_NS)
    harness.handle(events.Look())
    assert state(harness, client) == ("running", "it does not move its memory")


def test_a_hook_that_does_not_answer() -> None:
    """Broken: a stopped program is being parked for ever, and `nvshare-ctl park` waits as long."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    evicted(client)
    client.take(messages.Park)
    harness.advance(harness.scheduler.settings.move_stall_ns)
    harness.handle(events.Look())
    assert state(harness, client) == ("running", "its hook does not answer")
    assert client.take(messages.Park) == [messages.Park(False)], "for when it goes on"


def test_a_lease_that_does_not_come_back() -> None:
    """Broken: a program that keeps its lease is being parked for ever."""
    harness = one_gpu()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    park(harness, client)
    harness.advance(harness.scheduler.settings.drain_deadline_ns)
    harness.handle(events.Look())
    assert state(harness, client) == ("running", "it does not give its lease back")


def test_memory_that_comes_back_again_and_again() -> None:
    """Broken: a peer that reports what it was told to evict as resident again is being parked for ever."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    seconds = 0
    while state(harness, client)[0] == "leaving":
        evicted(client)
        client.report(allocated=SIZE, resident=SIZE)
        harness.advance(SECOND_NS)
        harness.handle(events.Look())
        seconds += 1
        assert seconds < 60


def test_by_itself_after_its_time_and_not_again_after_a_refusal() -> None:
    """Broken: `park_after` does nothing; or a program that cannot be parked moves its memory each second."""
    harness = one_gpu()
    client = idle_client(harness)
    assert not harness.scheduler.wants_looks
    harness.handle(events.Set("park_after", 10 * SECOND_NS))
    assert harness.scheduler.wants_looks
    harness.advance(9 * SECOND_NS)
    harness.handle(events.Look())
    assert state(harness, client)[0] == "running"
    harness.advance(SECOND_NS)
    harness.handle(events.Look())
    evicted(client)
    client.say(messages.ParkAnswer(False, "no"))
    harness.advance(60 * SECOND_NS)
    harness.handle(events.Look())
    assert state(harness, client)[0] == "running"
    client.request()
    brought_in(client)
    client.release()
    harness.advance(10 * SECOND_NS)
    harness.handle(events.Look())
    assert state(harness, client)[0] == "leaving", "it has changed"


@pytest.mark.parametrize(
    ("of_all", "of_class", "own", "parked_after"),
    [(9, None, None, 9), (9, 20, None, 20), (9, 0, None, None), (9, 20, 30, 30), (0, None, 30, 30), (9, 9, 0, None)],
)
def test_a_programs_own_time_comes_before_that_of_its_class_and_of_all(
    of_all: int, of_class: int | None, own: int | None, parked_after: int | None
) -> None:
    """Broken: what a user says of one program, or an operator of a class, does not count."""
    harness = one_gpu()
    client = idle_client(harness)
    for name, seconds in (("park_after", of_all), ("park_after_interactive", of_class)):
        harness.handle(events.Set(name, None if seconds is None else seconds * SECOND_NS))
    own_ns = None if own is None else own * SECOND_NS
    facts = Facts(park_after_ns=own_ns).having(job_class=JobClass.INTERACTIVE)
    harness.handle(events.Settled(client.client, facts))
    assert harness.scheduler.wants_looks
    seconds = 0
    while seconds < 60 and state(harness, client)[0] == "running":
        harness.advance(SECOND_NS)
        harness.handle(events.Look())
        seconds += 1
    assert seconds == (parked_after or 60)
    client.die()
    assert harness.scheduler.wants_looks is bool(of_all or of_class)


def test_a_holder_that_submits_nothing_is_idle() -> None:
    """Broken: a program that nobody waits for keeps its lease and counts as busy for ever; or a busy one is parked."""
    harness = one_gpu(park_after_ns=10 * SECOND_NS)
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    lease = client.lease()
    harness.advance(9 * SECOND_NS)
    client.progress(lease, harness.clock.now_ns, 1, 0, 0)
    harness.advance(9 * SECOND_NS)
    harness.handle(events.Look())
    assert state(harness, client)[0] == "running"
    harness.advance(SECOND_NS)
    harness.handle(events.Look())
    assert (state(harness, client)[0], len(client.take(messages.Revoke))) == ("leaving", 1)
    client.release(wanted=True)
    assert state(harness, client) == ("running", "it wants the GPU")


def test_a_failed_return_is_tried_again() -> None:
    """Broken: a card that was full for a moment keeps a program parked for ever, or is asked without end."""
    harness = one_gpu()
    client = idle_client(harness)
    parked(harness, client)
    client.request()
    asked(harness, commands.Restore)
    harness.handle(events.Restored(client.client, "out of memory"))
    assert state(harness, client) == ("parked", "out of memory")
    client.request()
    harness.handle(events.Look())
    assert not asked(harness, commands.Restore)
    assert harness.scheduler.wants_looks
    harness.advance(SECOND_NS)
    harness.handle(events.Look())
    assert len(asked(harness, commands.Restore)) == 1


def test_nobody_knows_whether_the_checkpoint_was_made() -> None:
    """Broken: the helper dies in the midst, and the program counts as running while it is off the GPU."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    evicted(client)
    client.say(messages.ParkAnswer(True))
    client.take(messages.Park)
    harness.handle(events.Saved(client.client, "its helper ended", unsure=True))
    assert state(harness, client) == ("waking", "its helper ended")
    assert len(asked(harness, commands.Restore)) == 1
    harness.handle(events.Restored(client.client))
    assert client.take(messages.Park) == [messages.Park(False)]
    assert state(harness, client) == ("running", "its helper ended")


@pytest.mark.parametrize("at", ["saving", "waking"])
def test_a_program_that_the_driver_loses(at: str) -> None:
    """Broken: its return is tried for ever; or its threads wait for a lease, and the program never hears of it."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    on_the_way(harness, client, at)
    client.take(messages.Park)
    harness.handle((events.Restored if at == "waking" else events.Saved)(client.client, "gone", lost=True))
    assert client.take(messages.Park) == [messages.Park(False, lost=True)]
    assert state(harness, client) == ("running", "gone")
    asked(harness, commands.Restore)
    harness.handle(events.Look())
    assert not asked(harness, commands.Restore)


def test_a_machine_that_parks_nothing_says_so() -> None:
    """Broken: memory moves for nothing where the driver has no checkpoints."""
    harness = one_gpu(park_after_ns=SECOND_NS)
    harness.scheduler = Scheduler(create, harness.scheduler.settings, cannot_park="the driver is too old")
    harness.gpu()
    client = idle_client(harness)
    park(harness, client)
    harness.advance(9 * SECOND_NS)
    harness.handle(events.Look())
    assert state(harness, client) == ("running", "the driver is too old")
    assert not client.told()


@pytest.mark.parametrize("at", ["leaving", "closing", "saving", "parked", "waking"])
def test_death_in_each_state(at: str) -> None:
    """Broken: invariant 6; or an answer of the driver about a program that is gone ends the coordinator."""
    harness = one_gpu()
    client = idle_client(harness)
    park(harness, client)
    on_the_way(harness, client, at)
    assert state(harness, client)[0] == at
    client.die()
    harness.handle(events.Saved(client.client))
    harness.handle(events.Restored(client.client))
    harness.handle(events.Look())
    assert harness.gpu_snapshot().clients == 0
    assert not harness.scheduler.wants_looks


def test_a_parked_client_of_an_earlier_coordinator() -> None:
    """Broken: after a restart a parked program counts as running, and its request is granted in vain."""
    harness = one_gpu()
    client = harness.client(mode=MemoryMode.SWAP, attach=False)
    client.say(messages.AttachGpu(0, "GPU-0", 0, False, SIZE, 0, 0, True))
    assert state(harness, client)[0] == "parked"
    client.request()
    assert client.granted() is None
    assert len(asked(harness, commands.Restore)) == 1


def test_others_run_meanwhile() -> None:
    """Broken: a parked program is planned for, and others wait for it."""
    harness = one_gpu()
    client = idle_client(harness)
    parked(harness, client)
    other = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert other.granted() is not None
    client.request()
    harness.handle(events.Restored(client.client, "no room"))
    harness.advance(10 * SECOND_NS)
    assert not other.take(messages.Revoke)
