"""Memory that cannot move: what is allowed, who does not fit beside it, and what becomes of them.

Non-goals: what other growth is allowed (test_admission.py, test_growth.py).
"""

from __future__ import annotations

from functools import partial

import pytest

from nvshare.coordinator.cli.views import sentences
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import RECONNECT_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness, ScriptedClient, one_gpu
from tests.unit.cli.replies import status

make_harness = partial(one_gpu, capacity=100)


def swapping(harness: Harness, memory: int, **more: int | str | bool) -> ScriptedClient:
    """A client in mode `swap` that has so much, all of it on the GPU if that fits."""
    return harness.client(mode=MemoryMode.SWAP, resident=0, host=memory, **more)  # type: ignore[arg-type]


def pins(client: ScriptedClient, total: int) -> int:
    """Immovable memory that the client may have after asking for so much."""
    client.ask_pins(total)
    (allowed,) = client.pins_reserved()
    return allowed


def settings(client: ScriptedClient) -> messages.GpuSettings:
    """The last settings that the client was sent."""
    return client.take(messages.GpuSettings)[-1]


def stuck(harness: Harness) -> tuple[ScriptedClient, ScriptedClient]:
    """`a`, whose hook asked nobody, has 60 immovable; `b` needs 70, and waits."""
    a, b = swapping(harness, 60), swapping(harness, 70)
    a.report(allocated=60, resident=60, pinned=60)
    b.request()
    return a, b


def test_pins_that_would_lock_somebody_out_are_refused() -> None:
    """Broken: nothing can be shared between processes in mode `swap`, or a program waits for ever for room that
    another's exported memory takes."""
    harness = make_harness()
    a, _ = swapping(harness, 60), swapping(harness, 70)
    assert pins(a, 20) == 20
    assert harness.gpu_snapshot().moves.refused_reservations == 0
    assert pins(a, 31) == 20
    assert harness.notifications("refused")[-1]["why"] == "pins"
    assert harness.gpu_snapshot().moves.refused_reservations == 1


def test_promised_pins_count_before_they_are_reported() -> None:
    """Broken: two programs that ask one after the other get more than there is."""
    harness = make_harness()
    a, c, _ = swapping(harness, 40), swapping(harness, 40), swapping(harness, 50)
    assert pins(a, 30) == 30
    assert pins(c, 30) == 0
    assert pins(c, 20) == 20


def test_a_promise_ends_with_the_lease() -> None:
    """Broken: pins that failed in the driver are counted for as long as their program lives."""
    harness = make_harness()
    a, c, _ = swapping(harness, 40), swapping(harness, 40), swapping(harness, 50)
    a.report(allocated=40, resident=40)
    a.request()
    assert a.granted()
    assert pins(a, 30) == 30
    a.release()
    assert pins(c, 30) == 30


def test_less_is_always_allowed() -> None:
    """Broken: a program that has given memory back is told to be out of it, or what it does not want is kept for it."""
    harness = make_harness()
    c = swapping(harness, 0)
    assert pins(c, 100) == 100
    assert pins(c, 0) == 0
    c.die()
    a, _ = stuck(harness)
    assert pins(a, 60) == 60
    a.report(allocated=60, resident=60, pinned=10)
    assert pins(a, 10) == 10


def test_what_may_be_allocated_counts() -> None:
    """Broken: room that a holder was promised for an allocation is given away to pins before it is reported."""
    harness = make_harness()
    a, b = swapping(harness, 30), swapping(harness, 20)
    b.report(allocated=20, resident=20)
    b.request()
    assert b.granted()
    assert b.reserve(80) == 80
    assert pins(a, 30) == 0


def test_pins_of_all_fit_the_card() -> None:
    """Broken: arrays of several programs are promised more memory than the card has."""
    harness = make_harness()
    a, b = swapping(harness, 0), swapping(harness, 0)
    assert pins(a, 70) == 70
    assert pins(b, 40) == 0
    assert harness.notifications("refused")[-1]["why"] == "capacity"


def test_device_memory_leaves_room_too() -> None:
    """Broken: a program in mode `device` locks one in mode `swap` out, which then waits for ever."""
    harness = make_harness()
    swapping(harness, 70)
    a = harness.client(mode=MemoryMode.DEVICE)
    assert a.reserve(31) == 0
    assert harness.notifications("refused")[-1]["why"] == "pins"
    assert a.reserve(30) == 30


def test_room_is_told() -> None:
    """Broken: programs allocate without a lease what can never be on the GPU."""
    harness = make_harness()
    a, b = swapping(harness, 60), swapping(harness, 0)
    told = settings(b)
    assert (told.room_bytes, told.ask_pins) == (100, True)
    pins(a, 60)
    assert settings(b).room_bytes == 40
    a.die()
    assert settings(b).room_bytes == 100


def test_who_does_not_fit_is_named() -> None:
    """Broken: a program that lacks room because another one's hook did not ask waits silently."""
    harness = make_harness()
    _, b = stuck(harness)
    assert b.seat().memory.lacking_bytes == 30
    assert harness.notifications("lacks_room")[0]["client"] == b.client
    assert harness.logged("c2 (process 1002) needs 70B, room for it is 40B; immovable: c1 (process 1001) 60B")


def test_a_client_without_memory_lacks_no_room() -> None:
    """Broken: a client that has nothing is unschedulable beside one that reports more than the card."""
    harness = make_harness()
    liar, idle = swapping(harness, 60), harness.client(mode=MemoryMode.SWAP)
    liar.report(allocated=160, resident=160, pinned=160)
    assert idle.seat().memory.lacking_bytes == 0


def test_a_client_that_lacks_room_is_unschedulable() -> None:
    """Broken: half of the turns go to a program that can do nothing with them."""
    harness = make_harness()
    a, b = stuck(harness)
    assert b.seat().memory.unschedulable
    a.request()
    assert a.granted(), "nobody else waits"
    harness.milliseconds(200)
    assert not a.take(messages.Revoke), "and no turn ends for it"
    (client,) = [client for client in status(harness)["clients"] if client["client"] == b.client]
    assert client["seats"][0]["unschedulable"] is True


def test_an_unschedulable_client_comes_back_with_the_room() -> None:
    """Broken: a program waits though there is room for it now."""
    harness = make_harness()
    a, b = stuck(harness)
    assert b.granted() is None
    a.report(allocated=10, resident=10)
    b.obeys()
    assert b.granted()
    assert not b.seat().memory.unschedulable


def test_a_death_and_a_pause_while_unschedulable() -> None:
    """Broken: the figures of who is shut out outlive them, or a pause puts them back into the line."""
    harness = make_harness()
    _, b = stuck(harness)
    harness.handle(events.Set("paused", True, client=b.client))
    harness.handle(events.Set("paused", False, client=b.client))
    assert b.granted() is None
    b.die()
    assert harness.timer_ns is None


def test_a_preempting_policy_sees_who_is_back() -> None:
    """Broken: who is let in again waits for the end of a turn that his rank would have ended."""
    harness = one_gpu(100, policy="priority")
    a, b = swapping(harness, 60), swapping(harness, 70, priority=5)
    a.report(allocated=60, resident=60, pinned=60)
    b.request()
    a.request()
    assert a.granted()
    a.report(allocated=20, resident=20)
    assert a.take(messages.Revoke)


@pytest.mark.parametrize("dies", [False, True])
def test_nothing_is_allowed_while_clients_may_be_missing(dies: bool) -> None:
    """Broken: after a restart of the coordinator room is given away that a client has who is not back yet; or a
    question that is not answered yet outlives its client."""
    harness = Harness(create)
    harness.gpu(capacity=100, next_lease_id=7)
    a = harness.client(mode=MemoryMode.SWAP, memory=60)
    a.ask_pins(60)
    assert not a.pins_reserved()
    harness.client(mode=MemoryMode.SWAP, memory=70)
    if dies:
        a.die()
    harness.advance(RECONNECT_NS)
    assert a.pins_reserved() == ([] if dies else [0])
    assert harness.timer_ns is None


def test_people_are_told_why() -> None:
    """Broken: `nvshare-ctl status` shows that a program waits, and not for what."""
    harness = make_harness()
    stuck(harness)
    (line,) = sentences.room_lines(status(harness))
    assert line.startswith("c2 (1002) needs 70B of GPU 0 and has room for 40B: it waits")
    assert "Immovable: c1 (1001) 60B" in line
