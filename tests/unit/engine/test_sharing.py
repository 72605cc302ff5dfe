"""Exclusive, concurrent and automatic sharing: who runs side by side, as far as memory allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import (
    Allotment,
    GpuView,
    Happened,
    JobClass,
    JobView,
    Measured,
    Plan,
    PolicyBase,
    Rank,
    State,
    TurnEnded,
)
from nvshare.scheduler_policies.registry import create
from nvshare.scheduler_policies.round_robin import RoundRobin
from tests.harness import Harness, ScriptedClient, one_gpu, steps


def side_by_side(mode: MemoryMode = MemoryMode.SWAP) -> tuple[Harness, ScriptedClient, ScriptedClient]:
    """`a` has 40 of 100 bytes, `b` 50; both run."""
    harness = one_gpu(100, sharing=Sharing.CONCURRENT)
    a, b = (harness.client(wanted=True, mode=mode) for _ in range(2))
    assert a.granted() is not None
    assert b.granted() is not None
    a.report(allocated=40, resident=40)
    b.report(allocated=50, resident=50)
    return harness, a, b


def move(*clients: ScriptedClient) -> None:
    """They come to their targets."""
    for client in clients:
        if client.told():
            client.obeys()


def holders(harness: Harness) -> set[int]:
    """Clients that compute, without those that were told to give their lease back."""
    return {number for number, client in harness.clients.items() if client.seat().phase == "holding"}


def test_what_fits_runs_side_by_side() -> None:
    """Broken: each growth would end concurrent sharing."""
    harness, a, b = side_by_side()
    assert a.reserve(50) == 50
    assert harness.gpu_snapshot().rules.sharing is Sharing.CONCURRENT
    assert not b.take(messages.Revoke)


def test_an_event_costs_the_same_beside_many_programs() -> None:
    """Broken: with a thousand concurrent programs each event takes the coordinator milliseconds."""

    def cost(clients: int) -> int:
        harness = one_gpu(sharing=Sharing.CONCURRENT, check_invariants=False)
        one, *_ = [harness.client(wanted=True) for _ in range(clients)]

        lease_id = one.seat().lease_id

        def come_and_go() -> None:
            one.release(lease_id, idle=True)
            one.request()

        return steps(come_and_go)

    assert cost(200) < 1.2 * cost(20)


def test_growth_beyond_the_card_begins_turns() -> None:
    """Broken: invariant 4: it is granted beside what others have, or a program is out of memory that could take
    turns."""
    harness, a, b = side_by_side()
    a.ask_room(70)
    assert not a.reserved(), "neither refused nor granted yet"
    assert not a.take(messages.Revoke)
    assert len(b.take(messages.Revoke)) == 1
    b.release(wanted=True)
    move(b)
    assert a.reserved() == [70]
    a.report(allocated=70, resident=70)
    assert harness.gpu_snapshot().memory.resident_bytes <= 100
    harness.milliseconds(100)
    assert len(a.take(messages.Revoke)) == 1, "its turn is over"
    a.release(wanted=True)
    move(a, b)
    assert holders(harness) == {b.client}


def test_the_other_one_first() -> None:
    """Broken: a growth is refused while the one who could make room has just begun to drain."""
    _, a, b = side_by_side()
    a.ask_room(70)
    b.release(wanted=False)
    move(b)
    assert a.reserved() == [70]
    a.release(wanted=True)


def test_alone_on_the_card_nobody_is_revoked() -> None:
    """Broken: the only one at work gives its lease back for a growth for which somebody idle makes room."""
    _, a, b = side_by_side()
    b.release(wanted=False)
    a.ask_room(70)
    move(b)
    assert a.reserved() == [70]
    assert not a.take(messages.Revoke)


def test_pages_that_would_thrash_take_turns() -> None:
    """Broken: in mode `managed` programs that together have more than the card fault each other's pages out."""
    harness, a, b = side_by_side(MemoryMode.MANAGED)
    a.report(allocated=70, resident=50)
    assert holders(harness) == {a.client}
    assert len(b.take(messages.Revoke)) == 1


def test_side_by_side_again_when_there_is_room() -> None:
    """Broken: turns for ever after, once two programs did not fit."""
    harness, a, b = side_by_side()
    a.report(allocated=70, resident=50, host=20)
    (revoke,) = b.take(messages.Revoke)
    b.release(revoke.lease_id, wanted=True)
    assert holders(harness) == {a.client}
    a.report(allocated=40, resident=40)
    harness.milliseconds(100)
    assert holders(harness) == {a.client, b.client}
    assert not a.take(messages.Revoke)


class _All(PolicyBase):
    """All jobs are members without turns, those that want it most first."""

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        ranked = sorted(jobs, key=lambda job: (-job.rank.priority, job.client))
        return Plan(tuple(Allotment(job.client) for job in ranked))


def running_set() -> Harness:
    """One GPU of 100 bytes in automatic sharing, under a policy that wants everybody."""
    harness = Harness(
        lambda name, uuid: _All() if name == "all" else create(name, uuid), policy="all", sharing=Sharing.AUTO
    )
    harness.gpu(capacity=100)
    return harness


def test_members_run_side_by_side_without_ends() -> None:
    """Broken: a policy's running set would be served in turns."""
    harness = running_set()
    clients = [harness.client(wanted=True) for _ in range(3)]
    assert all(client.granted() is not None for client in clients)
    harness.milliseconds(10_000)
    assert not any(client.take(messages.Revoke) for client in clients)
    assert harness.gpu_snapshot().rules.members == (1, 2, 3)


def test_a_member_that_does_not_fit_is_left_out_and_comes_back() -> None:
    """Broken: one large program would end the running set of the others, or never come back to it."""
    harness = running_set()
    a, b, large = (harness.client(wanted=True, mode=MemoryMode.SWAP) for _ in range(3))
    a.report(allocated=30, resident=30)
    b.report(allocated=30, resident=30)
    large.report(allocated=60, resident=40, host=20)
    assert holders(harness) == {a.client, b.client}
    (revoke,) = large.take(messages.Revoke)
    large.release(revoke.lease_id, wanted=True)
    move(large)
    a.report(allocated=5, resident=5)
    assert holders(harness) == {a.client, b.client}, "95 of 100: the next byte would end it again"
    b.report(allocated=5, resident=5)
    move(large)
    assert holders(harness) == {a.client, b.client, large.client}


def test_a_rank_decides_who_is_left_out() -> None:
    """Broken: `set priority`, `set class` or a program's profile would change nothing until the next turn."""
    harness = running_set()
    a, b = (harness.client(wanted=True, mode=MemoryMode.SWAP) for _ in range(2))
    a.report(allocated=60, resident=60)
    b.report(allocated=60, resident=0, host=60)
    assert holders(harness) == {a.client}
    b.release(b.take(messages.Revoke)[0].lease_id, wanted=True)
    harness.handle(events.Set("priority", 3, client=b.client))
    (revoke,) = a.take(messages.Revoke)
    a.release(revoke.lease_id, wanted=True)
    move(a, b)
    move(b)
    assert holders(harness) == {b.client}


def test_classes_and_shares_change_the_rank() -> None:
    """Broken: a policy would decide on a class or a share that is out of date."""
    harness = running_set()
    a = harness.client(wanted=True)

    def rank() -> Rank:
        (client,) = harness.scheduler.snapshot(harness.clock.now_ns).clients
        return client.rank

    harness.handle(events.Set("class", "interactive", client=a.client))
    harness.handle(events.Set("share_request", 0.5, client=a.client))
    harness.handle(events.Set("share_limit", 0.8, client=a.client))
    assert (rank().job_class, rank().share_request, rank().share_limit) == (JobClass.INTERACTIVE, 0.5, 0.8)
    harness.handle(events.Set("share_limit", 0.3, client=a.client))
    assert (rank().share_request, rank().share_limit) == (0.3, 0.3), "a request above the limit is lowered to it"


class _TurnsOfTwo(PolicyBase):
    """A lone job runs without a turn; two take turns.  It is asked after reports of progress."""

    reads_progress = True

    def observe(self, happened: Happened) -> None:
        """Nothing."""

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """The job whose turn goes on or comes, else the oldest."""
        if len(jobs) == 1:
            return Plan((Allotment(jobs[0].client),), why="alone")
        coming = [job for job in jobs if job.state is State.COMING]
        going = [job for job in jobs if job.state is State.RUNNING and now_ns < job.turn.began_ns + gpu.quantum_ns]
        waiting = [job for job in jobs if job.state is State.WAITING]
        return Plan((Allotment((coming or going or waiting)[0].client, gpu.quantum_ns),), why="a turn")


def test_a_turn_waits_for_the_drain_of_the_one_before() -> None:
    """Broken: a report during a drain makes the next program look alone, and it runs beside what still drains; its rate
    in turns is then never measured."""
    harness = Harness(lambda name, uuid: _TurnsOfTwo(), sharing=Sharing.AUTO)
    harness.gpu()
    a, b = (harness.client(wanted=True) for _ in range(2))
    lease = a.seat().lease_id
    harness.milliseconds(100)
    assert a.take(messages.Revoke)
    for work in (1, 2):
        harness.milliseconds(50)
        now_ns = harness.clock.now_ns
        a.say(messages.Progress(0, lease, now_ns, work, 0, 0, 0))
    assert b.granted() is None
    a.release(wanted=True)
    granted = b.granted()
    assert granted is not None
    assert granted.waiters == 1


def test_a_plan_that_no_report_changes_is_kept() -> None:
    """Broken: a thousand programs that report ten times a second have the policy weigh all of them each time; or one
    that is asked no more hears of no reports either."""
    heard: list[Happened] = []
    asked = 0

    class Deaf(_TurnsOfTwo):
        def observe(self, happened: Happened) -> None:
            heard.append(happened)

        def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
            nonlocal asked
            asked += 1
            return replace(super().decide(gpu, jobs, now_ns), reports=len(jobs) == 1)

    harness = Harness(lambda name, uuid: Deaf(), sharing=Sharing.AUTO)
    harness.gpu()
    a = harness.client(wanted=True)

    def reports(work: int) -> int:
        before = asked
        harness.milliseconds(30)
        progress = messages.Progress(0, a.seat().lease_id, harness.clock.now_ns, work, 0, 0, 0)
        harness.handle(events.Received(a.client, progress))
        return asked - before

    reports(1)
    assert reports(2) == 1
    b = harness.client(wanted=True)
    assert reports(3) == 0
    assert len([each for each in heard if isinstance(each, Measured)]) >= 2
    b.die()
    harness.milliseconds(300)
    a.release(idle=True)
    (ended,) = (each for each in heard if isinstance(each, TurnEnded))
    assert ended.quiet_ns == (30 + 30 + 300) * MILLISECOND_NS, "while `b` was there it waited"


def test_concurrent_sharing_waits_for_no_drain() -> None:
    """Broken: a program that came for a turn waits for one that hangs, while all others run beside it."""
    harness = one_gpu(sharing=Sharing.AUTO)
    a, b, c = (harness.client(wanted=True) for _ in range(3))
    harness.milliseconds(100)
    assert a.take(messages.Revoke)
    harness.handle(events.Set("sharing", "concurrent"))
    assert holders(harness) == {b.client, c.client}


def test_policies_know_that_clients_drain() -> None:
    """Broken: a policy takes those that are left for all, and changes its mind with the end of each drain."""
    seen: list[tuple[int, int]] = []

    class Turns(RoundRobin):
        def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
            seen.append((len(gpu.draining), len(jobs)))
            return super().decide(gpu, jobs, now_ns)

    harness = Harness(lambda name, uuid: Turns())
    harness.gpu()
    a, *_ = (harness.client(wanted=True) for _ in range(3))
    harness.until(lambda: a.seat().phase == "revoking")
    assert seen[-1] == (0, 3)
    harness.client(wanted=True)
    assert seen[-1] == (1, 3)
    a.release(wanted=True)
    assert seen[-1] == (0, 4)
