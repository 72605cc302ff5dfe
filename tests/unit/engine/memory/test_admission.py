"""Which growth of memory is allowed."""

from __future__ import annotations

from functools import partial

from nvshare.coordinator.model import events
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import ScriptedClient, one_gpu

make_harness = partial(one_gpu, capacity=100)


def test_device_memory_of_all_clients_fits_the_card() -> None:
    """Broken: admitted allocations would fail in the driver, or push out others' memory."""
    harness = make_harness()
    a = harness.client(mode=MemoryMode.DEVICE)
    b = harness.client(mode=MemoryMode.DEVICE)
    assert a.reserve(70) == 70
    assert b.reserve(31) == 0
    assert b.reserve(30) == 30
    assert harness.gpu_snapshot().moves.refused_reservations == 1
    assert harness.notifications("refused")[0]["why"] == "capacity"
    a.die()
    assert b.reserve(100) == 100


def test_pinned_memory_of_movable_clients_counts() -> None:
    """Broken: memory that cannot move would be promised to somebody else."""
    harness = make_harness()
    a = harness.client()
    a.report(allocated=80, resident=80, pinned=40)
    b = harness.client(mode=MemoryMode.DEVICE)
    assert b.reserve(61) == 0
    b.ask_room(60)
    a.obeys()
    assert b.reserved() == [60]


def test_movable_memory_is_admitted_beyond_capacity() -> None:
    """Broken: no oversubscription."""
    harness = make_harness()
    a = harness.client()
    b = harness.client()
    assert a.reserve(90) == 90
    assert b.reserve(500) == 500


def test_only_device_mode_must_ask() -> None:
    """Broken: each allocation of a managed client would wait for an answer."""
    harness = make_harness()
    a = harness.client()
    b = harness.client(mode=MemoryMode.DEVICE)
    assert [s.reserve for s in a.take(messages.GpuSettings)][-1] is False
    assert [s.reserve for s in b.take(messages.GpuSettings)][-1] is True


def test_the_limit_of_the_hello_holds() -> None:
    """Broken: `--gpu-memory-limit` would be ignored."""
    harness = make_harness()
    a = harness.client(limit=50, mode=MemoryMode.DEVICE)
    (told,) = a.take(messages.GpuSettings)
    assert told.memory_limit_bytes == 50
    assert a.reserve(51) == 0
    assert harness.notifications("refused")[0]["why"] == "limit"


def test_what_a_reconnecting_client_has_is_reserved() -> None:
    """Broken: after a restart of the coordinator the card would be promised twice."""
    harness = make_harness()
    harness.client(mode=MemoryMode.DEVICE, memory=80)
    b = harness.client(mode=MemoryMode.DEVICE)
    assert b.reserve(21) == 0


def test_impossible_figures_are_bounded() -> None:
    """Broken: a client's report of 2**64 - 1 bytes would upset the sums for everybody."""
    harness = make_harness()
    a = harness.client()
    a.report(allocated=5, resident=(1 << 64) - 1, pinned=(1 << 64) - 1)
    gpu = harness.gpu_snapshot()
    assert (gpu.memory.allocated_bytes, gpu.memory.resident_bytes, gpu.memory.pinned_bytes) == (5, 5, 5)
    a.die()
    assert harness.gpu_snapshot().memory.resident_bytes == 0


def test_a_report_counts_up_to_what_the_client_may_have() -> None:
    """Broken: a program with a limit, or a slot of several, reports the whole GPU, and others find no room."""
    harness = make_harness()
    limited = harness.client(mode=MemoryMode.DEVICE, limit=20)
    slot = [harness.client(mode=MemoryMode.DEVICE, limit=30, group="slot") for _ in range(2)]
    for client in (limited, *slot):
        client.report(allocated=1 << 47, resident=1 << 47, pinned=1 << 47)
    assert harness.gpu_snapshot().memory.resident_bytes == 50
    assert harness.client(mode=MemoryMode.DEVICE).reserve(50) == 50
    attached = harness.client(mode=MemoryMode.DEVICE, limit=10, memory=95)
    assert attached.seat().memory.reserved_bytes == 10, "also by its word as it connects"
    attached.die()
    harness.handle(events.Set("limit", 10, client=limited.client))
    limited.report(allocated=20, resident=20)
    assert limited.seat().memory.resident_bytes == 20, "what it has stays when its limit falls"


def test_programs_of_a_slot_are_told_what_the_others_have() -> None:
    """Broken: a program is told that its slot's whole limit is free, and cannot have it."""
    harness = make_harness()
    a, b = (harness.client(mode=MemoryMode.DEVICE, limit=60, group="slot") for _ in range(2))
    assert a.reserve(40) == 40
    assert b.take(messages.GpuSettings)[-1].slot_bytes == 40
    assert b.reserve(20) == 20
    assert a.reserve(10) == 10, "what is given back counts no more"
    assert b.take(messages.GpuSettings)[-1].slot_bytes == 10
    a.die()
    assert b.take(messages.GpuSettings)[-1].slot_bytes == 0


def test_what_one_of_a_slot_waits_for_counts_for_the_others() -> None:
    """Broken: two programs of a slot wait for room, and are both given what is left of its limit."""
    harness = make_harness()
    for _ in range(3):
        harness.client(mode=MemoryMode.SWAP, memory=30)
    a, b = (harness.client(mode=MemoryMode.DEVICE, limit=60, group="slot") for _ in range(2))
    a.ask_room(40)
    assert not a.reserved(), "others are evicted"
    b.ask_room(25)
    assert (b.reserved(), b.targets[0].by_limit) == ([0], True)


def test_a_reserve_that_is_given_back_is_another_ones_room() -> None:
    """Broken: what a program has reserved in advance and does not use is kept from others for its life."""
    harness = make_harness()
    a, b = (harness.client(mode=MemoryMode.DEVICE) for _ in range(2))
    assert a.reserve(64) == 64
    assert b.reserve(90) == 0
    assert a.reserve(1) == 1
    assert b.reserve(90) == 90


def test_a_refusal_names_the_limit() -> None:
    """Broken: a program that its slot's limit refuses cannot say why, or one on a full card blames its limit."""
    harness = make_harness()
    a, b = (harness.client(mode=MemoryMode.DEVICE, limit=60, group="slot") for _ in range(2))
    alone = harness.client(mode=MemoryMode.DEVICE, limit=90)
    assert [[s.limit_of_slot for s in each.take(messages.GpuSettings)][-1] for each in (a, b, alone)] == [
        True,
        True,
        False,
    ]
    assert a.reserve(40) == 40

    def refused(client: ScriptedClient, total: int) -> bool:
        client.ask_room(total)
        assert client.reserved() == [0]
        return client.targets[0].by_limit

    assert refused(b, 30)
    assert refused(alone, 91)
    assert not refused(alone, 70)
