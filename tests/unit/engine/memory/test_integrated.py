"""A GPU that has the host's memory: programs there and everything else of the host share one budget.

The machine has 1000 bytes, programs may have 750, and the host keeps 100.
"""

from __future__ import annotations

import pytest

from nvshare.coordinator.engine.memory.admission import FRESH_NS, HOST_WAIT_NS
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.registry import create
from tests.harness import GPU, Harness


def machine(*, integrated: bool = True) -> Harness:
    harness = Harness(create)
    harness.handle(events.GpuAdded(GPU, "GB10", 1000, 750, integrated=integrated))
    return harness


def figures(harness: Harness, used: int) -> None:
    """The host's memory in use, as it was asked for."""
    assert any(isinstance(command, commands.CheckMemory) for command in harness.commands), "nobody asked"
    harness.commands.clear()
    harness.handle(events.MemoryChecked(GPU, {}, used))


def test_growth_follows_the_figures_of_the_host() -> None:
    """Broken: a program takes memory that the host does not have, or each allocation waits for figures."""
    harness = machine()
    client = harness.client(mode=MemoryMode.DEVICE)
    client.ask_room(200)
    assert client.reserved() == [], "nothing is known of the host yet"
    figures(harness, 300)
    assert client.reserved() == [200]
    client.report(allocated=200, resident=200)
    assert client.reserve(600) == 600, "the figures are of this second"
    harness.advance(FRESH_NS)
    client.ask_room(601)
    assert client.reserved() == []
    figures(harness, 500)
    assert client.reserved() == [], "others have 300 of that, and the host keeps 100"
    figures(harness, 499)
    assert client.reserved() == [601]


def test_growth_waits_for_the_host_and_gets_what_becomes_free() -> None:
    """Broken: the second program freezes the host, or fails though the first one ends a moment later."""
    harness = machine()
    client = harness.client(mode=MemoryMode.DEVICE)
    client.ask_room(300)
    for _ in range(3):
        figures(harness, 700)
        assert client.reserved() == []
        harness.advance(HOST_WAIT_NS // 4)
    figures(harness, 600)
    assert client.reserved() == [300]


def test_growth_is_refused_at_the_end_of_its_wait() -> None:
    """Broken: a program waits for ever, or longer than its hook, which then allocates without room."""
    harness = machine()
    client, other = harness.client(mode=MemoryMode.DEVICE), harness.client(mode=MemoryMode.DEVICE)
    client.ask_room(300)
    figures(harness, 700)
    harness.advance(HOST_WAIT_NS - MILLISECOND_NS)
    figures(harness, 700)
    assert client.reserved() == []
    harness.advance(MILLISECOND_NS)
    assert client.reserved() == [0]
    (refused,) = harness.notifications("refused")
    assert (refused["why"], refused["bytes"]) == ("host memory", 300)
    assert harness.scheduler.refusal_snapshot(client.client, GPU).host_left_bytes == 200
    assert other.reserve(200) == 200


def test_figures_that_do_not_come_are_no_room() -> None:
    """Broken: a driver that hangs lets programs take what they want."""
    harness = machine()
    client = harness.client(mode=MemoryMode.DEVICE)
    client.ask_room(100)
    figures(harness, 1 << 62)
    assert client.reserved() == [], "as NVML's errors are told"
    harness.advance(HOST_WAIT_NS)
    assert client.reserved() == [0]


def test_the_capacity_still_holds() -> None:
    """Broken: an idle host gives programs more than the operator has allowed."""
    harness = machine()
    client = harness.client(mode=MemoryMode.DEVICE)
    assert client.reserve(751) == 0
    assert harness.notifications("refused")[-1]["why"] == "capacity"


def test_managed_memory_makes_no_room() -> None:
    """Broken: memory is moved within one memory, or counts as free because the driver could page it out."""
    harness = machine()
    managed = harness.client(mode=MemoryMode.MANAGED, resident=400)
    client = harness.client(mode=MemoryMode.DEVICE)
    client.ask_room(400)
    figures(harness, 450)
    assert client.reserved() == []
    assert not managed.take(messages.Target)
    client.ask_room(350)
    assert client.reserved() == [350]


@pytest.mark.parametrize("integrated", [False, True])
def test_nobody_is_parked_for_others(integrated: bool) -> None:
    """Broken: an idle program is copied within one memory, which makes no room and takes more of it."""
    harness = machine(integrated=integrated)
    idle = harness.client(mode=MemoryMode.SWAP, memory=100, wanted=True)
    assert idle.granted() is not None
    idle.release()
    harness.advance(3 * SECOND_NS)
    harness.handle(events.MemoryChecked(GPU, {}, 1000))
    harness.client(mode=MemoryMode.SWAP, memory=600, wanted=True)
    harness.handle(events.Look())
    found = harness.scheduler.client_snapshot(idle.client, harness.clock.now_ns)
    assert found is not None
    assert found.parking == ("running" if integrated else "leaving")


def test_an_operator_may_park_and_learns_that_it_makes_no_room() -> None:
    """Broken: an operator parks one program after the other and wonders why nothing changes."""
    harness = machine()
    client = harness.client(mode=MemoryMode.DEVICE)
    harness.handle(events.Set("parked", True, client=client.client))
    found = harness.scheduler.client_snapshot(client.client, harness.clock.now_ns)
    assert found is not None
    assert (found.parking, "no more room" in found.parking_why) == ("closing", True)
