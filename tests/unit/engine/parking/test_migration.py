"""Clients that move to another GPU: by the operator, and by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from nvshare.coordinator.engine.memory.client_settings import PREPARE_STEP_BYTES
from nvshare.coordinator.engine.parking.migration import PATIENCE_NS
from nvshare.coordinator.engine.snapshot import ClientSnapshot
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import Happened, TurnEnded
from nvshare.scheduler_policies.round_robin import RoundRobin
from tests.harness import Harness, ScriptedClient, one_gpu
from tests.unit.engine.parking.test_parking import SIZE, asked, brought_in, evicted, idle_client, on_the_way, parked
from tests.unit.engine.test_progress import Reporter

HOME, OTHER = "GPU-0", "GPU-1"


def two_gpus(**settings: Any) -> Harness:
    harness = one_gpu(**settings)
    harness.gpu(OTHER)
    return harness


def shown(harness: Harness, client: ScriptedClient) -> ClientSnapshot:
    found = harness.scheduler.client_snapshot(client.client, harness.clock.now_ns)
    assert found is not None
    return found


def migrate(harness: Harness, client: ScriptedClient, gpu: str = OTHER) -> None:
    harness.handle(events.Set("moved_to", gpu, client=client.client))


def prepared(client: ScriptedClient) -> None:
    """Its hook has host memory for all that moves."""
    client.state(allocated_bytes=SIZE, resident_bytes=SIZE, prepared_bytes=SIZE)


def arrives(harness: Harness, client: ScriptedClient) -> None:
    """The driver has it on the other GPU, and its memory comes in."""
    harness.handle(events.Restored(client.client, gpu=OTHER))
    brought_in(client)


def moved(harness: Harness, client: ScriptedClient) -> None:
    """All the way."""
    migrate(harness, client)
    on_the_way(harness, client, "saved")
    expected = commands.Restore(client.client, client.process_id, 0, HOME, OTHER)
    assert asked(harness, commands.Restore) == [expected]
    harness.handle(events.Restored(client.client, gpu=OTHER))


def test_an_idle_client_moves_with_its_figures() -> None:
    """Broken: its memory counts on the card that it has left, or it starts anew on the other one."""
    harness = two_gpus()
    client = idle_client(harness)
    before = client.seat().statistics
    client.take(messages.Park)
    moved(harness, client)
    assert client.take(messages.Park) == [messages.Park(True), messages.Park(False, 0, OTHER)]
    seat = client.seat()
    assert (seat.uuid, seat.memory.allocated_bytes, seat.memory.resident_bytes) == (OTHER, SIZE, 0)
    assert seat.statistics == before
    home, other = harness.gpu_snapshot(HOME), harness.gpu_snapshot(OTHER)
    assert (home.clients, home.memory.allocated_bytes) == (0, 0)
    assert (other.clients, other.memory.allocated_bytes) == (1, SIZE)
    assert (shown(harness, client).moved_from, shown(harness, client).moved_why) == (HOME, "by the operator")
    (event,) = harness.notifications("migrated")
    assert (event["uuid"], event["from"]) == (OTHER, HOME)


class _Notes(RoundRobin):
    """Round robin; notes what each turn is charged."""

    def __init__(self, charged: list[int]) -> None:
        super().__init__()
        self.charged = charged

    def observe(self, happened: Happened) -> None:
        super().observe(happened)
        if isinstance(happened, TurnEnded):
            self.charged.append(happened.job.uncharged_ns(happened.now_ns))


def test_turns_before_a_move_are_not_charged_again() -> None:
    """Broken: a program that has run for hours waits for its turns on the card that it has moved to."""
    charged: list[int] = []
    harness = Harness(lambda name, uuid: _Notes(charged))
    harness.gpu(HOME)
    harness.gpu(OTHER)
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    harness.milliseconds(40)
    client.release()
    moved(harness, client)
    client.request()
    brought_in(client)
    harness.milliseconds(30)
    client.release()
    assert charged == [40 * MILLISECOND_NS, 30 * MILLISECOND_NS]


def test_a_holder_moves_and_goes_on_there() -> None:
    """Broken: a program at work cannot move, loses its request, or takes the first lease there for an old one."""
    harness = two_gpus()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    first = client.granted()
    assert first is not None
    client.take(messages.GpuSettings)
    migrate(harness, client)
    (settings,) = client.take(messages.GpuSettings)
    assert (settings.prepare_now, settings.prepare_host_bytes) == (True, PREPARE_STEP_BYTES)
    assert (shown(harness, client).parking, client.take(messages.Revoke)) == ("preparing", [])
    assert asked(harness, commands.ExpectCheckpoint), "its helper starts while the program runs on"
    client.report(allocated=PREPARE_STEP_BYTES + SIZE, resident=SIZE)
    (settings,) = client.take(messages.GpuSettings)
    assert settings.prepare_host_bytes == 2 * PREPARE_STEP_BYTES, "the program has grown"
    prepared(client)
    assert (len(client.take(messages.Revoke)), client.told()) == (1, [])
    client.release(wanted=True)
    assert client.granted() is None
    on_the_way(harness, client, "saved")
    arrives(harness, client)
    assert client.lease() > first.lease_id
    assert client.seat().uuid == OTHER
    assert not client.take(messages.GpuSettings)[-1].prepare_now


def test_host_memory_that_does_not_come_is_not_waited_for() -> None:
    """Broken: a program on a machine with little memory never moves, though it would fit."""
    harness = two_gpus()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert client.granted() is not None
    migrate(harness, client)
    harness.handle(events.Look())
    assert (client.take(messages.Revoke), harness.scheduler.wants_looks) == ([], True)
    harness.advance(2 * SECOND_NS)
    harness.handle(events.Look())
    assert len(client.take(messages.Revoke)) == 1


def test_a_move_that_becomes_impossible_ends_the_preparation() -> None:
    """Broken: the program counts as preparing for ever, and its refusal is said at each event."""
    harness = two_gpus()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert client.granted() is not None
    migrate(harness, client)
    harness.scheduler._node.cannot_park = "the helper is gone"
    prepared(client)
    assert client.take(messages.Revoke) == []
    found = shown(harness, client)
    assert (found.parking, found.parking_why, found.moves_to) == ("running", "the helper is gone", "")


def test_the_operator_ends_the_preparation() -> None:
    """Broken: the hook goes on making memory without rests, or the program moves all the same."""
    harness = two_gpus()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert client.granted() is not None
    migrate(harness, client)
    harness.handle(events.Set("parked", False, client=client.client))
    settings = client.take(messages.GpuSettings)[-1]
    assert (settings.prepare_now, settings.prepare_host_bytes) == (False, 0)
    prepared(client)
    harness.advance(3 * SECOND_NS)
    harness.handle(events.Look())
    assert (client.take(messages.Revoke), client.take(messages.Park)) == ([], [])
    assert (shown(harness, client).parking, shown(harness, client).moves_to) == ("running", "")


def test_the_others_run_on() -> None:
    """Broken: a client that has moved keeps its place or its turn on the card that it has left."""
    harness = two_gpus()
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    other = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert client.granted() is not None
    migrate(harness, client)
    prepared(client)
    client.release(wanted=True)
    assert other.granted() is not None
    on_the_way(harness, client, "saved")
    arrives(harness, client)
    assert client.granted() is not None
    client.take(messages.Revoke)
    harness.advance(60 * SECOND_NS)
    assert not other.take(messages.Revoke)
    assert not client.take(messages.Revoke)


def test_a_waiting_client_moves() -> None:
    """Broken: who waits for a busy card cannot leave it."""
    harness = two_gpus()
    holder = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    client = harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    assert holder.granted() is not None
    assert client.granted() is None
    migrate(harness, client)
    on_the_way(harness, client, "saved")
    arrives(harness, client)
    assert client.granted() is not None


def test_a_parked_client_comes_back_elsewhere() -> None:
    """Broken: the operator must wake a parked program on a full card before it can move."""
    harness = two_gpus()
    client = idle_client(harness)
    harness.handle(events.Set("parked", True, client=client.client))
    on_the_way(harness, client, "saved")
    migrate(harness, client)
    assert asked(harness, commands.Restore) == [commands.Restore(client.client, client.process_id, 0, HOME, OTHER)]
    harness.handle(events.Restored(client.client, gpu=OTHER))
    assert client.seat().uuid == OTHER


def test_back_and_forth() -> None:
    """Broken: a second move names the GPU on which the program was first."""
    harness = two_gpus()
    client = idle_client(harness)
    moved(harness, client)
    client.request()
    brought_in(client)
    assert client.granted() is not None
    client.release()
    migrate(harness, client, HOME)
    on_the_way(harness, client, "saved")
    assert asked(harness, commands.Restore) == [commands.Restore(client.client, client.process_id, 0, OTHER, HOME)]
    harness.handle(events.Restored(client.client, gpu=HOME))
    assert client.seat().uuid == HOME


def refused(harness: Harness, client: ScriptedClient, part: str, gpu: str = OTHER) -> None:
    client.inbox.clear()
    harness.commands.clear()
    migrate(harness, client, gpu)
    found = shown(harness, client)
    assert part in found.parking_why
    assert (found.parking, found.moves_to) == ("running", "")
    assert not client.inbox, "nothing moves"
    assert not asked(harness, commands.Checkpoint)


def test_refused_before_anything_moves() -> None:
    """Broken: a program stands still for a move that the driver or the engine cannot make."""
    harness = two_gpus()
    harness.gpu("GPU-2", capacity=2 << 30)
    harness.gpu("MIG-3")
    client = idle_client(harness)
    refused(harness, client, "there already", HOME)
    refused(harness, client, "no GPU GPU-9", "GPU-9")
    refused(harness, client, "the cards differ", "GPU-2")
    refused(harness, client, "MIG", "MIG-3")
    device = harness.client(mode=MemoryMode.DEVICE)
    refused(harness, device, "--memory swap")
    managed = harness.client(mode=MemoryMode.MANAGED, memory=SIZE)
    refused(harness, managed, "managed memory")
    both = harness.client(mode=MemoryMode.SWAP)
    both.attach(OTHER, gpu=1, memory=SIZE)
    both.request()
    refused(harness, both, "several GPUs")
    mate = harness.client(mode=MemoryMode.SWAP, gang="pair")
    refused(harness, mate, "the gang pair")
    slotted = harness.client(mode=MemoryMode.SWAP, group="slot-1")
    refused(harness, slotted, "Kubernetes slot")


def test_refused_where_there_is_no_room() -> None:
    """Broken: a program moves to a card on which it can never run."""
    harness = two_gpus()
    client = idle_client(harness)
    full = harness.client(mode=MemoryMode.DEVICE, attach=False)
    full.attach(OTHER, wanted=True)
    assert full.granted() is not None
    assert full.reserve(1 << 30) == 1 << 30
    full.report(allocated=1 << 30, resident=1 << 30)
    refused(harness, client, "has room for 0")


def test_a_failure_over_there_goes_home() -> None:
    """Broken: a full card over there leaves the program parked, or nobody says what happened."""
    harness = two_gpus()
    client = idle_client(harness)
    migrate(harness, client)
    on_the_way(harness, client, "saved")
    asked(harness, commands.Restore)
    harness.handle(events.Restored(client.client, "out of memory"))
    assert asked(harness, commands.Restore) == [commands.Restore(client.client, client.process_id, 0)]
    harness.handle(events.Restored(client.client))
    found = shown(harness, client)
    assert (found.parking, found.moves_to, client.seat().uuid) == ("running", "", HOME)
    assert "out of memory" in found.parking_why
    assert harness.logged("out of memory")
    client.request()
    brought_in(client)
    assert client.granted() is not None


def test_a_helper_that_died_after_the_move() -> None:
    """Broken: the engine believes that a process is at home which the driver has moved."""
    harness = two_gpus()
    client = idle_client(harness)
    migrate(harness, client)
    on_the_way(harness, client, "saved")
    harness.handle(events.Restored(client.client, "its helper ended"))
    harness.handle(events.Restored(client.client, gpu=OTHER))
    assert client.seat().uuid == OTHER
    assert client.take(messages.Park)[-1] == messages.Park(False, 0, OTHER)


def test_a_coordinator_that_died_after_the_move() -> None:
    """Broken: the next coordinator counts a moved process on the card that it has left."""
    harness = two_gpus()
    client = harness.client(mode=MemoryMode.SWAP, attach=False)
    client.say(messages.AttachGpu(0, HOME, 0, False, SIZE, 0, 0, True))
    client.request()
    assert asked(harness, commands.Restore) == [commands.Restore(client.client, client.process_id, 0)]
    harness.handle(events.Restored(client.client, gpu=OTHER))
    assert client.take(messages.Park) == [messages.Park(False, 0, OTHER)]
    assert client.seat().uuid == OTHER


@pytest.mark.parametrize("step", ["leaving", "closing", "saving"])
def test_unpark_ends_a_move(step: str) -> None:
    """Broken: the operator cannot take a move back."""
    harness = two_gpus()
    client = idle_client(harness)
    migrate(harness, client)
    on_the_way(harness, client, step)
    harness.handle(events.Set("parked", False, client=client.client))
    if step == "saving":
        harness.handle(events.Saved(client.client))
        assert asked(harness, commands.Restore) == [commands.Restore(client.client, client.process_id, 0)]
        harness.handle(events.Restored(client.client))
    assert (shown(harness, client).parking, shown(harness, client).moves_to) == ("running", "")
    assert client.seat().uuid == HOME


@pytest.mark.parametrize("at", ["leaving", "closing", "saving", "waking", "home", "moved"])
def test_death_in_each_state(at: str) -> None:
    """Broken: invariant 6, on either card."""
    harness = two_gpus()
    client = idle_client(harness)
    migrate(harness, client)
    on_the_way(harness, client, "saved" if at in ("waking", "home", "moved") else at)
    if at == "home":
        harness.handle(events.Restored(client.client, "no room"))
    if at == "moved":
        harness.handle(events.Restored(client.client, gpu=OTHER))
    client.die()
    harness.handle(events.Saved(client.client))
    harness.handle(events.Restored(client.client, gpu=OTHER))
    harness.handle(events.Look())
    for uuid in (HOME, OTHER):
        assert harness.gpu_snapshot(uuid).clients == 0
        assert harness.gpu_snapshot(uuid).memory.allocated_bytes == 0
    assert not harness.scheduler.wants_looks


# --- rebalance ------------------------------------------------------------------------------------------------------


def crowd(harness: Harness, count: int = 2, **more: Any) -> list[ScriptedClient]:
    """Clients that all want the first GPU."""
    return [harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True, **more) for _ in range(count)]


def look(harness: Harness) -> None:
    harness.advance(SECOND_NS)
    harness.handle(events.Look())


def moving(harness: Harness) -> list[int]:
    found = harness.scheduler.snapshot(harness.clock.now_ns).clients
    return [client.client for client in found if client.moves_to]


def test_a_waiting_program_moves_to_the_idle_card() -> None:
    """Broken: two jobs share a card while another one is idle."""
    harness = two_gpus(rebalance=True)
    assert harness.scheduler.wants_looks
    _, waiting = crowd(harness)
    look(harness)
    assert moving(harness) == [waiting.client]
    on_the_way(harness, waiting, "saved")
    arrives(harness, waiting)
    assert waiting.granted() is not None
    assert "30s of the next minute" in shown(harness, waiting).moved_why
    look(harness)
    assert moving(harness) == []


def test_programs_that_slow_each_other_down_part() -> None:
    """Broken: two jobs that run at once, each at half its speed, share a card while another one is idle."""
    harness = two_gpus(rebalance=True, sharing=Sharing.CONCURRENT)
    first = Reporter(harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True))
    first.report()
    first.works(100)
    harness.client(mode=MemoryMode.SWAP, memory=SIZE, wanted=True)
    first.report()
    first.works(100)
    look(harness)
    assert moving(harness) == [], "it is as fast as alone"
    first.works(50)
    look(harness)
    assert moving(harness) == [first.client.client]


@pytest.mark.parametrize("crowded", [False, True])
def test_small_programs_are_packed_for_a_gang(crowded: bool) -> None:
    """Broken: a gang waits for its second GPU while small programs could share a third; or these get less."""
    harness = two_gpus(rebalance=True)
    third = "GPU-2"
    harness.gpu(third)
    uuids = [HOME, OTHER, OTHER, third, *([third] if crowded else [])]
    clients = [
        harness.client(attach=False, mode=MemoryMode.SWAP, gang="train" if number < 2 else "")
        for number in range(len(uuids))
    ]
    for client, uuid in zip(clients, uuids, strict=True):
        client.attach(uuid, wanted=True)
    look(harness)
    assert moving(harness) == ([] if crowded else [clients[2].client])


def test_one_at_a_time_and_not_again_at_once() -> None:
    """Broken: all leave at once, or one that cannot leave tries each second."""
    harness = two_gpus(rebalance=True)
    _, first, second = crowd(harness, 3)
    look(harness)
    (chosen,) = moving(harness)
    look(harness)
    assert moving(harness) == [chosen]
    client = first if chosen == first.client else second
    evicted(client)
    client.say(messages.ParkAnswer(False, "a stream is being captured"))
    look(harness)
    assert moving(harness) == [({first.client, second.client} - {chosen}).pop()]


def test_a_move_that_does_not_end_keeps_nobody_else() -> None:
    """Broken: one stopped program in the midst of its move ends rebalancing for all."""
    harness = two_gpus(drain_deadline_ns=60 * SECOND_NS)
    stopped = idle_client(harness)
    parked(harness, stopped)
    harness.gpu("GPU-2")
    migrate(harness, stopped, "GPU-2")
    assert shown(harness, stopped).parking == "waking", "and the driver does not answer"
    harness.handle(events.Set("rebalance", True))
    _, waiting = crowd(harness)
    look(harness)
    assert moving(harness) == [stopped.client]
    harness.advance(PATIENCE_NS)
    look(harness)
    assert moving(harness) == [stopped.client, waiting.client]


@pytest.mark.parametrize(
    "why", ["off", "occupied", "too large", "alone", "paused", "managed", "another model", "a slot"]
)
def test_who_stays(why: str) -> None:
    """Broken: programs move though it is not allowed, not possible, or no gain."""
    harness = one_gpu(rebalance=why != "off")
    harness.gpu(OTHER, capacity=(2 if why == "another model" else 1) << 30)
    if why == "occupied":
        there = harness.client(mode=MemoryMode.SWAP, attach=False)
        there.attach(OTHER, wanted=True)
    if why == "managed":
        for _ in range(2):
            harness.client(mode=MemoryMode.MANAGED, memory=SIZE, wanted=True)
    else:
        clients = crowd(harness, 1 if why == "alone" else 2, **({"group": "slot-1"} if why == "a slot" else {}))
    if why == "paused":
        harness.handle(events.Set("paused", True, client=clients[1].client))
    if why == "too large":
        gpu = harness.scheduler._node.gpus[HOME]
        gpu.switching.move_rate = 2 * SIZE / (30 * SECOND_NS)  # a minute for both ways
    look(harness)
    assert moving(harness) == []


def test_a_parked_program_does_not_occupy_a_card() -> None:
    """Broken: a notebook that is parked keeps waiting programs away from its card."""
    harness = two_gpus()
    parked = idle_client(harness)
    moved(harness, parked)
    harness.handle(events.Set("parked", True, client=parked.client))
    parked.say(messages.ParkAnswer(True))
    harness.handle(events.Saved(parked.client))
    harness.handle(events.Set("rebalance", True))
    _, waiting = crowd(harness)
    look(harness)
    assert moving(harness) == [waiting.client]
