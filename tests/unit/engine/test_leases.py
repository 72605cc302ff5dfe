"""The life of a lease: each transition, and that time and waiters have the effect that they should."""

from __future__ import annotations

import pytest

from nvshare.coordinator.engine.scheduler import OverdueAction
from nvshare.coordinator.model.commands import Kill, RecordLease
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from tests.harness import GPU, contended, one_gpu, play_turn

QUANTUM_MS = 100


def test_a_program_alone_is_granted_at_once_and_never_interrupted() -> None:
    """Broken: a process alone waits for something or is interrupted, or a gate opens before its budget is known."""
    harness, a = contended(1)
    kinds = [type(message) for message in a.inbox]
    assert kinds == [messages.Welcome, messages.GpuSettings, messages.GpuSettings, messages.Grant]
    (grant,) = a.take(messages.Grant)
    assert (grant.lease_id, grant.waiters) == (1, 0)
    assert harness.timer_ns is None, "nothing is due, so nothing may poll"
    harness.advance(3600 * SECOND_NS)
    assert not a.take(messages.Revoke)


def test_the_quantum_counts_from_the_grant() -> None:
    """Broken: a holder would be cut short, or keep others waiting longer than its quantum."""
    harness, a = contended(1)
    harness.milliseconds(40)
    b = harness.client(wanted=True)
    (waiters,) = a.take(messages.Waiters)
    assert waiters.waiters == 1
    harness.milliseconds(59)
    assert not a.take(messages.Revoke)
    harness.milliseconds(1)
    (revoke,) = a.take(messages.Revoke)
    assert revoke.lease_id == 1
    assert b.granted() is None, "not before the other has released"
    a.release(wanted=True)
    grant = b.granted()
    assert grant is not None
    assert (grant.lease_id, grant.waiters) == (2, 1)


def test_waiters_are_told_when_contention_ends() -> None:
    """Broken: a holder would stay paced and release early for nobody."""
    harness, a, b = contended()
    assert [message.waiters for message in a.take(messages.Waiters)] == [1]
    c = harness.client(wanted=True)
    assert not a.take(messages.Waiters), "from one to two is no news"
    b.die()
    assert not a.take(messages.Waiters)
    c.die()
    assert [message.waiters for message in a.take(messages.Waiters)] == [0]
    assert harness.timer_ns is None


@pytest.mark.parametrize("wanted", [False, True])
def test_an_idle_release_hands_over_without_a_revocation(wanted: bool) -> None:
    """Broken: early release would not pass the GPU on, or one that is also a request would keep it from the others."""
    harness, a, b = contended()
    a.release(idle=True, wanted=wanted)
    assert b.granted() is not None
    assert harness.gpu_snapshot().statistics.idle_releases == 1
    assert harness.gpu_snapshot().statistics.revokes == 0
    assert a.seat().phase == ("waiting" if wanted else "idle")


def test_a_request_that_crosses_a_grant_or_a_revocation_says_nothing_new() -> None:
    """Broken: a client would be granted again what it gave back for good."""
    harness, a = contended(1)
    a.request()
    assert a.seat().phase == "holding"
    b = harness.client(wanted=True)
    b.request()
    assert harness.gpu_snapshot().leases.waiting == 1
    harness.milliseconds(QUANTUM_MS)
    a.request()
    a.release(wanted=False)
    assert a.seat().phase == "idle"


def test_an_idle_release_that_crosses_the_revocation_is_accepted() -> None:
    """Broken: an honest client would be cut off for a race."""
    harness, a, b = contended()
    harness.milliseconds(QUANTUM_MS)
    a.release(idle=True)
    assert b.granted() is not None
    assert harness.gpu_snapshot().statistics.idle_releases == 0, "it was asked to, so this was no early release"


@pytest.mark.parametrize("draining", [False, True])
def test_a_dead_holders_lease_is_free_at_once(draining: bool) -> None:
    """Broken: invariant 6, a SIGKILL would block the GPU, or the deadline of a drain would have to pass first."""
    harness, a, b = contended()
    if draining:
        harness.milliseconds(QUANTUM_MS)
        assert a.seat().phase == "revoking"
    a.die()
    assert b.granted() is not None
    assert harness.timer_ns is None
    assert harness.gpu_snapshot().clients == 1


def test_a_dead_waiter_is_granted_nothing() -> None:
    """Broken: a lease would go to nobody, and the GPU stand still."""
    _, a, b, c = contended(3)
    b.die()
    a.release()
    assert c.granted() is not None


def test_each_gpu_has_its_own_lease() -> None:
    """Broken: work on one GPU would wait for another GPU."""
    harness = one_gpu()
    harness.gpu("GPU-1")
    a = harness.client(wanted=True)
    b = harness.client(attach=False)
    b.attach("GPU-1", gpu=3, wanted=True)
    assert a.granted() is not None
    grant = b.granted()
    assert grant is not None
    assert grant.gpu == 3, "messages use the client's own ordinal"


def test_the_journal_follows_the_lease() -> None:
    """Broken: a restarted coordinator waits for the wrong process or for none, or two processes hold the GPU after a
    crash between a record and its grant."""
    harness, a, b = contended()
    kinds = [type(c) if not hasattr(c, "message") else type(c.message) for c in harness.commands]
    assert kinds.index(RecordLease) < kinds.index(messages.Grant)
    a.release(idle=True)
    b.release(idle=True)
    records = [(c.lease_id, c.process_id) for c in harness.commands if isinstance(c, RecordLease)]
    assert records == [(1, a.process_id), (2, b.process_id), (2, 0)], "once for each hand-over"


def test_a_drain_past_its_deadline_lets_others_on() -> None:
    """Broken: invariant 10, a hung client would hang the others."""
    harness, a, b, c = contended(3, drain_deadline_ns=SECOND_NS)
    harness.milliseconds(QUANTUM_MS + 999)
    assert b.granted() is None
    harness.milliseconds(1)
    assert b.granted() is not None
    assert harness.gpu_snapshot().statistics.overdue == 1
    assert harness.notifications("overdue")[0]["client"] == a.client
    harness.milliseconds(QUANTUM_MS)
    b.release(wanted=True)
    assert c.granted() is not None, "the others take turns beside it"
    a.release(wanted=True)
    assert a.seat().phase == "waiting", "back in order when it comes to itself"


def test_a_long_drain_is_its_owners_debt() -> None:
    """Broken: a user whose programs never give a lease back takes nearly all of the others' time."""
    harness = one_gpu(drain_deadline_ns=10 * SECOND_NS)
    honest = harness.client(wanted=True, user_id=1)
    honest_ns = 0
    for _ in range(20):  # each of them takes one turn and is never heard of again
        harness.client(wanted=True, user_id=2)
    for _ in range(100_000 // QUANTUM_MS):
        if honest.seat().phase == "revoking":
            honest.release(wanted=True)
        honest_ns += (honest.seat().phase == "holding") * QUANTUM_MS * MILLISECOND_NS
        harness.milliseconds(QUANTUM_MS)
    assert honest_ns >= 45 * SECOND_NS, "half of the time, less the first turn"


def test_a_debt_holds_back_all_clients_of_its_owner_and_ends() -> None:
    """Broken: another connection of the same user has the next turn, or a debt that is paid excludes a program."""
    harness = one_gpu(drain_deadline_ns=SECOND_NS)
    late = harness.client(wanted=True, user_id=2)
    others = [harness.client(wanted=True, user_id=user) for user in (1, 3)]
    mate = harness.client(wanted=True, user_id=2)
    harness.milliseconds(QUANTUM_MS + 500)
    late.release()
    began_ns, turns = harness.clock.now_ns, 0
    while mate.granted() is None:
        turns += play_turn(harness) in [other.client for other in others]
    waited_ms = (harness.clock.now_ns - began_ns) / MILLISECOND_NS
    assert 2 * 400 <= waited_ms <= 2 * 400 + QUANTUM_MS, "400 ms more than a quantum, for each of the others"
    assert turns >= 8
    late.take(messages.Grant)
    late.request()
    for client in (mate, *others):
        client.die()
    assert late.granted() is not None


def test_a_debtor_runs_while_nobody_else_wants_the_gpu() -> None:
    """Broken: a program whose kernels are long leaves the GPU idle."""
    harness = one_gpu(drain_deadline_ns=SECOND_NS)
    late = harness.client(wanted=True, user_id=2)
    other = harness.client(wanted=True, user_id=1)
    harness.milliseconds(QUANTUM_MS + 900)
    late.take(messages.Grant)
    late.release(wanted=True)
    assert late.granted() is None
    other.release(idle=True)
    assert late.granted() is not None


def test_a_late_client_must_fit_beside_what_cannot_move() -> None:
    """Broken: a client in device mode would be let on a card that is full of a hung client's memory."""
    harness = one_gpu(drain_deadline_ns=SECOND_NS)
    a = harness.client(wanted=True, mode=messages.MemoryMode.SWAP, memory=1 << 29)
    big = harness.client(wanted=True, mode=messages.MemoryMode.DEVICE, memory=(1 << 29) + 1)
    small = harness.client(wanted=True, mode=messages.MemoryMode.DEVICE, memory=1)
    harness.milliseconds(QUANTUM_MS + 1000)
    assert big.granted() is None
    assert small.granted() is not None
    small.release()
    assert big.granted() is None
    a.die()
    assert big.granted() is not None


def test_a_release_that_says_not_drained_counts_as_overdue_once() -> None:
    """Broken: work that still runs would be taken for finished, or counted twice."""
    harness, a, b = contended(drain_deadline_ns=SECOND_NS)
    harness.milliseconds(QUANTUM_MS + 500)
    a.release(drained=False)
    assert b.granted() is not None
    assert harness.gpu_snapshot().statistics.overdue == 1


def test_demotion_lasts_until_a_release_in_time() -> None:
    """Broken: the action `demote` would do nothing, or never end."""
    harness, a, b = contended(drain_deadline_ns=SECOND_NS, overdue_action=OverdueAction.DEMOTE)
    harness.milliseconds(QUANTUM_MS + 1000)
    a.take(messages.Grant)
    a.release(wanted=True)
    c = harness.client(wanted=True)
    b.take(messages.Grant)
    b.release(wanted=True)
    assert c.granted() is not None, "the demoted waits though its turn had come"
    c.release()
    assert b.granted() is not None
    b.release()
    assert a.granted() is not None, "nobody else waits"
    assert a.seat().turn.demoted
    a.release(idle=True)
    assert not a.seat().turn.demoted


def test_the_action_kill_names_the_process() -> None:
    """Broken: the action `kill` would do nothing, or hit another."""
    harness, a, _ = contended(drain_deadline_ns=SECOND_NS, overdue_action=OverdueAction.KILL)
    harness.milliseconds(QUANTUM_MS + 1000)
    (kill,) = [c for c in harness.commands if isinstance(c, Kill)]
    assert (kill.client, kill.process_id) == (a.client, a.process_id)


def test_times_and_counts_add_up() -> None:
    """Broken: status and metrics would show what did not happen."""
    harness, a = contended(1)
    harness.milliseconds(10)
    b = harness.client(wanted=True)
    harness.milliseconds(90)
    harness.milliseconds(5)
    revoked_ns = harness.clock.now_ns - 5 * MILLISECOND_NS
    a.release(wanted=True, drain_ns=4 * MILLISECOND_NS)
    harness.milliseconds(1)
    b.release(idle=True, opened_at_ns=harness.clock.now_ns - MILLISECOND_NS)
    seat = a.seat()
    assert seat.statistics.used_ns == 105 * MILLISECOND_NS
    assert seat.statistics.revokes == 1
    assert b.seat().statistics.max_wait_ns == 95 * MILLISECOND_NS
    gpu = harness.gpu_snapshot()
    assert (gpu.statistics.grants, gpu.statistics.handovers) == (3, 2)
    assert gpu.statistics.held_ns == 106 * MILLISECOND_NS
    assert gpu.leases.recent_drains_ns == (4 * MILLISECOND_NS,)
    assert gpu.leases.recent_handovers_ns == (MILLISECOND_NS,), f"from {revoked_ns} + drain to the opening of the gate"


@pytest.mark.parametrize("opened_at_ns", [0, 1, (1 << 64) - 1])
def test_impossible_times_of_a_client_are_dropped(opened_at_ns: int) -> None:
    """Broken: a client could put nonsense into everybody's figures."""
    harness, a, b = contended()
    harness.milliseconds(QUANTUM_MS)
    a.release(drain_ns=(1 << 64) - 1)
    b.release(idle=True, opened_at_ns=opened_at_ns)
    assert harness.gpu_snapshot().leases.recent_handovers_ns == ()
    assert harness.gpu_snapshot().leases.recent_drains_ns == ()
    assert harness.scheduler.snapshot(harness.clock.now_ns).gpus[0].uuid == GPU


def test_time_that_goes_backwards_stands_still() -> None:
    """Broken: a clock's hiccup would make negative times."""
    harness, a = contended(1)
    harness.clock.now_ns -= SECOND_NS
    a.release(idle=True)
    assert a.seat().statistics.used_ns == 0


def test_holder_and_next_in_line_are_alerted_before_the_quantum_ends() -> None:
    """Broken: every hand-over would wait for processors that sleep; or all who wait would be kept awake."""
    harness, a, b, c = contended(3)
    harness.milliseconds(QUANTUM_MS - 2)
    assert not a.take(messages.Standby)
    harness.milliseconds(1)
    (ending,) = a.take(messages.Standby)
    (coming,) = b.take(messages.Standby)
    assert MILLISECOND_NS <= ending.within_ns <= 5 * MILLISECOND_NS
    assert MILLISECOND_NS <= coming.within_ns <= 20 * MILLISECOND_NS
    harness.milliseconds(1)
    assert a.take(messages.Revoke)
    assert not b.take(messages.Standby), "once for each lease"
    assert not c.take(messages.Standby)


def test_a_holder_past_its_quantum_is_revoked_when_somebody_comes() -> None:
    """Broken: a newcomer waits a whole quantum for a holder that has had its own, or for a processor that sleeps."""
    harness, a = contended(1)
    harness.milliseconds(5 * QUANTUM_MS)
    b = harness.client(wanted=True)
    assert a.take(messages.Revoke)
    assert not a.take(messages.Standby)
    assert len(b.take(messages.Standby)) == 1


def test_the_last_minute_is_shared_as_it_was() -> None:
    """Broken if a program's share told of old times, or counted its waits."""
    harness, a, b = contended()
    for _ in range(600):  # more than a minute of turns
        for holder in (a, b):
            harness.milliseconds(QUANTUM_MS)
            holder.release(wanted=True)
    assert [each.seat().turn.recent_share for each in (a, b)] == [pytest.approx(0.5, abs=0.02)] * 2
    b.die()
    harness.milliseconds(30_000)
    assert a.seat().turn.recent_share == pytest.approx(0.75, abs=0.05)
    harness.milliseconds(60_000)
    assert a.seat().turn.recent_share == 1.0
    assert harness.client().seat().turn.recent_share == 0.0


def test_the_queue_is_shown_in_the_order_of_turns() -> None:
    """Broken if a user could not see how many programs come before his own."""
    harness = one_gpu()
    clients = [harness.client(wanted=True) for _ in range(4)]
    assert harness.gpu_snapshot().leases.queue == tuple(each.client for each in clients[1:])
    harness.milliseconds(QUANTUM_MS)
    clients[0].release(wanted=True)
    assert harness.gpu_snapshot().leases.queue == tuple(each.client for each in (*clients[2:], clients[0]))
