"""Gangs: together on their GPUs or not at all, without harm to others."""

from __future__ import annotations

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.harness import Harness, ScriptedClient
from nvshare.scheduler_policies.api import Choice, ClientView, GpuView
from nvshare.scheduler_policies.registry import create

QUANTUM_MS = 100
A, B, C = "GPU-0", "GPU-1", "GPU-2"


def make_harness(policy: str = "round_robin", gpus: int = 2, **more: object) -> Harness:
    """Some GPUs, every check on."""
    harness = Harness(create, policy=policy, **more)
    for number in range(gpus):
        harness.gpu(f"GPU-{number}")
    return harness


def client(harness: Harness, uuid: str, *, gang: str = "", wanted: bool = True, **more: int) -> ScriptedClient:
    """One that uses this GPU."""
    made = harness.client(attach=False, gang=gang, **more)  # type: ignore[arg-type]
    made.attach(uuid, wanted=wanted)
    return made


def holder(harness: Harness, uuid: str) -> int | None:
    """Who computes there."""
    holders = harness.gpu_snapshot(uuid).leases.holders
    assert len(holders) <= 1
    return holders[0] if holders else None


def obey(harness: Harness, *, but: tuple[ScriptedClient, ...] = ()) -> None:
    """Everybody who was asked for a lease gives it back, and wants it again."""
    for each in list(harness.clients.values()):
        for revoke in each.take(messages.Revoke):
            if each not in but:
                each.release(revoke.lease_id, gpu=revoke.gpu, wanted=True)


def pass_time(harness: Harness, milliseconds: int, see: object = None) -> None:
    """In steps of a millisecond; revocations are obeyed at once."""
    for _ in range(milliseconds):
        harness.milliseconds(1)
        obey(harness)
        if callable(see):
            see()


def test_members_are_granted_and_revoked_in_one_moment() -> None:
    """Broken: one member would compute while the other waits for its GPU."""
    harness = make_harness()
    client(harness, A)
    client(harness, B)
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    seen = []

    def see() -> None:
        at_work = (holder(harness, A) == one.client, holder(harness, B) == two.client)
        seen.append(at_work)

    pass_time(harness, 2000, see)
    together = seen.count((True, True))
    assert seen.count((True, False)) == seen.count((False, True)) == 0
    assert 900 <= together <= 1100, "half of the time, as each of two has under round robin"
    assert harness.notifications("gang_gathered")


def test_a_gang_waits_for_nobody_who_does_not_want() -> None:
    """Broken: an idle member would keep the others from their turns."""
    harness = make_harness()
    one, idle = client(harness, A, gang="pair"), client(harness, B, gang="pair", wanted=False)
    rival = client(harness, A)
    pass_time(harness, 1000)
    assert one.seat().statistics.leases >= 4
    assert rival.seat().statistics.leases >= 4
    assert idle.seat().statistics.leases == 0


@pytest.mark.parametrize("trouble", ["dead", "paused", "hung"])
def test_a_member_in_trouble_blocks_nobody(trouble: str) -> None:
    """Broken: one process that hangs, dies or is paused would stop the others of its gang, and who waits for them."""
    harness = make_harness(drain_deadline_ns=300 * MILLISECOND_NS)
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    rivals = client(harness, A), client(harness, B)
    pass_time(harness, 50)
    assert (holder(harness, A), holder(harness, B)) == (one.client, two.client)
    if trouble == "dead":
        two.die()
    elif trouble == "paused":
        harness.handle(events.Paused(two.client))
        obey(harness)
    hung = (two,) if trouble == "hung" else ()
    before = one.seat().statistics.leases, rivals[0].seat().statistics.leases, rivals[1].seat().statistics.used_ns
    for _ in range(2000):
        harness.milliseconds(1)
        obey(harness, but=hung)
    assert one.seat().statistics.leases >= before[0] + 5
    assert rivals[0].seat().statistics.leases >= before[1] + 5
    assert rivals[1].seat().statistics.used_ns >= before[2] + 500 * MILLISECOND_NS


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_member_runs_alone_where_nobody_comes_back(comes_back: bool) -> None:
    """Broken: a rival that gives its lease back and asks again with its next launch finds a member at work that can do
    nothing without its mates; or the GPU stays idle beside a member that waits."""
    harness = make_harness(gpus=3)
    harness.handle(events.QuantumSet(100 * QUANTUM_MS * MILLISECOND_NS, C))
    client(harness, B, gang="other"), client(harness, C, gang="other")
    rival = client(harness, A)
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    pass_time(harness, QUANTUM_MS - 1)
    harness.milliseconds(1)
    (revoke,) = rival.take(messages.Revoke)
    rival.release(revoke.lease_id)
    assert holder(harness, A) is None
    harness.milliseconds(1)
    if comes_back:
        rival.request()
    harness.milliseconds(1)
    assert two.seat().statistics.leases == 0, "its GPU is another gang's for long"
    assert holder(harness, A) == (rival if comes_back else one).client


def test_others_keep_their_turns() -> None:
    """Broken: a gang that is alone on one GPU would always be next on the other one."""
    harness = make_harness()
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    rivals = [client(harness, B) for _ in range(3)]
    pass_time(harness, 8000)
    times = [rival.seat().statistics.used_ns for rival in rivals]
    assert min(times) >= 8000 * MILLISECOND_NS // 8
    assert max(times) - min(times) <= 3 * QUANTUM_MS * MILLISECOND_NS
    assert two.seat().statistics.used_ns >= 8000 * MILLISECOND_NS // 5
    assert one.seat().statistics.used_ns > two.seat().statistics.used_ns, "nobody else wants its GPU"


def test_who_is_interrupted_keeps_its_place_and_has_the_rest() -> None:
    """Broken: a gang's call would cost whoever computes there its turn."""
    harness = make_harness()
    rival, patient = client(harness, B), client(harness, B)
    two = client(harness, B, gang="pair")
    client(harness, A)
    harness.milliseconds(30)
    one = client(harness, A, gang="pair")
    pass_time(harness, 71)
    assert (holder(harness, A), holder(harness, B)) == (one.client, two.client)
    assert rival.seat().statistics.used_ns == QUANTUM_MS * MILLISECOND_NS
    desk2 = make_harness()
    rival = client(desk2, B)
    patient = client(desk2, B)
    two = client(desk2, B, gang="pair")
    desk2.milliseconds(40)
    one = client(desk2, A, gang="pair")
    obey(desk2)
    assert (holder(desk2, A), holder(desk2, B)) == (one.client, two.client)
    rival.take(messages.Grant)
    pass_time(desk2, QUANTUM_MS)
    assert holder(desk2, B) == rival.client
    grant = rival.granted()
    assert grant is not None
    assert grant.quantum_ns == 60 * MILLISECOND_NS
    pass_time(desk2, 60)
    assert holder(desk2, B) == patient.client


def test_two_gangs_that_want_the_same_gpus_take_turns() -> None:
    """Broken: a deadlock: each would hold one GPU and wait for the other one."""
    harness = make_harness()
    first = client(harness, A, gang="x"), client(harness, B, gang="x")
    second = client(harness, B, gang="y"), client(harness, A, gang="y")
    halves = 0

    def see() -> None:
        nonlocal halves
        pair = holder(harness, A), holder(harness, B)
        whole = [(first[0].client, first[1].client), (second[1].client, second[0].client)]
        halves += None not in pair and pair not in whole

    pass_time(harness, 4000, see)
    for each in (*first, *second):
        assert each.seat().statistics.leases >= 10
    assert halves <= 2 * QUANTUM_MS, "before they had found their turns"


def test_a_ring_of_gangs_does_not_lock() -> None:
    """Broken: three gangs on three pairs of GPUs would wait for each other in a circle, or one of them for ever."""
    harness = make_harness(gpus=3)
    ring = []
    for name, pair in (("x", (A, B)), ("y", (B, C)), ("z", (C, A))):
        ring += [client(harness, uuid, gang=name) for uuid in pair]
    lone = [client(harness, uuid) for uuid in (A, B, C)]
    pass_time(harness, 10_000)
    for each in (*ring, *lone):
        assert each.seat().statistics.leases >= 8
        assert each.seat().statistics.used_ns >= 1000 * MILLISECOND_NS


def test_one_program_on_two_gpus_is_a_gang_if_it_asks() -> None:
    """Broken: a program that exchanges data between its GPUs would have them at different times."""
    harness = make_harness()
    wide = harness.client(attach=False, gang="wide")
    wide.attach(A, gpu=0, wanted=True)
    wide.attach(B, gpu=1, wanted=True)
    client(harness, A), client(harness, B), client(harness, B)
    apart = 0

    def see() -> None:
        nonlocal apart
        apart += (holder(harness, A) == wide.client) != (holder(harness, B) == wide.client)

    pass_time(harness, 300)
    pass_time(harness, 3000, see)
    assert apart == 0
    assert wide.seat(0).statistics.leases >= 5


def test_members_on_one_gpu_take_turns() -> None:
    """Broken: invariant 1: a gang would put two holders on one GPU."""
    harness = make_harness()
    one, also, two = (client(harness, uuid, gang="trio") for uuid in (A, A, B))
    pass_time(harness, 2000)
    for each in (one, also, two):
        assert each.seat().statistics.used_ns >= 500 * MILLISECOND_NS


def test_a_member_that_comes_late_joins_the_turn() -> None:
    """Broken: it would wait for a turn of its own while the others compute without it."""
    harness = make_harness()
    client(harness, A)
    rival = client(harness, B)
    one = client(harness, A, gang="pair")
    two = client(harness, B, gang="pair", wanted=False)
    pass_time(harness, QUANTUM_MS + 10)
    assert (holder(harness, A), holder(harness, B)) == (one.client, rival.client)
    two.request()
    obey(harness)
    assert (holder(harness, A), holder(harness, B)) == (one.client, two.client)
    two.release(idle=True)
    pass_time(harness, 30)
    assert holder(harness, B) == rival.client
    assert holder(harness, A) == one.client, "who is idle is not waited for"
    two.request()
    obey(harness)
    assert holder(harness, B) == rival.client, "but nobody is interrupted twice in a row"
    pass_time(harness, 2 * QUANTUM_MS)
    assert two.seat().statistics.leases >= 2


def test_leases_end_in_one_moment() -> None:
    """Broken: one member would compute on while the other is out."""
    harness = make_harness()
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    rival = client(harness, A)
    late = client(harness, B)
    harness.handle(events.QuantumSet(10 * MILLISECOND_NS, A))
    pass_time(harness, 1000)
    while (holder(harness, A), holder(harness, B)) != (one.client, two.client):
        pass_time(harness, 1)
    while not one.take(messages.Revoke):
        assert not two.take(messages.Revoke)
        harness.milliseconds(1)
    assert two.take(messages.Revoke)
    assert min(rival.seat().statistics.leases, late.seat().statistics.leases) >= 3
    turns = [note for note in harness.notifications("gang_gathered") if note["gpus"] == 2]
    assert turns[-1]["quantum_ns"] == QUANTUM_MS * MILLISECOND_NS, "as long as the longest quantum of its GPUs"


def test_a_changed_gang_counts_at_once() -> None:
    """Broken: an annotation that is changed while the pod runs would do nothing, or leave the old gang behind."""
    harness = make_harness()
    one, two = client(harness, A, gang="pair"), client(harness, B)
    client(harness, A), client(harness, B)
    pass_time(harness, 500)
    assert not harness.notifications("gang_gathered")
    harness.handle(events.GangSet(two.client, "pair"))
    pass_time(harness, 500)
    turns = len(harness.notifications("gang_gathered"))
    assert turns >= 2
    harness.handle(events.GangSet(one.client, ""))
    harness.handle(events.GangSet(two.client, ""))
    pass_time(harness, 500)
    assert len(harness.notifications("gang_gathered")) == turns
    assert harness.scheduler.snapshot(harness.clock.now_ns).gangs == ()


def test_nobody_waits_for_a_hung_rival() -> None:
    """Broken: a GPU would idle until another GPU's client has drained, for ten seconds if that hangs."""
    harness = make_harness(drain_deadline_ns=5000 * MILLISECOND_NS)
    one = client(harness, A, gang="pair")
    hung = client(harness, B)
    two = client(harness, B, gang="pair")
    rival = client(harness, A)
    for _ in range(QUANTUM_MS + 5):
        harness.milliseconds(1)
        obey(harness, but=(hung,))
    start = one.seat().statistics.used_ns + rival.seat().statistics.used_ns
    for _ in range(3000):
        harness.milliseconds(1)
        obey(harness, but=(hung,))
    assert one.seat().statistics.used_ns + rival.seat().statistics.used_ns - start >= 1500 * MILLISECOND_NS
    assert two.seat().statistics.leases == 0
    hung.release(wanted=True)
    pass_time(harness, 500)
    assert two.seat().statistics.leases >= 1


def test_memory_comes_before_the_common_grant() -> None:
    """Broken: a member whose memory is there would run while the other one's still moves."""
    harness = make_harness()
    one = client(harness, A, gang="pair", wanted=False)
    two = harness.client(attach=False, gang="pair", mode=messages.MemoryMode.SWAP)
    two.attach(B)
    two.report(allocated=1000, resident=0, host=1000)
    client(harness, A)
    client(harness, B)
    one.request()
    two.request()
    pass_time(harness, QUANTUM_MS)
    (order,) = two.take(messages.Restore)
    assert (holder(harness, A), holder(harness, B)) == (None, None), "both wait for the memory"
    harness.milliseconds(20)
    two.moved(order.order_id, 1000)
    two.report(allocated=1000, resident=1000)
    assert (holder(harness, A), holder(harness, B)) == (one.client, two.client)
    (note,) = harness.notifications("gang_gathered")
    assert (note["gpus"], note["gathered_ns"]) == (2, 20 * MILLISECOND_NS)
    assert harness.gpu_snapshot(A).moves.moved_ns == 0, "what it waited for others is no move of memory"
    assert harness.gpu_snapshot(B).moves.moved_ns == 20 * MILLISECOND_NS


def test_a_preempted_member_takes_the_others_along() -> None:
    """Broken: the others would compute without it for the rest of their turn though somebody else waits."""
    harness = make_harness("priority")
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    client(harness, A)
    pass_time(harness, 10)
    client(harness, B, priority=5)
    assert two.take(messages.Revoke)
    assert one.take(messages.Revoke)


def test_a_snapshot_tells_what_a_gang_does() -> None:
    """Broken: nobody could see why a GPU is kept, or whether a gang works at all."""
    harness = make_harness()
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    client(harness, A), client(harness, B)
    pass_time(harness, 10)
    snapshot = harness.scheduler.snapshot(harness.clock.now_ns)
    (gang,) = snapshot.gangs
    assert (gang.name, gang.clients, gang.gpus) == ("pair", (one.client, two.client), (A, B))
    assert (gang.state, gang.turns, snapshot.gang_turns) == ("running", 1, 1)
    assert [c.gang for c in snapshot.clients][:2] == ["pair", "pair"]


def test_a_gang_is_not_called_where_it_would_be_preempted() -> None:
    """Broken: a member of low class would be granted and revoked in one moment, again and again."""
    harness = make_harness("priority")
    low = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    high = client(harness, B, priority=5)
    pass_time(harness, 500)
    assert holder(harness, B) == high.client
    assert low[1].seat().statistics.leases <= 2
    assert holder(harness, A) == low[0].client


@pytest.mark.parametrize("policy", ["round_robin", "priority", "fair_share"])
def test_members_overlap_under_every_policy(policy: str) -> None:
    """Broken: gangs would work with one policy only."""
    harness = make_harness(policy)
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    client(harness, A), client(harness, A), client(harness, B)
    apart = together = 0

    def see() -> None:
        nonlocal apart, together
        pair = (holder(harness, A) == one.client, holder(harness, B) == two.client)
        apart += pair in ((True, False), (False, True))
        together += pair == (True, True)

    pass_time(harness, 500)
    pass_time(harness, 6000, see)
    assert together >= 1500
    assert apart <= together // 10
    assert harness.gpu_snapshot(A).rules.policy_failures == 0


def test_calls_take_no_more_time_than_the_policys_turns() -> None:
    """Broken: beside programs of short turns a gang would have most of a GPU to which it is only called."""
    harness = make_harness()
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    brief = client(harness, A), client(harness, B)
    patient = client(harness, B)
    for _ in range(6000):
        harness.milliseconds(1)
        for each in brief:
            if each.seat().phase == "holding":
                each.release(idle=True, wanted=True)
                each.take(messages.Revoke)
        obey(harness)
    used = [each.seat().statistics.used_ns // MILLISECOND_NS for each in (one, two, patient)]
    assert used[0] >= 2500, "on the other one it is chosen whenever it can be"
    assert used[1] <= used[2] + 2 * QUANTUM_MS, used


def test_a_member_that_comes_after_its_gangs_turn_runs_as_called() -> None:
    """Broken: its turn is neither the policy's nor owed, so such turns together keep others waiting without bound."""
    harness = make_harness()
    one = client(harness, A, gang="pair", wanted=False)
    two = harness.client(attach=False, gang="pair", mode=messages.MemoryMode.SWAP)
    two.attach(B)
    two.report(allocated=1000, resident=0, host=1000)
    client(harness, A)
    harness.milliseconds(QUANTUM_MS // 2)
    client(harness, B)
    one.request()
    two.request()
    pass_time(harness, QUANTUM_MS // 2)
    (order,) = two.take(messages.Restore)
    pass_time(harness, 3 * QUANTUM_MS)
    assert harness.notifications("gang_gathered")[0]["missing"] == 1
    two.moved(order.order_id, 1000)
    two.report(allocated=1000, resident=1000)
    assert holder(harness, B) == two.client
    pass_time(harness, QUANTUM_MS)
    assert harness.scheduler._node.gpus[B].gangs.debt_ns > 0


def test_who_waits_long_for_its_gang_goes_without_it() -> None:
    """Broken: a member would be passed over for as long as somebody hangs on a GPU that its mate wants."""
    harness = make_harness(gpus=3, drain_deadline_ns=60_000 * MILLISECOND_NS)
    client(harness, A), client(harness, B), client(harness, B), client(harness, C)
    hung = client(harness, B, gang="other")
    client(harness, C, gang="other")
    one = client(harness, A, gang="pair")
    client(harness, B, gang="pair")
    for _ in range(6000):
        harness.milliseconds(1)
        obey(harness, but=(hung,))
    assert (hung.seat().statistics.leases, hung.seat().phase) == (1, "revoking")
    assert one.seat().statistics.leases >= 5
    assert one.seat().statistics.max_wait_ns <= 12 * QUANTUM_MS * MILLISECOND_NS


def test_members_that_come_and_go_prolong_nobodys_turn() -> None:
    """Broken: each mate that asks and dies would give the one at work another quantum, and its rival none."""
    harness = make_harness()
    client(harness, B), client(harness, B)
    one, rival = client(harness, A, gang="pair"), client(harness, A)
    for step in range(1000):
        if step % 30 == 20:
            mate = client(harness, B, gang="pair")
            mate.die()
        harness.milliseconds(1)
        obey(harness)
    assert rival.seat().statistics.leases >= 3
    assert one.seat().statistics.max_wait_ns <= 4 * QUANTUM_MS * MILLISECOND_NS
    assert rival.seat().statistics.max_wait_ns <= 4 * QUANTUM_MS * MILLISECOND_NS


def test_who_was_alone_until_its_mate_came_is_called() -> None:
    """Broken: members whose drains wait for each other (a kernel of a collective ends when the other GPU's has begun)
    would have their turns alternately ever after, and compute nothing."""
    harness = make_harness()
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    rivals = client(harness, A), client(harness, B)

    def until(uuid: str, who: ScriptedClient, *slow: ScriptedClient) -> None:
        for _ in range(3 * QUANTUM_MS):
            if holder(harness, uuid) == who.client and who.seat().phase == "holding":
                return
            harness.milliseconds(1)
            obey(harness, but=slow)
        raise AssertionError("it never came to that")

    until(A, rivals[0])
    until(A, one)
    assert holder(harness, B) == two.client
    until(B, rivals[1], one)
    until(B, two, one)
    harness.milliseconds(2)
    assert one.seat().phase == "revoking", "it waits for the other half of what has begun"
    one.release(wanted=True)
    assert holder(harness, A) == rivals[0].client, "it has had its turn, and goes behind others"
    until(A, one, two)
    harness.milliseconds(2)
    assert two.seat().phase == "revoking"
    turns = len(harness.notifications("gang_gathered"))
    two.release(wanted=True)
    assert len(harness.notifications("gang_gathered")) == turns + 1
    assert (holder(harness, A), holder(harness, B)) == (one.client, two.client)
    harness.milliseconds(QUANTUM_MS)
    assert (one.seat().phase, two.seat().phase) == ("revoking", "revoking"), "both turns end in one moment"
    obey(harness)
    assert (holder(harness, A), holder(harness, B)) == (rivals[0].client, rivals[1].client)
    harness.milliseconds(QUANTUM_MS - 1)
    assert (holder(harness, A), holder(harness, B)) == (rivals[0].client, rivals[1].client), "what it took is owed"


def test_a_turn_that_is_renewed_may_be_interrupted() -> None:
    """Broken: who cannot be interrupted once would keep a gang out for as long as its policy renews."""
    harness = make_harness("priority")
    low = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    high = client(harness, B, priority=1, wanted=False)
    client(harness, A)
    pass_time(harness, 150)
    high.request()
    pass_time(harness, 5 * QUANTUM_MS)
    assert holder(harness, B) == high.client
    seat = harness.scheduler._node.gpus[B].leases.holder  # not to be seen from outside
    assert seat is not None
    assert not seat.gang_turn.protected_from_gangs
    assert low[0].seat().statistics.leases >= 2


def test_a_favour_that_a_gang_cannot_take_yet_is_no_favour() -> None:
    """Broken: under `priority` a gang that is passed over would use up the favours of all who wait."""
    policy = create("priority", A)
    quantum_ns = QUANTUM_MS * MILLISECOND_NS
    view = GpuView(A, 1, quantum_ns, contended=True)
    waiting = [
        ClientView(number, "", priority, 0, since, None, None, 0, 0, 0, 0, 0)
        for number, priority, since in ((1, 0, 0), (2, 0, 1), (3, 5, 2))
    ]
    now_ns = 21 * quantum_ns
    assert policy.choose(waiting, view, now_ns) == Choice(1)
    assert policy.choose(waiting[1:], view, now_ns) == Choice(2), "it has waited as long"
    assert policy.choose(waiting[1:], view, now_ns + quantum_ns) == Choice(3), "which was the favour for this time"


def test_who_waits_for_its_mates_may_be_idle_longer() -> None:
    """Broken: a rank that waits some milliseconds for another one would lose the turn of both to a rival."""
    harness = make_harness(idle_release_ns=2 * MILLISECOND_NS)
    one, two = client(harness, A, gang="pair"), client(harness, B, wanted=False)
    assert one.take(messages.GpuSettings)[-1].idle_release_ns == 2 * MILLISECOND_NS, "it has no mates"
    harness.handle(events.GangSet(two.client, "pair"))
    rival = client(harness, A)
    pass_time(harness, 2 * QUANTUM_MS + 5)
    assert holder(harness, A) == one.client
    assert one.take(messages.GpuSettings)[-1].idle_release_ns == 16 * MILLISECOND_NS
    assert rival.take(messages.GpuSettings)[-1].idle_release_ns == 2 * MILLISECOND_NS
    harness.handle(events.GangSet(two.client, ""))
    pass_time(harness, 2 * QUANTUM_MS)
    assert one.take(messages.GpuSettings)[-1].idle_release_ns == 2 * MILLISECOND_NS
