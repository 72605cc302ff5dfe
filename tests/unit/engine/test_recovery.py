"""A coordinator that starts after another one: claims, journal, never two holders."""

from __future__ import annotations

import pytest

from nvshare.coordinator.engine.recovery import NEAR_IDS
from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import MANY_HOLDERS, RecordLease
from nvshare.coordinator.model.settings import SECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness, ScriptedClient

HOLDER = 77


def serving(next_lease_id: int = 1, **settings: object) -> Harness:
    """A coordinator whose GPU nobody held when it started."""
    harness = Harness(create, drain_deadline_ns=SECOND_NS, recovery_ns=2 * SECOND_NS, **settings)
    harness.gpu(next_lease_id=next_lease_id)
    return harness


def recovering(holder: int = HOLDER, **settings: object) -> Harness:
    """A coordinator whose journal says that `holder` has lease 6."""
    harness = Harness(create, drain_deadline_ns=SECOND_NS, recovery_ns=2 * SECOND_NS, **settings)
    harness.gpu(next_lease_id=7, expected_holder=holder)
    return harness


def claim(harness: Harness, lease_id: int, process_id: int | None = None, *, wanted: bool = False) -> ScriptedClient:
    """A client that connects with a lease; of the process with this id, or of another one."""
    client = harness.client(process_id=process_id, attach=False)
    client.attach(lease_id=lease_id, wanted=wanted)
    return client


def records(harness: Harness) -> list[tuple[int, int]]:
    """Records written to the journal since the harness's commands were emptied."""
    return [(c.lease_id, c.process_id) for c in harness.commands if isinstance(c, RecordLease)]


def test_nothing_is_granted_until_the_holder_has_claimed() -> None:
    """Broken: invariant 7, a restart would make two holders."""
    harness = recovering()
    waiter = harness.client(wanted=True)
    assert waiter.granted() is None
    holder = claim(harness, 6, HOLDER)
    confirmed = holder.granted()
    assert confirmed is not None
    assert (confirmed.lease_id, confirmed.waiters) == (6, 1)
    assert waiter.granted() is None
    harness.milliseconds(100)
    assert len(holder.take(messages.Revoke)) == 1, "its quantum counts from the confirmation"
    holder.release()
    assert waiter.lease() == 7, "numbering goes on"


@pytest.mark.parametrize("end", ["dead", "back without a claim", "not back in time"])
def test_the_wait_for_the_holder_ends(end: str) -> None:
    """Broken: a holder blocks the GPU that has died meanwhile, whose release was lost with the coordinator, or that
    never connects again."""
    harness = recovering()
    waiter = harness.client(wanted=True)
    if end == "dead":
        harness.handle(events.ProcessEnded(HOLDER))
    elif end == "back without a claim":
        harness.client(process_id=HOLDER)
    else:
        harness.advance(2 * SECOND_NS - 1)
        assert waiter.granted() is None
        harness.advance(1)
        assert harness.logged("no program claimed")
    assert waiter.granted() is not None


def test_the_window_begins_anew_for_a_holder_that_is_stopped() -> None:
    """Broken: a holder that goes on after the window would submit beside the next one (invariant 7)."""
    harness = recovering()
    waiter = harness.client(wanted=True)
    for stopped in (True, True, False):
        harness.advance(2 * SECOND_NS - 1)
        harness.handle(events.Look((HOLDER,) if stopped else ()))
        assert harness.gpu_snapshot().recovery.expected_stopped is stopped
    harness.advance(2 * SECOND_NS - 1)
    assert waiter.granted() is None
    harness.advance(1)
    assert waiter.granted() is not None
    assert harness.logged(f"process {HOLDER}, which holds its lease, is stopped")
    harness.handle(events.Look((HOLDER,)))
    assert not harness.gpu_snapshot().recovery.expected_stopped, "it was noticed too late: the recovery has ended"


def test_a_claim_of_another_process_is_stray() -> None:
    """Broken: any client could take the GPU by claiming it, or two would hold it."""
    harness = recovering()
    liar = claim(harness, 6, 5)
    assert liar.granted() is None
    assert [r.lease_id for r in liar.take(messages.Revoke)] == [6]
    holder = claim(harness, 6, HOLDER)
    assert holder.granted() is not None, "a stray does not keep the real holder from its lease"
    liar.release(6)
    assert harness.gpu_snapshot().leases.holders == (holder.client,)


def test_a_stray_of_the_recovery_delays_the_next_grant_until_its_drain_is_overdue_at_most() -> None:
    """Broken: a stray that is really at work would overlap with the next holder, or a liar would block the GPU."""
    harness = recovering(MANY_HOLDERS)
    b = harness.client(wanted=True)
    stray = harness.client(attach=False)
    harness.advance(2 * SECOND_NS - 1)
    stray.attach(lease_id=1)
    assert len(stray.take(messages.Revoke)) == 1
    harness.advance(1)
    assert not harness.gpu_snapshot().recovery.recovering
    harness.advance(SECOND_NS - 2)
    assert b.granted() is None
    harness.advance(1)
    assert b.granted() is not None


def test_a_claim_of_a_lease_that_its_process_never_had_delays_nobody() -> None:
    """Broken: a user who claims again and again by new connections stops every turn."""
    harness = serving()
    a = harness.client(wanted=True)
    b = harness.client(wanted=True)
    stray = claim(harness, 1, wanted=True)
    assert len(stray.take(messages.Revoke)) == 1
    a.release()
    assert b.granted() is not None
    b.release()
    stray.request()
    assert stray.granted() is None, "it has not given back what it claims to have"
    stray.release(1, wanted=True)
    assert stray.granted() is not None


def test_a_claim_of_a_lost_connections_lease_delays_others_once() -> None:
    """Broken: a program whose connection broke overlaps with the next one, or breaks it again and again to block."""
    harness = serving()
    holder = harness.client(wanted=True)
    holder.die(process_lives=True)
    for delays in (True, False):
        again = claim(harness, 1, holder.process_id)
        assert len(again.take(messages.Revoke)) == 1
        waiter = harness.client(wanted=True)
        assert (waiter.granted() is None) is delays
        again.die(process_lives=True)
        waiter.die()


def test_a_lease_that_moves_while_it_is_revoked_is_revoked_again_and_keeps_its_deadline() -> None:
    """Broken: a revocation that went to the dead connection is lost, and the process keeps the GPU; or one that
    reconnects again and again drains without end while the others wait."""
    harness = serving()
    old = harness.client(wanted=True)
    waiter = harness.client(wanted=True)
    harness.milliseconds(100)
    for _ in range(9):
        harness.advance(SECOND_NS // 10)
        old = claim(harness, 1, old.process_id)
        assert [revoke.lease_id for revoke in old.take(messages.Revoke)] == [1]
    assert waiter.granted() is None
    harness.advance(SECOND_NS // 10)
    assert waiter.granted() is not None


def test_a_stray_that_obeys_waits_like_anybody() -> None:
    """Broken: a process whose connection broke while it held the lease would be lost."""
    harness = serving()
    a = harness.client(wanted=True)
    a.granted()
    a.die()
    again = harness.client(process_id=a.process_id, attach=False)
    b = harness.client(wanted=True)
    again.attach(lease_id=1, wanted=True)
    again.release(1, wanted=True)
    b.release()
    assert again.lease() == 3


def test_a_claim_from_before_a_lost_journal_is_confirmed_while_the_gpu_is_free() -> None:
    """Broken: losing the journal would interrupt a process for nothing; or ids would be used twice."""
    harness = serving()
    holder = claim(harness, 57)
    assert holder.lease() == 57
    second = claim(harness, 58, wanted=True)
    assert len(second.take(messages.Revoke)) == 1
    assert second.granted() is None
    second.release(58, wanted=True)
    holder.release()
    assert second.lease() == 59, "58 is released already: the hook ignores a grant of it"


def test_an_id_that_a_stray_has_released_is_not_given_again() -> None:
    """Broken: the hook takes the grant for its confirmed claim, stays closed, and waits for ever."""
    harness = recovering()
    stray = claim(harness, 7, wanted=True)
    assert len(stray.take(messages.Revoke)) == 1
    stray.release(7, wanted=True)
    harness.handle(events.ProcessEnded(HOLDER))
    assert stray.lease() == 8
    assert records(harness)[-1] == (8, stray.process_id)


@pytest.mark.parametrize("sharing", list(Sharing))
@pytest.mark.parametrize("named", [False, True])
def test_a_claim_far_from_the_last_id_is_stray_and_moves_no_numbers(sharing: Sharing, named: bool) -> None:
    """Broken: one claim of a huge id exhausts the ids, and after a restart the honest holder's claim is refused."""
    harness = recovering(sharing=sharing) if named else serving(7, sharing=sharing)
    for lease_id in ((1 << 64) - 1, 7 + NEAR_IDS):
        liar = claim(harness, lease_id, HOLDER)
        assert liar.granted() is None
        assert len(liar.take(messages.Revoke)) == 1
        liar.die()
    grant = harness.client(wanted=True).granted()
    assert grant is not None
    assert grant.lease_id == 7
    assert records(harness)[-1][0] == 7


def test_an_old_claim_is_never_confirmed_outside_recovery() -> None:
    """Broken: a lease that has been given to others since would come back to life."""
    harness = serving(next_lease_id=10)
    late = claim(harness, 9)
    assert late.granted() is None
    assert len(late.take(messages.Revoke)) == 1


def test_after_concurrent_sharing_the_whole_window_is_waited() -> None:
    """Broken: one of several holders of a concurrent GPU overlaps with the first exclusive lease, because one of them
    came back or died."""
    harness = recovering(MANY_HOLDERS)
    waiter = harness.client(wanted=True)
    one = claim(harness, 3)
    assert len(one.take(messages.Revoke)) == 1
    one.release(3)
    harness.handle(events.ProcessEnded(HOLDER))
    harness.advance(2 * SECOND_NS - 1)
    assert waiter.granted() is None
    harness.advance(1)
    assert waiter.granted() is not None


def test_concurrent_claims_are_confirmed_together() -> None:
    """Broken: a restart would interrupt processes that share concurrently anyway."""
    harness = recovering(MANY_HOLDERS, sharing=Sharing.CONCURRENT)
    one, two, thief = (harness.client(attach=False) for _ in range(3))
    one.attach(lease_id=3)
    two.attach(lease_id=6)
    thief.attach(lease_id=6)
    confirmed = [client.granted() for client in (one, two, thief)]
    assert [grant.lease_id if grant else None for grant in confirmed] == [3, 6, None]
    assert len(thief.take(messages.Revoke)) == 1
    assert not records(harness), "the journal says (6, MANY_HOLDERS) already"
    one.release(3)
    harness.advance(2 * SECOND_NS)
    assert not harness.logged("no program claimed")


def test_the_journal_numbers_on_from_the_newest_lease() -> None:
    """Broken: after a restart an id would be given twice, because an older lease ended last."""
    harness = serving(sharing=Sharing.CONCURRENT)
    one = harness.client(wanted=True)
    two = harness.client(wanted=True)
    two.release(idle=True)
    one.release(idle=True)
    assert records(harness)[-1] == (2, 0)


def test_the_journal_keeps_the_expected_holder_through_recovery() -> None:
    """Broken: after a second crash there would be two holders, because a stray's release wiped the first one's name."""
    harness = recovering()
    stray = claim(harness, 2)
    stray.release(2)
    assert not records(harness)
    holder = claim(harness, 6, HOLDER)
    assert not records(harness), "still the same lease"
    holder.release(idle=True)
    assert records(harness) == [(6, 0)]


def test_the_journal_covers_all_whose_claims_are_confirmed_during_recovery() -> None:
    """Broken: sharing concurrently while the old holder has not claimed yet, a second crash would forget it."""
    harness = recovering(sharing=Sharing.CONCURRENT)
    a, waiter = harness.client(attach=False), harness.client(wanted=True)
    a.attach(lease_id=3)
    assert a.granted() is not None
    assert waiter.granted() is None, "the GPU waits for the old holder in every kind of sharing"
    a.release(idle=True)
    assert records(harness) == [(6, MANY_HOLDERS), (6, HOLDER)]
    harness.handle(events.ProcessEnded(HOLDER))
    assert waiter.granted() is not None


def test_the_journal_names_several_until_the_last_has_released() -> None:
    """Broken: a crash while a concurrent GPU becomes exclusive would forget those who still drain."""
    harness = serving(sharing=Sharing.CONCURRENT)
    a = harness.client(wanted=True)
    b = harness.client(wanted=True)
    harness.handle(events.Set("sharing", "exclusive"))
    assert records(harness)[-1] == (2, MANY_HOLDERS)
    a.release()
    assert records(harness)[-1] == (2, b.process_id)
    b.release()
    assert records(harness)[-1] == (2, 0)


def test_who_claimed_during_recovery_gives_way_when_the_gpu_becomes_exclusive() -> None:
    """Broken: invariant 1, it would stay the holder beside the one whom the GPU waits for and who is at work."""
    harness = recovering(sharing=Sharing.CONCURRENT)
    early = claim(harness, 3)
    assert early.granted() is not None
    harness.handle(events.Set("sharing", "exclusive"))
    assert [r.lease_id for r in early.take(messages.Revoke)] == [3]
    early.release(3, wanted=True)
    assert early.granted() is None, "nobody is granted before the expected holder has spoken"
    holder = claim(harness, 6, HOLDER)
    assert harness.gpu_snapshot().leases.holders == (holder.client,)


def test_the_expected_holder_is_stray_where_others_claimed_meanwhile() -> None:
    """Broken: invariant 1, its claim would make it the holder beside those who still drain from concurrent sharing."""
    harness = recovering(sharing=Sharing.CONCURRENT)
    a, b = harness.client(attach=False), harness.client(attach=False)
    a.attach(lease_id=3)
    b.attach(lease_id=4)
    harness.handle(events.Set("sharing", "exclusive"))
    holder = claim(harness, 6, HOLDER, wanted=True)
    assert holder.granted() is None
    assert len(holder.take(messages.Revoke)) == 1
    for client in (a, b):
        client.release()
    assert harness.gpu_snapshot().leases.holders == (holder.client,)
    holder.release(6, wanted=True)
    assert holder.lease() > 6


@pytest.mark.parametrize("sharing", list(Sharing))
def test_a_lease_moves_to_the_new_connection_of_its_process(sharing: Sharing) -> None:
    """Broken: a process that connects again before its old connection is seen to end would be cut short as a stray."""
    harness = serving(sharing=sharing)
    old = harness.client(wanted=True)
    lease = old.seat().lease_id
    harness.milliseconds(60)
    new = claim(harness, lease, old.process_id)
    assert new.lease() == lease
    assert not new.take(messages.Revoke)
    assert harness.gpu_snapshot().leases.holders == (new.client,)
    old.die()
    assert harness.gpu_snapshot().leases.holders == (new.client,)
    assert records(harness)[-1][0] == lease
    assert records(harness)[-1][1] != 0


def test_a_paused_client_that_claims_its_lease_is_told_to_give_it_back() -> None:
    """Broken: a program that was paused before a restart would go on after it for as long as it is alone."""
    harness = recovering()
    holder = harness.client(process_id=HOLDER, attach=False)
    harness.handle(events.Set("paused", True, client=holder.client))
    holder.attach(lease_id=6, wanted=True)
    assert len(holder.take(messages.Revoke)) == 1
    holder.release(wanted=True)
    assert len(holder.take(messages.Grant)) == 1, "the claim was confirmed, and nothing was granted since"
    waiter = harness.client(wanted=True)
    assert waiter.granted() is not None
    harness.handle(events.Set("paused", False, client=holder.client))
    waiter.release()
    assert holder.granted() is not None
