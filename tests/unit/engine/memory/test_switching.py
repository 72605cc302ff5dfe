"""Targets at a switch: their course, and every way in which they fail."""

from __future__ import annotations

from functools import partial

import pytest

from nvshare.coordinator.model.events import ProcessEnded, Set
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import Harness, ScriptedClient, one_gpu

QUANTUM_MS = 100


make_harness = partial(one_gpu, capacity=100, move_deadline_ns=SECOND_NS)


def oversubscribed(idle_release_ns: int = 2 * MILLISECOND_NS) -> tuple[Harness, ScriptedClient, ScriptedClient]:
    """`a` has run with 60 of 100 bytes resident and gives way to `b`, which has 40 of its 60."""
    harness = make_harness(idle_release_ns=idle_release_ns)
    a = harness.client(wanted=True, resident=60)
    b = harness.client(resident=40, host=20)
    b.request()
    harness.milliseconds(QUANTUM_MS)
    a.release(wanted=True)
    return harness, a, b


def test_evict_then_restore_then_grant() -> None:
    """Broken: the next client would run before its memory is there, or memory move too early."""
    harness, a, b = oversubscribed()
    assert a.told() == [40], "the overflow leaves, not the working set"
    assert b.granted() is None
    assert harness.gpu_snapshot().leases.preparing == b.client
    assert not b.told(), "there is no room yet"
    a.comes_to(50, at_rest=False)
    (target,) = b.take(messages.Target)
    assert (target.bytes, target.rises) == (50, True), "what has left makes room at once"
    harness.milliseconds(5)
    a.obeys()
    (target,) = b.take(messages.Target)
    assert (target.bytes, target.rises) == (60, False)
    assert b.granted() is None
    harness.milliseconds(5)
    b.obeys()
    assert b.granted() is not None
    gpu = harness.gpu_snapshot()
    assert (gpu.memory.resident_bytes, gpu.moves.evicted_bytes, gpu.moves.restored_bytes) == (100, 20, 20)
    assert gpu.moves.moved_ns == 10 * MILLISECOND_NS
    assert harness.timer_ns is not None, "the quantum of b, for a waits"


def test_one_that_moves_less_is_passed_over() -> None:
    """Broken: a client that cannot move its memory would keep the next one from its turn."""
    harness = make_harness()
    a = harness.client(wanted=True, resident=60)
    b = harness.client(resident=20, host=20)
    c = harness.client(resident=20)
    b.request()
    harness.milliseconds(QUANTUM_MS)
    a.release(wanted=True)
    assert c.told() == [0], "who does not ask for the GPU is farthest away"
    c.comes_to(15, error=2)
    assert a.told() == [45], "what is still missing, from the next one"
    a.obeys()
    assert b.told() == [25, 40]
    b.obeys()
    assert b.granted() is not None
    assert harness.gpu_snapshot().moves.failed_orders == 1


def test_when_nobody_can_move_the_next_runs_with_what_there_is() -> None:
    """Broken: a failed eviction would stop the GPU."""
    _, a, b = oversubscribed()
    a.comes_to(60, error=999)
    assert not b.told(), "there is no room"
    assert b.granted() is not None


def test_a_failed_restoration_does_not_keep_the_client_from_running() -> None:
    """Broken: a client whose restoration fails would be asked for ever."""
    _, a, b = oversubscribed()
    a.obeys()
    assert b.told() == [60]
    b.comes_to(47, error=2)
    assert b.granted() is not None
    assert not b.told()


def test_a_dead_clients_memory_is_free() -> None:
    """Broken: invariant 6, the switch would wait for a dead client, or count its memory."""
    harness, a, b = oversubscribed()
    a.die()
    assert b.told() == [60]
    b.obeys()
    assert b.granted() is not None
    assert harness.gpu_snapshot().memory.resident_bytes == 60


def test_memory_of_a_process_that_ends_is_not_free_yet() -> None:
    """Broken: the next client's memory would come in before the driver has freed the old, and fail; or another client
    would be evicted for memory that is about to be free."""
    harness, a, b = oversubscribed()
    a.die(process_lives=True)
    harness.milliseconds(500)
    assert b.granted() is None
    assert not b.told(), "there is no room yet"
    harness.handle(ProcessEnded(a.process_id))
    assert b.told() == [60]
    b.obeys()
    assert b.granted() is not None


def test_a_client_that_connects_again_has_its_memory_once() -> None:
    """Broken: the memory of a client whose connection broke would be counted twice once it is back."""
    harness, a, b = oversubscribed()
    a.die(process_lives=True)
    back = harness.client(process_id=a.process_id, memory=60)
    assert back.told() == [40]
    back.obeys()
    assert b.told() == [60]


def test_a_client_whose_turn_was_taken_gives_its_room_back() -> None:
    """Broken: a client that gets no turn while its memory waits for room keeps what it has for ever, and others are out
    of memory."""
    harness, a, b = oversubscribed()
    a.comes_to(50, at_rest=False)
    b.comes_to(50)
    harness.handle(Set("paused", True, client=b.client))
    assert (a.told(), b.told()) == ([40, 50], [50, 40])
    a.comes_to(45, at_rest=False)
    a.comes_to(50)
    b.obeys()
    assert a.told() == [60]


@pytest.mark.parametrize("dies", [True, False])
def test_the_next_client_may_die_or_be_paused_while_memory_moves_for_it(dies: bool) -> None:
    """Broken: a paused client would be granted, or the GPU kept for it or for a dead one."""
    harness, a, b = oversubscribed()
    a.granted()
    if dies:
        b.die()
    else:
        harness.handle(Set("paused", True, client=b.client))
    assert harness.gpu_snapshot().leases.preparing == a.client, "a waited and is next"
    assert a.granted() is None, "but its memory is being moved"
    assert a.told() == [40, 60], "and b has taken nothing yet"
    a.obeys()
    assert a.granted() is not None
    if not dies:
        harness.handle(Set("paused", False, client=b.client))
        assert b.seat().phase == "waiting"


def test_a_move_that_takes_too_long_is_not_waited_for() -> None:
    """Broken: invariant 10 for memory: a client that does not move its memory would hang the others, or its late switch
    count as a cost and give all others turns of seconds."""
    harness, a, b = oversubscribed()
    assert a.told() == [40]
    a.comes_to(50, at_rest=False)
    harness.advance(SECOND_NS)
    assert b.granted() is not None
    assert harness.gpu_snapshot().moves.late_switches == 1
    assert harness.gpu_snapshot().rules.switch_cost_ns == 0
    assert harness.notifications("late") == [{"uuid": "GPU-0", "client": b.client}]
    a.obeys()
    assert a.seat().memory.resident_bytes == 40
    assert not a.told()


def test_device_memory_is_never_told_to_leave() -> None:
    """Broken: a client that cannot evict would be asked to."""
    harness = make_harness()
    a = harness.client(wanted=True, mode=messages.MemoryMode.DEVICE, memory=60)
    b = harness.client(resident=10, host=50)
    b.request()
    a.release(idle=True)
    assert not a.told()
    assert b.told() == [40]


def test_the_last_in_turn_order_gives_first() -> None:
    """Broken: under round robin, memory would be taken from the one that runs next."""
    harness = make_harness(capacity=90)
    a, b, c = (harness.client() for _ in range(3))
    a.report(allocated=45, resident=45)
    b.report(allocated=45, resident=0, host=45)
    c.report(allocated=45, resident=45)
    a.request()
    assert a.granted() is not None
    harness.milliseconds(QUANTUM_MS)
    b.request()  # the quantum is over: there is no time to move anything before the switch
    c.request()
    a.release(wanted=True)
    assert a.told() == [0], "a has just run, so its next turn is farthest away"
    assert not c.told()


def test_of_those_who_do_not_ask_the_longest_idle_gives_first() -> None:
    """Broken: memory would be taken from one that paused a moment ago, not from one that has been idle for hours."""
    harness = make_harness(capacity=90)
    recent = harness.client(resident=45)
    old = harness.client(memory=45)
    following = harness.client()
    recent.request()
    recent.release(idle=True)
    following.report(allocated=45, resident=0, host=45)
    following.request()
    assert old.told() == [0]
    assert not recent.told()


@pytest.mark.parametrize("idle_release_ns", [2 * MILLISECOND_NS, 0])
def test_idle_holders_keep_longer_what_is_dear_to_move(idle_release_ns: int) -> None:
    """Broken: a client that pauses for a moment would give up gigabytes and fetch them again, or one that should never
    give up its lease early would."""
    harness, a, b = oversubscribed(idle_release_ns)
    a.take(messages.GpuSettings)
    b.take(messages.GpuSettings)
    harness.milliseconds(100)
    a.obeys()
    b.obeys()
    told = b.take(messages.GpuSettings)
    if idle_release_ns:
        assert 100 <= told[-1].idle_release_ns / MILLISECOND_NS <= 200
    else:
        assert all(settings.idle_release_ns == 0 for settings in told)


def test_a_higher_priority_does_not_wait_for_the_memory_of_a_lower_one() -> None:
    """Broken: who comes while memory moves for a client of lower priority would wait for that, or a whole quantum."""
    harness = one_gpu(100, policy="priority")
    a = harness.client(wanted=True, resident=60)
    b = harness.client(resident=40, host=20)
    b.request()
    harness.milliseconds(QUANTUM_MS)
    a.release()
    high = harness.client(wanted=True, priority=9)
    assert high.granted() is not None
    a.obeys()
    high.release()
    b.obeys()
    assert b.granted() is not None


def test_a_client_that_hangs_is_not_waited_for() -> None:
    """Broken: one stopped process would keep everybody else from their turns, one deadline after the other."""
    harness = make_harness(move_stall_ns=100 * MILLISECOND_NS)
    a, b, stopped = harness.client(wanted=True, resident=50), harness.client(resident=20, host=30), harness.client()
    stopped.report(allocated=30, resident=30)
    harness.milliseconds(QUANTUM_MS)
    b.request()
    a.release(wanted=True)
    assert stopped.told() == [0]
    harness.milliseconds(60)
    stopped.comes_to(20, at_rest=False)
    assert b.told() == [30]
    b.obeys()
    harness.milliseconds(60)
    assert not a.told(), "it has been heard of"
    stopped.report(allocated=30, resident=20, host=10)
    harness.milliseconds(60)
    assert a.told() == [30], "it says something, and moves nothing: from another one instead"
    a.obeys()
    b.obeys()
    assert b.granted() is not None
    assert harness.gpu_snapshot().moves.failed_orders == stopped.seat().moves.failed_orders == 1
    assert harness.logged("does not move its memory")
    assert [note["client"] for note in harness.notifications("stalled")] == [stopped.client]
    stopped.obeys()
    assert stopped.seat().memory.resident_bytes == 0, "what it does later still counts"


def test_a_next_client_that_hangs_gets_its_turn_and_its_deadline() -> None:
    """Broken: the GPU would wait for memory of a process that does not move it."""
    harness = make_harness(move_stall_ns=100 * MILLISECOND_NS)
    a = harness.client(resident=20, host=40)
    a.request()
    assert a.told()
    harness.milliseconds(110)
    assert a.granted() is not None


def test_figures_do_not_exceed_the_card() -> None:
    """Broken: two programs in mode `managed` are shown with more on the card than it has, though the driver pages."""
    harness = make_harness()
    clients = [harness.client(mode=MemoryMode.MANAGED, wanted=not number) for number in range(3)]
    for each in clients:
        each.report(allocated=70, resident=70)
    snapshot = harness.scheduler.snapshot(harness.clock.now_ns)
    figures = [(seat.memory.resident_bytes, seat.memory.evicted_bytes) for c in snapshot.clients for seat in c.seats]
    assert clients[0].granted() is not None
    assert figures == [(70, 0), (0, 70), (30, 40)], "first the holder's, whose pages come in"
    assert harness.gpu_snapshot().memory.resident_bytes == 100
