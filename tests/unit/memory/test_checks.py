"""Reports of memory beside the driver's figures: which claims count.

Non-goals: how the figures are read (tests/end_to_end/test_failures.py).
"""

from __future__ import annotations

from functools import partial

from nvshare.coordinator.memory import checks
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import GPU, Harness, ScriptedClient, one_gpu

make_harness = partial(one_gpu, capacity=1000)


def answer(harness: Harness, by_client: dict[ScriptedClient, int], unlisted: int = 0) -> int:
    """Answers checks until none is asked for.  Returns the number of checks."""
    listed, count = {str(client.process_id): size for client, size in by_client.items()}, 0
    while any(isinstance(command, commands.CheckMemory) for command in harness.commands):
        harness.commands.clear()
        harness.handle(events.MemoryChecked(GPU, listed, unlisted))
        count += 1
        assert count < 10
    return count


def test_memory_that_is_only_reported_takes_no_room() -> None:
    """Broken: a program that reports the whole card has the others' allocations refused."""
    harness = make_harness()
    harness.client("liar", mode=MemoryMode.DEVICE, memory=1 << 47)
    honest = harness.client(mode=MemoryMode.DEVICE)
    assert honest.reserve(500) == 0
    answer(harness, {})
    assert honest.reserve(500) == 500


def test_pinned_memory_is_checked_too() -> None:
    """Broken: a program in mode `swap` that reports pinned memory leaves the others no room."""
    harness = make_harness()
    liar, honest = (harness.client(mode=MemoryMode.SWAP) for _ in range(2))
    liar.report(allocated=1000, resident=1000, pinned=1000)
    answer(harness, {liar: 60}, unlisted=40)
    assert liar.seat().memory.pinned_bytes == 100
    assert honest.take(messages.GpuSettings)[-1].room_bytes >= 890


def test_true_reports_count_whoever_is_listed() -> None:
    """Broken: a container's program, which the driver does not list, counts with nothing."""
    harness = make_harness()
    listed, unlisted = (harness.client(mode=MemoryMode.DEVICE, memory=400) for _ in range(2))
    assert answer(harness, {listed: 450}, unlisted=450) == 2, "the second one attached during the first check"
    assert [each.seat().memory.resident_bytes for each in (listed, unlisted)] == [400, 400]
    listed.report(allocated=420, resident=420)
    assert answer(harness, {}) == 0, "a check is asked for by reports of clearly more"


def test_a_report_under_way_is_no_lie() -> None:
    """Broken: memory that was freed just before the check, or allocated after it, has its program distrusted."""
    harness = make_harness()
    client = harness.client(mode=MemoryMode.DEVICE, memory=400)
    harness.handle(events.MemoryChecked(GPU, {str(client.process_id): 100}, 0))
    client.report(allocated=100, resident=100)
    harness.handle(events.MemoryChecked(GPU, {str(client.process_id): 100}, 0))
    client.report(allocated=900, resident=900)
    assert client.seat().memory.resident_bytes == 900


def test_what_a_hook_has_asked_for_is_no_lie() -> None:
    """Broken: after a restart a program that waits for an answer is accused; or who always asks is never found out."""
    harness = make_harness()
    harness.handle(events.GpuAdded("GPU-1", "", 1000, 1000, 7, None))
    client = harness.client(mode=MemoryMode.SWAP, attach=False)
    client.attach("GPU-1", memory=400)
    client.ask_room(450)
    assert not client.reserved(), "others may connect again"
    for _ in range(checks.PATIENT_CHECKS - 1):
        harness.handle(events.MemoryChecked("GPU-1", {str(client.process_id): 300}, 0))
    assert client.seat().memory.resident_bytes == 400
    harness.handle(events.MemoryChecked("GPU-1", {str(client.process_id): 300}, 0))
    assert client.seat().memory.resident_bytes == 300


def test_a_parked_program_is_not_accused() -> None:
    """Broken: the log says that an honest program reports what it has not, because the driver has it off the card."""
    harness = make_harness()
    client = harness.client(mode=MemoryMode.DEVICE, attach=False)
    client.say(messages.AttachGpu(0, GPU, 1000, 0, False, 400, 400, 400, True))
    answer(harness, {})
    assert not harness.logged("by the driver's figures")


def test_a_later_report_of_a_liar_counts_once_it_is_checked() -> None:
    """Broken: a liar says it again and again, or a program once in doubt never counts fully."""
    harness = make_harness()
    client = harness.client(mode=MemoryMode.DEVICE, memory=1000)
    answer(harness, {client: 0})
    assert harness.gpu_snapshot().memory.resident_bytes == 0
    client.report(allocated=1000, resident=1000)
    assert client.seat().memory.resident_bytes == 0
    answer(harness, {client: 600})
    assert client.seat().memory.resident_bytes == 600
    client.report(allocated=1000, resident=1000)
    answer(harness, {client: 1050})
    assert client.seat().memory.resident_bytes == 1000


def test_a_program_that_connects_again_and_again_takes_no_room() -> None:
    """Broken: a claim is never checked, because its connection ends before; or an honest one counts with nothing."""
    harness = make_harness()
    harness.handle(events.MemoryChecked(GPU, {}, 0))
    harness.client("liar", mode=MemoryMode.DEVICE, memory=1000).die()
    liar = harness.client("liar", mode=MemoryMode.DEVICE, memory=1000)
    assert liar.seat().memory.resident_bytes == 0
    other = harness.client(mode=MemoryMode.DEVICE)
    assert other.reserve(500) == 500
    modes = (MemoryMode.SWAP, MemoryMode.DEVICE)
    first, second = true = [harness.client(mode=mode, memory=200) for mode in modes]
    answer(harness, {first: 210, second: 210})
    assert [each.seat().memory.resident_bytes for each in (liar, *true)] == [0, 200, 200]
    for each in true:
        each.report(allocated=220, resident=220)
    assert [each.seat().memory.resident_bytes for each in true] == [220, 220], "they are believed from their check on"


def test_managed_memory_that_does_not_move_takes_no_room() -> None:
    """Broken: a program in mode `managed` that ignores targets keeps one in mode `swap` from running."""
    harness = make_harness(move_stall_ns=100 * MILLISECOND_NS)
    hangs, honest = harness.client(resident=1000), harness.client(mode=MemoryMode.SWAP)
    honest.request()
    honest.ask_room(500)
    assert hangs.told(), "it may move"
    harness.milliseconds(110)
    assert honest.reserved() == [500]
