"""Reports of memory beside the driver's figures: which claims count.

Non-goals: how the figures are read (tests/end_to_end/test_failures.py).
"""

from __future__ import annotations

from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import GPU, Harness, ScriptedClient, one_gpu


def make_harness(**settings: int) -> Harness:
    """A coordinator that has just started, while nobody has memory."""
    harness = one_gpu(1000, **settings)
    harness.handle(events.MemoryChecked(GPU, {}, 0))
    return harness


def answer(harness: Harness, by_client: dict[ScriptedClient, int], unlisted: int = 0) -> int:
    """Answers looks until none is asked for.  Returns their number."""
    listed, count = {str(client.process_id): size for client, size in by_client.items()}, 0
    while any(isinstance(command, commands.CheckMemory) for command in harness.commands):
        harness.commands.clear()
        harness.handle(events.MemoryChecked(GPU, listed, unlisted))
        count += 1
        assert count < 10
    return count


def resident(*clients: ScriptedClient) -> list[int]:
    return [client.seat().memory.resident_bytes for client in clients]


def test_memory_that_is_only_reported_takes_no_room() -> None:
    """Broken: a program that reports the whole card, on any number of connections, has others' allocations refused."""
    harness = make_harness()
    harness.client(mode=MemoryMode.DEVICE, memory=1 << 47).die(process_lives=True)
    liar, honest = (harness.client(mode=MemoryMode.DEVICE, memory=size) for size in (1 << 47, 0))
    assert honest.reserve(600) == 600
    for size in (0, 700):
        liar.report(allocated=1000, resident=1000)
        answer(harness, {liar: size})
        assert resident(liar) == [size]


def test_memory_is_immovable_if_it_is_there() -> None:
    """Broken: a program in mode `swap` reports pinned memory, under a lease too, and leaves the others no room."""
    harness = make_harness()
    liar, honest = (harness.client(mode=MemoryMode.SWAP) for _ in range(2))
    liar.report(allocated=1000, resident=0)
    liar.request()
    liar.report(allocated=1000, resident=1000, pinned=1000)
    assert (liar.seat().memory.pinned_bytes, resident(liar)) == (0, [1000])
    answer(harness, {liar: 60}, unlisted=40)
    assert liar.seat().memory.pinned_bytes == 100
    assert honest.take(messages.GpuSettings)[-1].room_bytes >= 890


def test_true_reports_count_whoever_is_listed() -> None:
    """Broken: memory without a promise counts as nothing, or memory of a program that the driver does not list."""
    harness = make_harness()
    both = [harness.client(mode=MemoryMode.DEVICE, memory=400) for _ in range(2)]
    assert answer(harness, {both[0]: 450}, unlisted=450) == 2, "the second one attached during the first look"
    assert resident(*both) == [400, 400]
    both[0].report(allocated=420, resident=420)
    assert (resident(both[0]), answer(harness, {})) == ([420], 0), "the figures are there"


def test_figures_may_be_too_old() -> None:
    """Broken: memory that was allocated after the figures were read never counts, or its program is accused."""
    harness = make_harness()
    client = harness.client(mode=MemoryMode.DEVICE, memory=100)
    client.report(allocated=900, resident=900)
    for size in (100, 950):
        assert not harness.logged("by the driver's figures")
        harness.handle(events.MemoryChecked(GPU, {str(client.process_id): size}, 0))
    assert resident(client) == [900]


def test_a_parked_program_counts_with_what_is_on_the_card() -> None:
    """Broken: a program that the driver has off the card takes room there, or is accused; or it never counts again."""
    harness = make_harness()
    client = harness.client(mode=MemoryMode.DEVICE)
    client.reserve(400)
    client.report(allocated=400, resident=400)
    harness.handle(events.Set("parked", True, client=client.client))
    client.say(messages.ParkAnswer(True))
    for event, size in ((events.Saved(client.client, ""), 0), (events.Restored(client.client, ""), 400)):
        harness.handle(event)
        answer(harness, {client: size})
        assert resident(client) == [size]
        harness.handle(events.Set("parked", False, client=client.client))
    assert not harness.logged("by the driver's figures")


def test_a_program_that_connects_again_counts_with_what_it_had() -> None:
    """Broken: its memory is promised to others for as long as a look takes; or a new process has it too."""
    harness = make_harness()
    client = harness.client(mode=MemoryMode.DEVICE, process_id=77)
    client.reserve(700)
    client.die(process_lives=True)
    client = harness.client(mode=MemoryMode.DEVICE, process_id=77, memory=700)
    assert resident(client) == [700]
    client.die(process_lives=True)
    harness.handle(events.ProcessEnded(77))
    assert resident(harness.client(mode=MemoryMode.DEVICE, process_id=77, memory=700)) == [0]


def test_a_program_that_hangs_counts_with_what_it_has() -> None:
    """Broken: a program says that it has memory, moves none, and others wait for its room for ever."""
    harness = make_harness(move_stall_ns=100 * MILLISECOND_NS)
    liar = harness.client(mode=MemoryMode.SWAP, wanted=True)
    liar.report(allocated=1000, resident=0)
    liar.report(allocated=1000, resident=1000)
    liar.release()
    honest = harness.client(mode=MemoryMode.SWAP, resident=0, host=800)
    honest.request()
    harness.milliseconds(110)
    answer(harness, {})
    assert resident(liar) == [0]
    assert honest.reserve(800) == 800


def test_managed_memory_that_does_not_move_takes_no_room() -> None:
    """Broken: a program in mode `managed` that ignores targets keeps one in mode `swap` from running."""
    harness = make_harness(move_stall_ns=100 * MILLISECOND_NS)
    hangs, honest = harness.client(resident=1000), harness.client(mode=MemoryMode.SWAP)
    honest.request()
    honest.ask_room(500)
    assert hangs.told(), "it may move"
    harness.milliseconds(110)
    assert honest.reserved() == [500]
