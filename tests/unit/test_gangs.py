"""Gangs: together on their GPUs or not at all, without harm to others."""

from __future__ import annotations

import pytest

from nvshare.coordinator.engine.scheduler import Settings
from nvshare.coordinator.model import events
from nvshare.coordinator.model.state import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.harness import Desk, ScriptedClient
from nvshare.scheduler_policies.api import Choice, ClientView, GpuView
from nvshare.scheduler_policies.registry import create

QUANTUM_MS = 100
A, B, C = "GPU-0", "GPU-1", "GPU-2"


def make_desk(policy: str = "round_robin", gpus: int = 2, **more: object) -> Desk:
    """Some GPUs, every check on."""
    desk = Desk(create, Settings(check_invariants=True, policy=policy, **more))  # type: ignore[arg-type]
    for number in range(gpus):
        desk.gpu(f"GPU-{number}")
    return desk


def client(desk: Desk, uuid: str, *, gang: str = "", wanted: bool = True, **more: int) -> ScriptedClient:
    """One that uses this GPU."""
    made = desk.client(attach=False, gang=gang, **more)  # type: ignore[arg-type]
    made.attach(uuid, wanted=wanted)
    return made


def holder(desk: Desk, uuid: str) -> int | None:
    """Who computes there."""
    holders = desk.sight(uuid).holders
    assert len(holders) <= 1
    return holders[0] if holders else None


def obey(desk: Desk, *, but: tuple[ScriptedClient, ...] = ()) -> None:
    """Everybody who was asked for a lease gives it back, and wants it again."""
    for each in list(desk.clients.values()):
        for revoke in each.take(messages.Revoke):
            if each not in but:
                each.release(revoke.lease_id, gpu=revoke.gpu, wanted=True)


def pass_time(desk: Desk, milliseconds: int, see: object = None) -> None:
    """In steps of a millisecond; revocations are obeyed at once."""
    for _ in range(milliseconds):
        desk.milliseconds(1)
        obey(desk)
        if callable(see):
            see()


def test_members_are_granted_and_revoked_in_one_moment() -> None:
    """Broken: one member would compute while the other waits for its GPU."""
    desk = make_desk()
    client(desk, A)
    client(desk, B)
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    seen = []

    def see() -> None:
        at_work = (holder(desk, A) == one.client, holder(desk, B) == two.client)
        seen.append(at_work)

    pass_time(desk, 2000, see)
    together = seen.count((True, True))
    assert seen.count((True, False)) == seen.count((False, True)) == 0
    assert 900 <= together <= 1100, "half of the time, as each of two has under round robin"
    assert desk.notes("gang_gathered")


def test_a_gang_waits_for_nobody_who_does_not_want() -> None:
    """Broken: an idle member would keep the others from their turns."""
    desk = make_desk()
    one, idle = client(desk, A, gang="pair"), client(desk, B, gang="pair", wanted=False)
    rival = client(desk, A)
    pass_time(desk, 1000)
    assert one.seat().leases >= 4
    assert rival.seat().leases >= 4
    assert idle.seat().leases == 0


@pytest.mark.parametrize("trouble", ["dead", "paused", "hung"])
def test_a_member_in_trouble_blocks_nobody(trouble: str) -> None:
    """Broken: one process that hangs, dies or is paused would stop the others of its gang, and who waits for them."""
    desk = make_desk(drain_deadline_ns=300 * MILLISECOND_NS)
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    rivals = client(desk, A), client(desk, B)
    pass_time(desk, 50)
    assert (holder(desk, A), holder(desk, B)) == (one.client, two.client)
    if trouble == "dead":
        two.die()
    elif trouble == "paused":
        desk.handle(events.Paused(two.client))
        obey(desk)
    hung = (two,) if trouble == "hung" else ()
    before = one.seat().leases, rivals[0].seat().leases, rivals[1].seat().used_ns
    for _ in range(2000):
        desk.milliseconds(1)
        obey(desk, but=hung)
    assert one.seat().leases >= before[0] + 5
    assert rivals[0].seat().leases >= before[1] + 5
    assert rivals[1].seat().used_ns >= before[2] + 500 * MILLISECOND_NS


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_member_runs_alone_where_nobody_comes_back(comes_back: bool) -> None:
    """Broken: a rival that gives its lease back and asks again with its next launch finds a member at work that can do
    nothing without its mates; or the GPU stays idle beside a member that waits."""
    desk = make_desk(gpus=3)
    desk.handle(events.QuantumSet(100 * QUANTUM_MS * MILLISECOND_NS, C))
    client(desk, B, gang="other"), client(desk, C, gang="other")
    rival = client(desk, A)
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    pass_time(desk, QUANTUM_MS - 1)
    desk.milliseconds(1)
    (revoke,) = rival.take(messages.Revoke)
    rival.release(revoke.lease_id)
    assert holder(desk, A) is None
    desk.milliseconds(1)
    if comes_back:
        rival.request()
    desk.milliseconds(1)
    assert two.seat().leases == 0, "its GPU is another gang's for long"
    assert holder(desk, A) == (rival if comes_back else one).client


def test_others_keep_their_turns() -> None:
    """Broken: a gang that is alone on one GPU would always be next on the other one."""
    desk = make_desk()
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    rivals = [client(desk, B) for _ in range(3)]
    pass_time(desk, 8000)
    times = [rival.seat().used_ns for rival in rivals]
    assert min(times) >= 8000 * MILLISECOND_NS // 8
    assert max(times) - min(times) <= 3 * QUANTUM_MS * MILLISECOND_NS
    assert two.seat().used_ns >= 8000 * MILLISECOND_NS // 5
    assert one.seat().used_ns > two.seat().used_ns, "nobody else wants its GPU"


def test_who_is_interrupted_keeps_its_place_and_has_the_rest() -> None:
    """Broken: a gang's call would cost whoever computes there its turn."""
    desk = make_desk()
    rival, patient = client(desk, B), client(desk, B)
    two = client(desk, B, gang="pair")
    client(desk, A)
    desk.milliseconds(30)
    one = client(desk, A, gang="pair")
    pass_time(desk, 71)
    assert (holder(desk, A), holder(desk, B)) == (one.client, two.client)
    assert rival.seat().used_ns == QUANTUM_MS * MILLISECOND_NS
    desk2 = make_desk()
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
    desk = make_desk()
    first = client(desk, A, gang="x"), client(desk, B, gang="x")
    second = client(desk, B, gang="y"), client(desk, A, gang="y")
    halves = 0

    def see() -> None:
        nonlocal halves
        pair = holder(desk, A), holder(desk, B)
        whole = [(first[0].client, first[1].client), (second[1].client, second[0].client)]
        halves += None not in pair and pair not in whole

    pass_time(desk, 4000, see)
    for each in (*first, *second):
        assert each.seat().leases >= 10
    assert halves <= 2 * QUANTUM_MS, "before they had found their turns"


def test_a_ring_of_gangs_does_not_lock() -> None:
    """Broken: three gangs on three pairs of GPUs would wait for each other in a circle, or one of them for ever."""
    desk = make_desk(gpus=3)
    ring = []
    for name, pair in (("x", (A, B)), ("y", (B, C)), ("z", (C, A))):
        ring += [client(desk, uuid, gang=name) for uuid in pair]
    lone = [client(desk, uuid) for uuid in (A, B, C)]
    pass_time(desk, 10_000)
    for each in (*ring, *lone):
        assert each.seat().leases >= 8
        assert each.seat().used_ns >= 1000 * MILLISECOND_NS


def test_one_program_on_two_gpus_is_a_gang_if_it_asks() -> None:
    """Broken: a program that exchanges data between its GPUs would have them at different times."""
    desk = make_desk()
    wide = desk.client(attach=False, gang="wide")
    wide.attach(A, gpu=0, wanted=True)
    wide.attach(B, gpu=1, wanted=True)
    client(desk, A), client(desk, B), client(desk, B)
    apart = 0

    def see() -> None:
        nonlocal apart
        apart += (holder(desk, A) == wide.client) != (holder(desk, B) == wide.client)

    pass_time(desk, 300)
    pass_time(desk, 3000, see)
    assert apart == 0
    assert wide.seat(0).leases >= 5


def test_members_on_one_gpu_take_turns() -> None:
    """Broken: invariant 1: a gang would put two holders on one GPU."""
    desk = make_desk()
    one, also, two = (client(desk, uuid, gang="trio") for uuid in (A, A, B))
    pass_time(desk, 2000)
    for each in (one, also, two):
        assert each.seat().used_ns >= 500 * MILLISECOND_NS


def test_a_member_that_comes_late_joins_the_turn() -> None:
    """Broken: it would wait for a turn of its own while the others compute without it."""
    desk = make_desk()
    client(desk, A)
    rival = client(desk, B)
    one = client(desk, A, gang="pair")
    two = client(desk, B, gang="pair", wanted=False)
    pass_time(desk, QUANTUM_MS + 10)
    assert (holder(desk, A), holder(desk, B)) == (one.client, rival.client)
    two.request()
    obey(desk)
    assert (holder(desk, A), holder(desk, B)) == (one.client, two.client)
    two.release(idle=True)
    pass_time(desk, 30)
    assert holder(desk, B) == rival.client
    assert holder(desk, A) == one.client, "who is idle is not waited for"
    two.request()
    obey(desk)
    assert holder(desk, B) == rival.client, "but nobody is interrupted twice in a row"
    pass_time(desk, 2 * QUANTUM_MS)
    assert two.seat().leases >= 2


def test_leases_end_in_one_moment() -> None:
    """Broken: one member would compute on while the other is out."""
    desk = make_desk()
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    rival = client(desk, A)
    late = client(desk, B)
    desk.handle(events.QuantumSet(10 * MILLISECOND_NS, A))
    pass_time(desk, 1000)
    while (holder(desk, A), holder(desk, B)) != (one.client, two.client):
        pass_time(desk, 1)
    while not one.take(messages.Revoke):
        assert not two.take(messages.Revoke)
        desk.milliseconds(1)
    assert two.take(messages.Revoke)
    assert min(rival.seat().leases, late.seat().leases) >= 3
    turns = [note for note in desk.notes("gang_gathered") if note["gpus"] == 2]
    assert turns[-1]["quantum_ns"] == QUANTUM_MS * MILLISECOND_NS, "as long as the longest quantum of its GPUs"


def test_a_changed_gang_counts_at_once() -> None:
    """Broken: an annotation that is changed while the pod runs would do nothing, or leave the old gang behind."""
    desk = make_desk()
    one, two = client(desk, A, gang="pair"), client(desk, B)
    client(desk, A), client(desk, B)
    pass_time(desk, 500)
    assert not desk.notes("gang_gathered")
    desk.handle(events.GangSet(two.client, "pair"))
    pass_time(desk, 500)
    turns = len(desk.notes("gang_gathered"))
    assert turns >= 2
    desk.handle(events.GangSet(one.client, ""))
    desk.handle(events.GangSet(two.client, ""))
    pass_time(desk, 500)
    assert len(desk.notes("gang_gathered")) == turns
    assert desk.scheduler.snapshot(desk.clock.now_ns).gangs == ()


def test_nobody_waits_for_a_hung_rival() -> None:
    """Broken: a GPU would idle until another GPU's client has drained, for ten seconds if that hangs."""
    desk = make_desk(drain_deadline_ns=5000 * MILLISECOND_NS)
    one = client(desk, A, gang="pair")
    hung = client(desk, B)
    two = client(desk, B, gang="pair")
    rival = client(desk, A)
    for _ in range(QUANTUM_MS + 5):
        desk.milliseconds(1)
        obey(desk, but=(hung,))
    start = one.seat().used_ns + rival.seat().used_ns
    for _ in range(3000):
        desk.milliseconds(1)
        obey(desk, but=(hung,))
    assert one.seat().used_ns + rival.seat().used_ns - start >= 1500 * MILLISECOND_NS
    assert two.seat().leases == 0
    hung.release(wanted=True)
    pass_time(desk, 500)
    assert two.seat().leases >= 1


def test_memory_comes_before_the_common_grant() -> None:
    """Broken: a member whose memory is there would run while the other one's still moves."""
    desk = make_desk()
    one = client(desk, A, gang="pair", wanted=False)
    two = desk.client(attach=False, gang="pair", mode=messages.MemoryMode.SWAP)
    two.attach(B)
    two.report(allocated=1000, resident=0, host=1000)
    client(desk, A)
    client(desk, B)
    one.request()
    two.request()
    pass_time(desk, QUANTUM_MS)
    (order,) = two.take(messages.Restore)
    assert (holder(desk, A), holder(desk, B)) == (None, None), "both wait for the memory"
    desk.milliseconds(20)
    two.moved(order.order_id, 1000)
    two.report(allocated=1000, resident=1000)
    assert (holder(desk, A), holder(desk, B)) == (one.client, two.client)
    (note,) = desk.notes("gang_gathered")
    assert (note["gpus"], note["gathered_ns"]) == (2, 20 * MILLISECOND_NS)
    assert desk.sight(A).moved_ns == 0, "what it waited for others is no move of memory"
    assert desk.sight(B).moved_ns == 20 * MILLISECOND_NS


def test_a_preempted_member_takes_the_others_along() -> None:
    """Broken: the others would compute without it for the rest of their turn though somebody else waits."""
    desk = make_desk("priority")
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    client(desk, A)
    pass_time(desk, 10)
    client(desk, B, priority=5)
    assert two.take(messages.Revoke)
    assert one.take(messages.Revoke)


def test_a_snapshot_tells_what_a_gang_does() -> None:
    """Broken: nobody could see why a GPU is kept, or whether a gang works at all."""
    desk = make_desk()
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    client(desk, A), client(desk, B)
    pass_time(desk, 10)
    snapshot = desk.scheduler.snapshot(desk.clock.now_ns)
    (gang,) = snapshot.gangs
    assert (gang.name, gang.clients, gang.gpus) == ("pair", (one.client, two.client), (A, B))
    assert (gang.state, gang.turns, snapshot.gang_turns) == ("running", 1, 1)
    assert [c.gang for c in snapshot.clients][:2] == ["pair", "pair"]


def test_a_gang_is_not_called_where_it_would_be_preempted() -> None:
    """Broken: a member of low class would be granted and revoked in one moment, again and again."""
    desk = make_desk("priority")
    low = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    high = client(desk, B, priority=5)
    pass_time(desk, 500)
    assert holder(desk, B) == high.client
    assert low[1].seat().leases <= 2
    assert holder(desk, A) == low[0].client


@pytest.mark.parametrize("policy", ["round_robin", "priority", "fair_share"])
def test_members_overlap_under_every_policy(policy: str) -> None:
    """Broken: gangs would work with one policy only."""
    desk = make_desk(policy)
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    client(desk, A), client(desk, A), client(desk, B)
    apart = together = 0

    def see() -> None:
        nonlocal apart, together
        pair = (holder(desk, A) == one.client, holder(desk, B) == two.client)
        apart += pair in ((True, False), (False, True))
        together += pair == (True, True)

    pass_time(desk, 500)
    pass_time(desk, 6000, see)
    assert together >= 1500
    assert apart <= together // 10
    assert desk.sight(A).policy_failures == 0


def test_calls_take_no_more_time_than_the_policys_turns() -> None:
    """Broken: beside programs of short turns a gang would have most of a GPU to which it is only called."""
    desk = make_desk()
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    brief = client(desk, A), client(desk, B)
    patient = client(desk, B)
    for _ in range(6000):
        desk.milliseconds(1)
        for each in brief:
            if each.seat().phase == "holding":
                each.release(idle=True, wanted=True)
                each.take(messages.Revoke)
        obey(desk)
    used = [each.seat().used_ns // MILLISECOND_NS for each in (one, two, patient)]
    assert used[0] >= 2500, "on the other one it is chosen whenever it can be"
    assert used[1] <= used[2] + 2 * QUANTUM_MS, used


def test_who_waits_long_for_its_gang_goes_without_it() -> None:
    """Broken: a member would be passed over for as long as somebody hangs on a GPU that its mate wants."""
    desk = make_desk(gpus=3, drain_deadline_ns=60_000 * MILLISECOND_NS)
    client(desk, A), client(desk, B), client(desk, B), client(desk, C)
    hung = client(desk, B, gang="other")
    client(desk, C, gang="other")
    one = client(desk, A, gang="pair")
    client(desk, B, gang="pair")
    for _ in range(6000):
        desk.milliseconds(1)
        obey(desk, but=(hung,))
    assert (hung.seat().leases, hung.seat().phase) == (1, "revoking")
    assert one.seat().leases >= 5
    assert one.seat().max_wait_ns <= 12 * QUANTUM_MS * MILLISECOND_NS


def test_members_that_come_and_go_prolong_nobodys_turn() -> None:
    """Broken: each mate that asks and dies would give the one at work another quantum, and its rival none."""
    desk = make_desk()
    client(desk, B), client(desk, B)
    one, rival = client(desk, A, gang="pair"), client(desk, A)
    for step in range(1000):
        if step % 30 == 20:
            mate = client(desk, B, gang="pair")
            mate.die()
        desk.milliseconds(1)
        obey(desk)
    assert rival.seat().leases >= 3
    assert one.seat().max_wait_ns <= 4 * QUANTUM_MS * MILLISECOND_NS
    assert rival.seat().max_wait_ns <= 4 * QUANTUM_MS * MILLISECOND_NS


def test_who_was_alone_until_its_mate_came_is_called() -> None:
    """Broken: members whose drains wait for each other (a kernel of a collective ends when the other GPU's has begun)
    would have their turns alternately ever after, and compute nothing."""
    desk = make_desk()
    one, two = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    rivals = client(desk, A), client(desk, B)

    def until(uuid: str, who: ScriptedClient, *slow: ScriptedClient) -> None:
        for _ in range(3 * QUANTUM_MS):
            if holder(desk, uuid) == who.client and who.seat().phase == "holding":
                return
            desk.milliseconds(1)
            obey(desk, but=slow)
        raise AssertionError("it never came to that")

    until(A, rivals[0])
    until(A, one)
    assert holder(desk, B) == two.client
    until(B, rivals[1], one)
    until(B, two, one)
    desk.milliseconds(2)
    assert one.seat().phase == "revoking", "it waits for the other half of what has begun"
    one.release(wanted=True)
    assert holder(desk, A) == rivals[0].client, "it has had its turn, and goes behind others"
    until(A, one, two)
    desk.milliseconds(2)
    assert two.seat().phase == "revoking"
    turns = len(desk.notes("gang_gathered"))
    two.release(wanted=True)
    assert len(desk.notes("gang_gathered")) == turns + 1
    assert (holder(desk, A), holder(desk, B)) == (one.client, two.client)
    desk.milliseconds(QUANTUM_MS)
    assert (one.seat().phase, two.seat().phase) == ("revoking", "revoking"), "both turns end in one moment"
    obey(desk)
    assert (holder(desk, A), holder(desk, B)) == (rivals[0].client, rivals[1].client)
    desk.milliseconds(QUANTUM_MS - 1)
    assert (holder(desk, A), holder(desk, B)) == (rivals[0].client, rivals[1].client), "what it took is owed"


def test_a_turn_that_is_renewed_may_be_interrupted() -> None:
    """Broken: who cannot be interrupted once would keep a gang out for as long as its policy renews."""
    desk = make_desk("priority")
    low = client(desk, A, gang="pair"), client(desk, B, gang="pair")
    high = client(desk, B, priority=1, wanted=False)
    client(desk, A)
    pass_time(desk, 150)
    high.request()
    pass_time(desk, 5 * QUANTUM_MS)
    assert holder(desk, B) == high.client
    seat = desk.scheduler._node.gpus[B].holder  # not to be seen from outside
    assert seat is not None
    assert not seat.immune
    assert low[0].seat().leases >= 2


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
    desk = make_desk(idle_release_ns=2 * MILLISECOND_NS)
    one, two = client(desk, A, gang="pair"), client(desk, B, wanted=False)
    assert one.take(messages.GpuSettings)[-1].idle_release_ns == 2 * MILLISECOND_NS, "it has no mates"
    desk.handle(events.GangSet(two.client, "pair"))
    rival = client(desk, A)
    pass_time(desk, 2 * QUANTUM_MS + 5)
    assert holder(desk, A) == one.client
    assert one.take(messages.GpuSettings)[-1].idle_release_ns == 16 * MILLISECOND_NS
    assert rival.take(messages.GpuSettings)[-1].idle_release_ns == 2 * MILLISECOND_NS
    desk.handle(events.GangSet(two.client, ""))
    pass_time(desk, 2 * QUANTUM_MS)
    assert one.take(messages.GpuSettings)[-1].idle_release_ns == 2 * MILLISECOND_NS
