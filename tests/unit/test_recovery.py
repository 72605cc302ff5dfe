"""A coordinator that starts after another one: claims, journal, never two holders."""

from __future__ import annotations

from coordinator import events, wire
from coordinator.commands import MANY_HOLDERS, RecordLease
from coordinator.scheduler import Settings
from coordinator.state import SECOND_NS
from coordinator.testing import GPU, Desk
from scheduler_policies.registry import create

HOLDER = 77


def make_desk(**settings: object) -> Desk:
    """No GPU yet; every check on."""
    return Desk(create, Settings(check_invariants=True, drain_deadline_ns=SECOND_NS, **settings))  # type: ignore[arg-type]


def recovering(desk: Desk, holder: int = HOLDER) -> None:
    """The GPU of which the journal says that `holder` has lease 6."""
    desk.gpu(next_lease_id=7, expected_holder=holder, recovery_deadline_ns=desk.clock.now_ns + 2 * SECOND_NS)


def test_nothing_is_granted_until_the_holder_has_claimed() -> None:
    """Broken: invariant 7, a restart would make two holders."""
    desk = make_desk()
    recovering(desk)
    waiter = desk.client(wanted=True)
    assert waiter.granted() is None
    holder = desk.client(process_id=HOLDER, attach=False)
    holder.attach(lease_id=6)
    confirmed = holder.granted()
    assert confirmed is not None
    assert (confirmed.lease_id, confirmed.waiters) == (6, 1)
    assert waiter.granted() is None
    desk.milliseconds(100)
    assert len(holder.take(wire.Revoke)) == 1, "its quantum counts from the confirmation"
    holder.release()
    grant = waiter.granted()
    assert grant is not None
    assert grant.lease_id == 7, "numbering goes on"


def test_a_holder_that_died_meanwhile_is_not_waited_for() -> None:
    """Broken: all would wait for the whole recovery window."""
    desk = make_desk()
    recovering(desk)
    waiter = desk.client(wanted=True)
    desk.handle(events.HolderGone(GPU))
    assert waiter.granted() is not None


def test_the_window_ends() -> None:
    """Broken: a holder that never connects again would block the GPU for ever."""
    desk = make_desk()
    recovering(desk)
    waiter = desk.client(wanted=True)
    desk.advance(2 * SECOND_NS - 1)
    assert waiter.granted() is None
    desk.advance(1)
    assert waiter.granted() is not None
    assert desk.logged("nobody claimed")


def test_a_holder_that_comes_back_without_a_claim_ends_the_wait() -> None:
    """Broken: a release that was lost with the coordinator would cost everybody the window."""
    desk = make_desk()
    recovering(desk)
    waiter = desk.client(wanted=True)
    desk.client(process_id=HOLDER)
    assert waiter.granted() is not None


def test_a_claim_of_another_process_is_stray() -> None:
    """Broken: any client could take the GPU by claiming it, or two would hold it."""
    desk = make_desk()
    recovering(desk)
    liar = desk.client(process_id=5, attach=False)
    liar.attach(lease_id=6)
    assert liar.granted() is None
    assert [r.lease_id for r in liar.take(wire.Revoke)] == [6]
    holder = desk.client(process_id=HOLDER, attach=False)
    holder.attach(lease_id=6)
    assert holder.granted() is not None, "a stray does not keep the real holder from its lease"
    liar.release(6)
    assert desk.sight().holders == (holder.client,)


def test_a_stray_holds_up_the_next_grant_until_its_drain_is_overdue_at_most() -> None:
    """Broken: a stray that is really at work would overlap with the next holder, or a liar would block the GPU."""
    desk = make_desk()
    desk.gpu()
    a = desk.client(wanted=True)
    b = desk.client(wanted=True)
    stray = desk.client(attach=False)
    stray.attach(lease_id=1)
    assert len(stray.take(wire.Revoke)) == 1
    a.release()
    assert b.granted() is None
    desk.advance(SECOND_NS)
    assert b.granted() is not None


def test_a_stray_that_obeys_waits_like_anybody() -> None:
    """Broken: a process whose connection broke while it held the lease would be lost."""
    desk = make_desk()
    desk.gpu()
    a = desk.client(wanted=True)
    a.granted()
    a.die()
    again = desk.client(process_id=a.process_id, attach=False)
    b = desk.client(wanted=True)
    again.attach(lease_id=1, wanted=True)
    again.release(1, wanted=True)
    b.release()
    grant = again.granted()
    assert grant is not None
    assert grant.lease_id == 3


def test_a_claim_from_before_a_lost_journal_is_confirmed_while_the_gpu_is_free() -> None:
    """Broken: losing the journal would interrupt a process for nothing; or ids would be used twice."""
    desk = make_desk()
    desk.gpu()
    holder = desk.client(attach=False)
    holder.attach(lease_id=57)
    confirmed = holder.granted()
    assert confirmed is not None
    assert confirmed.lease_id == 57
    second = desk.client(attach=False)
    second.attach(lease_id=58, wanted=True)
    assert len(second.take(wire.Revoke)) == 1
    assert second.granted() is None
    second.release(58, wanted=True)
    holder.release()
    grant = second.granted()
    assert grant is not None
    assert grant.lease_id > 57


def test_an_old_claim_is_never_confirmed_outside_recovery() -> None:
    """Broken: a lease that has been given to others since would come back to life."""
    desk = make_desk()
    desk.gpu(next_lease_id=10)
    late = desk.client(attach=False)
    late.attach(lease_id=9)
    assert late.granted() is None
    assert len(late.take(wire.Revoke)) == 1


def test_after_concurrent_sharing_the_whole_window_is_waited() -> None:
    """Broken: one of several holders of a concurrent GPU would overlap with the first exclusive lease."""
    desk = make_desk()
    recovering(desk, MANY_HOLDERS)
    waiter = desk.client(wanted=True)
    one = desk.client(attach=False)
    one.attach(lease_id=3)
    assert len(one.take(wire.Revoke)) == 1
    one.release(3)
    desk.advance(2 * SECOND_NS - 1)
    assert waiter.granted() is None
    desk.advance(1)
    assert waiter.granted() is not None


def test_concurrent_claims_are_confirmed_together() -> None:
    """Broken: a restart would interrupt processes that share concurrently anyway."""
    desk = make_desk(sharing=wire.Sharing.CONCURRENT)
    recovering(desk, MANY_HOLDERS)
    one, two, thief = (desk.client(attach=False) for _ in range(3))
    one.attach(lease_id=3)
    two.attach(lease_id=6)
    thief.attach(lease_id=6)
    confirmed = [client.granted() for client in (one, two, thief)]
    assert [grant.lease_id if grant else None for grant in confirmed] == [3, 6, None]
    assert len(thief.take(wire.Revoke)) == 1
    last = [c for c in desk.commands if isinstance(c, RecordLease)][-1]
    assert (last.lease_id, last.process_id) == (6, MANY_HOLDERS)


def test_the_journal_numbers_on_from_the_newest_lease() -> None:
    """Broken: after a restart an id would be given twice, because an older lease ended last."""
    desk = make_desk(sharing=wire.Sharing.CONCURRENT)
    desk.gpu()
    one = desk.client(wanted=True)
    two = desk.client(wanted=True)
    two.release(idle=True)
    one.release(idle=True)
    last = [c for c in desk.commands if isinstance(c, RecordLease)][-1]
    assert (last.lease_id, last.process_id) == (2, 0)
