"""Memory that cannot move: what is allowed, who does not fit beside it, and what becomes of them.

May not go here: what other growth is allowed (test_admission.py, test_growth.py).
"""

from __future__ import annotations

from typing import Any

from nvshare.coordinator.cli import ctl_view
from nvshare.coordinator.daemon.control_server import plain
from nvshare.coordinator.engine.scheduler import Settings
from nvshare.coordinator.model import events
from nvshare.coordinator.model.state import SETTLE_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.simulation.harness import Desk, ScriptedClient
from nvshare.scheduler_policies.registry import create


def make_desk() -> Desk:
    """One GPU of 100 bytes, every check on."""
    desk = Desk(create, Settings(check_invariants=True))
    desk.gpu(capacity=100)
    return desk


def swapping(desk: Desk, memory: int, **more: int | str | bool) -> ScriptedClient:
    """A client in mode `swap` that has so much, all of it on the GPU if that fits."""
    client = desk.client(mode=MemoryMode.SWAP, **more)  # type: ignore[arg-type]
    client.report(allocated=memory, resident=0, host=memory)
    return client


def pins(client: ScriptedClient, total: int) -> int:
    """What it may have immovable after asking for so much."""
    client.desk.handle(events.PinsAsked(client.client, 0, 9, total))
    (answer,) = client.take(messages.PinsReserved)
    assert answer.sequence == 9
    return answer.bytes


def settings(client: ScriptedClient) -> messages.GpuSettings:
    """What it was told last."""
    return client.take(messages.GpuSettings)[-1]


def stuck(desk: Desk) -> tuple[ScriptedClient, ScriptedClient]:
    """`a`, whose hook asked nobody, has 60 immovable; `b` needs 70, and waits."""
    a, b = swapping(desk, 60), swapping(desk, 70)
    a.report(allocated=60, resident=60, pinned=60)
    b.request()
    return a, b


def test_pins_that_leave_room_are_allowed() -> None:
    """Broken: nothing can be shared between processes in mode `swap`."""
    desk = make_desk()
    a, _ = swapping(desk, 60), swapping(desk, 70)
    assert pins(a, 30) == 30
    assert desk.sight().refused_reservations == 0


def test_pins_that_would_lock_somebody_out_are_refused() -> None:
    """Broken: a program waits for ever for room that another's exported memory takes."""
    desk = make_desk()
    a, _ = swapping(desk, 60), swapping(desk, 70)
    assert pins(a, 20) == 20
    assert pins(a, 31) == 20
    assert desk.notes("refused")[-1]["why"] == "pins"
    assert desk.sight().refused_reservations == 1


def test_promised_pins_count_before_they_are_reported() -> None:
    """Broken: two programs that ask one after the other get more than there is."""
    desk = make_desk()
    a, c, _ = swapping(desk, 40), swapping(desk, 40), swapping(desk, 50)
    assert pins(a, 30) == 30
    assert pins(c, 30) == 0
    assert pins(c, 20) == 20


def test_a_promise_ends_with_the_lease() -> None:
    """Broken: pins that failed in the driver are counted for as long as their program lives."""
    desk = make_desk()
    a, c, _ = swapping(desk, 40), swapping(desk, 40), swapping(desk, 50)
    a.report(allocated=40, resident=40)
    a.request()
    assert a.granted()
    assert pins(a, 30) == 30
    a.release()
    assert pins(c, 30) == 30


def test_less_is_always_allowed() -> None:
    """Broken: a program that has given memory back is told to be out of it, or what it does not want is kept for it."""
    desk = make_desk()
    c = swapping(desk, 0)
    assert pins(c, 100) == 100
    assert pins(c, 0) == 0
    c.die()
    a, _ = stuck(desk)
    assert pins(a, 60) == 60
    a.report(allocated=60, resident=60, pinned=10)
    assert pins(a, 10) == 10


def test_what_may_be_allocated_counts() -> None:
    """Broken: room that a holder was promised for an allocation is given away to pins before it is reported."""
    desk = make_desk()
    a, b = swapping(desk, 30), swapping(desk, 20)
    b.report(allocated=20, resident=20)
    b.request()
    assert b.granted()
    assert b.reserve(80) == 80
    assert pins(a, 30) == 0


def test_pins_of_all_fit_the_card() -> None:
    """Broken: arrays of several programs are promised more memory than the card has."""
    desk = make_desk()
    a, b = swapping(desk, 0), swapping(desk, 0)
    assert pins(a, 70) == 70
    assert pins(b, 40) == 0
    assert desk.notes("refused")[-1]["why"] == "capacity"


def test_device_memory_leaves_room_too() -> None:
    """Broken: a program in mode `device` locks one in mode `swap` out, which then waits for ever."""
    desk = make_desk()
    swapping(desk, 70)
    a = desk.client(mode=MemoryMode.DEVICE)
    assert a.reserve(31) == 0
    assert desk.notes("refused")[-1]["why"] == "pins"
    assert a.reserve(30) == 30


def test_room_is_told() -> None:
    """Broken: programs allocate without a lease what can never be on the GPU."""
    desk = make_desk()
    a, b = swapping(desk, 60), swapping(desk, 0)
    told = settings(b)
    assert (told.room_bytes, told.ask_pins) == (100, True)
    pins(a, 60)
    assert settings(b).room_bytes == 40
    a.die()
    assert settings(b).room_bytes == 100


def test_who_does_not_fit_is_named() -> None:
    """Broken: a program that lacks room because an older hook asked nobody waits silently."""
    desk = make_desk()
    _, b = stuck(desk)
    assert b.seat().lacking_bytes == 30
    assert desk.notes("lacks_room")[0]["client"] == b.client
    assert desk.logged("c2 (process 1002) needs 70B, room for it is 40B; immovable: c1 (process 1001) 60B")


def test_who_lacks_room_is_shut_out() -> None:
    """Broken: half of the turns go to a program that can do nothing with them."""
    desk = make_desk()
    a, b = stuck(desk)
    assert b.seat().shut_out
    a.request()
    assert a.granted(), "nobody else waits"
    desk.milliseconds(200)
    assert not a.take(messages.Revoke), "and no turn ends for it"
    (client,) = [client for client in _status(desk)["clients"] if client["client"] == b.client]
    assert client["seats"][0]["shut_out"] is True


def test_who_is_shut_out_comes_back_with_the_room() -> None:
    """Broken: a program waits though there is room for it now."""
    desk = make_desk()
    a, b = stuck(desk)
    assert b.granted() is None
    a.report(allocated=10, resident=10)
    (restore,) = b.take(messages.Restore)
    b.moved(restore.order_id, 30)
    assert b.granted()
    assert not b.seat().shut_out


def test_a_death_and_a_pause_while_shut_out() -> None:
    """Broken: the figures of who is shut out outlive them, or a pause puts them back into the line."""
    desk = make_desk()
    _, b = stuck(desk)
    desk.handle(events.Paused(b.client))
    desk.handle(events.Resumed(b.client))
    assert b.granted() is None
    b.die()
    assert desk.timer_ns is None


def test_a_preempting_policy_sees_who_is_back() -> None:
    """Broken: who is let in again waits for the end of a turn that his rank would have ended."""
    desk = Desk(create, Settings(check_invariants=True, policy="priority"))
    desk.gpu(capacity=100)
    a, b = swapping(desk, 60), swapping(desk, 70, priority=5)
    a.report(allocated=60, resident=60, pinned=60)
    b.request()
    a.request()
    assert a.granted()
    a.report(allocated=20, resident=20)
    assert a.take(messages.Revoke)


def test_nothing_is_allowed_while_clients_may_be_missing() -> None:
    """Broken: after a restart of the coordinator room is given away that a client has who is not back yet."""
    desk = Desk(create, Settings(check_invariants=True))
    desk.gpu(capacity=100, next_lease_id=7)
    a = desk.client(mode=MemoryMode.SWAP, memory=60)
    desk.handle(events.PinsAsked(a.client, 0, 9, 60))
    assert not a.take(messages.PinsReserved)
    desk.client(mode=MemoryMode.SWAP, memory=70)
    desk.advance(SETTLE_NS)
    (answer,) = a.take(messages.PinsReserved)
    assert (answer.sequence, answer.bytes) == (9, 0)


def test_who_asked_may_die() -> None:
    """Broken: a question that is not answered yet outlives its client."""
    desk = Desk(create, Settings(check_invariants=True))
    desk.gpu(capacity=100, next_lease_id=7)
    a = desk.client(mode=MemoryMode.SWAP, memory=60)
    desk.handle(events.PinsAsked(a.client, 0, 9, 60))
    a.die()
    desk.advance(SETTLE_NS)
    assert desk.timer_ns is None


def test_people_are_told_why() -> None:
    """Broken: `nvshare-ctl status` shows that a program waits, and not for what."""
    desk = make_desk()
    stuck(desk)
    (line,) = ctl_view.room_lines(_status(desk))
    assert line.startswith("c2 (1002) needs 70B of GPU 0 and has room for 40B: it waits")
    assert "Immovable: c1 (1001) 60B" in line


def _status(desk: Desk) -> dict[str, Any]:
    """As `nvshare-ctl status --json` has it."""
    picture = desk.scheduler.snapshot(desk.clock.now_ns)
    gpus = [{**plain(gpu), "index": index} for index, gpu in enumerate(picture.gpus)]
    return {"now_ns": picture.now_ns, "gpus": gpus, "clients": [plain(client) for client in picture.clients]}
