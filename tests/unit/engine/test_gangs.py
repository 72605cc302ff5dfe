"""Gang slots: the rules of engine/gangs/slots.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.registry import BUILT_IN, create
from tests.harness import Harness, ScriptedClient, steps

QUANTUM_MS = 100
A, B, C = "GPU-0", "GPU-1", "GPU-2"


def make_harness(policy: str = "round_robin", gpus: int = 2, capacity: int = 1 << 30, **more: object) -> Harness:
    """Some GPUs, every check on."""
    harness = Harness(create, policy=policy, **more)
    for number in range(gpus):
        harness.gpu(f"GPU-{number}", capacity)
    return harness


def client(harness: Harness, uuid: str, *, gang: str = "", wanted: bool = True, **more: object) -> ScriptedClient:
    """One that uses this GPU."""
    made = harness.client(attach=False, gang=gang, **more)  # type: ignore[arg-type]
    made.attach(uuid, wanted=wanted)
    return made


def runs(*clients: ScriptedClient) -> tuple[bool, ...]:
    """Whether each one computes."""
    return tuple(each.seat().phase == "holding" for each in clients)


def all_run(*clients: ScriptedClient) -> bool:
    """Whether all compute."""
    return all(runs(*clients))


def pass_time(harness: Harness, milliseconds: int, see: object = None, *, but: tuple[ScriptedClient, ...] = ()) -> None:
    """In steps of a millisecond.  A client that is asked for a lease gives it back and wants it again, except `but`."""
    for _ in range(milliseconds):
        harness.milliseconds(1)
        for each in list(harness.clients.values()):
            for revoke in each.take(messages.Revoke) if each not in but else ():
                each.release(revoke.lease_id, gpu=revoke.gpu, wanted=True)
        if callable(see):
            see()


def wait_for(harness: Harness, condition: Callable[[], bool]) -> None:
    """As `pass_time`, until the condition holds."""
    for _ in range(5000):
        if condition():
            return
        pass_time(harness, 1)
    raise AssertionError("the condition did not become true")


@pytest.mark.parametrize("sharing", [Sharing.EXCLUSIVE, Sharing.AUTO])
def test_members_start_together_and_take_turns_with_others(sharing: Sharing) -> None:
    """Broken: one member would compute while the other one waits for its GPU, or a rival would get no turns."""
    harness = make_harness(sharing=sharing)
    rivals = client(harness, A), client(harness, B)
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    seen: list[tuple[bool, ...]] = []
    pass_time(harness, 2000, lambda: seen.append(runs(*pair)))
    assert seen.count((True, False)) == seen.count((False, True)) == 0
    assert 700 <= seen.count((True, True)) <= 1300, "about half of the time"
    assert all(rival.seat().statistics.used_ns >= 700 * MILLISECOND_NS for rival in rivals)
    assert harness.notifications("gang_gathered")


def test_a_program_whose_gpus_reach_each_other_is_a_gang_of_itself() -> None:
    """Broken: it would have the lease of one GPU and wait for that of the other, with its memory under both."""
    harness = make_harness(sharing=Sharing.EXCLUSIVE)
    rivals = client(harness, A), client(harness, B)
    linked = client(harness, A)
    linked.attach(B, gpu=1, wanted=True)
    for gpu in (0, 1):
        linked.say(messages.State(gpu, 0, 0, 0, 0, 0, linked=True))
    seen: list[tuple[bool, bool]] = []

    def see() -> None:
        seen.append((linked.seat(0).phase == "holding", linked.seat(1).phase == "holding"))

    pass_time(harness, 2000, see)
    assert seen.count((True, False)) == seen.count((False, True)) == 0
    assert 700 <= seen.count((True, True)) <= 1300, "about half of the time"
    assert all(rival.seat().statistics.used_ns >= 700 * MILLISECOND_NS for rival in rivals)


def test_a_member_without_mates_runs_in_turns_as_others_do() -> None:
    """Broken: an idle mate would keep a member, or its rival, from the GPU."""
    harness = make_harness()
    one = client(harness, A, gang="pair")
    client(harness, B, gang="pair", wanted=False)
    rival = client(harness, A)
    pass_time(harness, 1000)
    assert one.seat().statistics.leases >= 4
    assert rival.seat().statistics.leases >= 4
    assert not harness.notifications("gang_gathered")


def test_all_or_none() -> None:
    """Broken: a member would run while another gang has its mate's GPU, though a rival wants the member's GPU."""
    harness = make_harness(gpus=3)
    others = client(harness, B, gang="other"), client(harness, C, gang="other")
    client(harness, C)
    rival = client(harness, A)
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    seen: list[tuple[bool, ...]] = []

    def see() -> None:
        seen.append((*runs(*pair), *runs(rival)))
        assert not (runs(*pair)[1] and runs(*others)[0])

    pass_time(harness, 3000, see)
    assert not [state for state in seen if state[:2] in ((True, False), (False, True))]
    assert (True, True, False) in seen
    assert (False, False, True) in seen


def test_a_client_that_a_slot_interrupts_keeps_its_place() -> None:
    """Broken: a gang's slot would cost the program that computes there its turn."""
    harness = make_harness()
    harness.handle(events.Set("quantum", 10 * QUANTUM_MS * MILLISECOND_NS, B))
    first, second = client(harness, B), client(harness, B)
    client(harness, A)
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    wait_for(harness, lambda: bool(harness.notifications("gang_gathered")))
    assert runs(*pair) == (True, True)
    assert harness.notifications("revoked")[-1]["why"] == "slot"
    wait_for(harness, lambda: runs(pair[1]) == (False,))
    pass_time(harness, 2)
    assert runs(first, second) == (True, False)


def test_between_two_slots_the_policy_has_a_quantum() -> None:
    """Broken: a gang beside programs of short turns would have most of a GPU."""
    harness = make_harness()
    rivals = client(harness, A), client(harness, B)
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    spans = [0]

    def see() -> None:
        if not any(runs(*pair)):
            spans[-1] += 1
        elif spans[-1]:
            spans.append(0)

    pass_time(harness, 3000, see)
    whole = [span for span in spans[1:-1] if span]
    assert len(whole) >= 5
    assert min(whole) >= QUANTUM_MS - 5
    assert all(rival.seat().statistics.leases >= 5 for rival in rivals)


def test_gangs_in_a_ring_take_turns_and_the_one_that_waits_longest_is_first() -> None:
    """Broken: a deadlock: each would hold one GPU and wait for another one, or one gang would wait for ever."""
    harness = make_harness(gpus=3)
    gangs = [
        (client(harness, left, gang=name), client(harness, right, gang=name))
        for name, left, right in (("x", A, B), ("y", B, C), ("z", C, A))
    ]
    pass_time(harness, 3000)
    for pair in gangs:
        assert min(member.seat().statistics.used_ns for member in pair) >= 600 * MILLISECOND_NS
    first_two = list(dict.fromkeys(note["gang"] for note in harness.notifications("gang_due")))
    assert set(first_two) <= {"x", "y", "z"}
    turns = [note["gang"] for note in harness.notifications("gang_gathered")]
    assert all(turns[at] != turns[at + 1] for at in range(len(turns) - 1)), "no gang twice while another one is due"


def test_a_gang_that_is_due_and_runs_already_keeps_no_other_gang_from_its_gpus() -> None:
    """Broken: a deadlock: a gang would wait for ever for the slot of one that is due longer and is not named again."""
    harness = make_harness("auto", gpus=3)
    harness.handle(events.Set("quantum", QUANTUM_MS // 2 * MILLISECOND_NS, A))
    others = client(harness, B, gang="other"), client(harness, C, gang="other"), client(harness, C)
    rival = client(harness, A)
    first = client(harness, A, gang="first"), client(harness, B, gang="first")
    wait_for(harness, lambda: any(note["gang"] == "first" for note in harness.notifications("gang_due")))
    for each in (rival, *others):
        each.die()
    pass_time(harness, 2 * QUANTUM_MS)
    assert runs(*first) == (True, True)
    second = client(harness, A, gang="second"), client(harness, B, gang="second")
    wait_for(harness, lambda: runs(*second) == (True, True))


def test_between_slots_members_of_gangs_have_whole_turns() -> None:
    """Broken: each plan passes over the member that runs, since its gang waits for its slot, and names the other one:
    they interrupt each other with every drain."""
    harness = make_harness("auto", gpus=3, sharing=Sharing.AUTO)
    members = []
    for gang, uuid in (("one", A), ("one", B), ("two", A), ("two", C), ("three", B), ("three", C)):
        members.append(client(harness, uuid, gang=gang))
        members[-1].report(allocated=600 << 20, resident=600 << 20)
    pass_time(harness, 5 * QUANTUM_MS)
    assert sum(member.seat().statistics.leases for member in members) <= 6 + 3 * 5


def test_a_slot_does_not_wait_for_a_debt_that_nobody_works_off() -> None:
    """Broken: memory moves for a client outside the slot, which keeps the slot's gang out because switches cost too
    much; the client gets no lease during the slot, so nobody runs and the timer fires without end."""
    harness = make_harness(capacity=100)
    other, rival = client(harness, A, mode=MemoryMode.SWAP), client(harness, B)
    other.report(allocated=60, resident=60)
    first, second = (
        [client(harness, uuid, gang=gang, wanted=False, mode=MemoryMode.SWAP) for uuid in (A, B)]
        for gang in ("first", "second")
    )
    for member in (first[0], second[0]):
        member.report(allocated=60, resident=0, host=60)
    for member in first:
        member.request()
    gpu = harness.scheduler._node.gpus[A]
    switching = gpu.switching
    wait_for(harness, lambda: switching.switch is not None and switching.switch.seat.client.facts.gang == "first")
    gpu.switching.credit.credit_ns = -1e9
    for member in second:
        member.request()
    first[1].die()
    rival.die()
    pass_time(harness, 2 * QUANTUM_MS)
    other.obeys()
    first[0].obeys()
    assert runs(first[0]) == (True,), "its memory is there, and it works off the debt"
    wait_for(harness, lambda: gpu.gang is not None and gpu.gang.name == "second")


@pytest.mark.parametrize("trouble", ["dead", "paused", "idle", "hung"])
def test_a_member_in_trouble_blocks_nobody(trouble: str) -> None:
    """Broken: one process that hangs, dies or is paused would stop its gang and the clients that wait for that."""
    harness = make_harness(drain_deadline_ns=300 * MILLISECOND_NS)
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    rivals = client(harness, A), client(harness, B)
    wait_for(harness, lambda: runs(one, two) == (True, True))
    if trouble == "dead":
        two.die()
    elif trouble == "paused":
        harness.handle(events.Set("paused", True, client=two.client))
    elif trouble == "idle":
        two.release(idle=True)
    hung = (two,) if trouble == "hung" else ()
    before = one.seat().statistics.leases, rivals[0].seat().statistics.leases, rivals[1].seat().statistics.used_ns
    pass_time(harness, 2000, but=hung)
    assert one.seat().statistics.leases >= before[0] + 5
    assert rivals[0].seat().statistics.leases >= before[1] + 5
    assert rivals[1].seat().statistics.used_ns >= before[2] + 500 * MILLISECOND_NS


def test_members_that_are_ready_wait_for_the_others_for_a_quantum_at_most() -> None:
    """Broken: a GPU would idle until another GPU's client has drained, for ten seconds if that hangs."""
    harness = make_harness()
    client(harness, A)
    hung = client(harness, B)
    one, two = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    idle = [0]

    def see() -> None:
        idle[0] += harness.gpu_snapshot(A).leases.holders == ()

    pass_time(harness, 1000, see, but=(hung,))
    assert idle[0] <= len(harness.notifications("gang_gathered")) * (QUANTUM_MS + 1)
    assert one.seat().statistics.leases >= 2
    assert two.seat().statistics.leases == 0


def test_a_slot_lasts_for_a_quantum_after_the_memory_has_come() -> None:
    """Broken: a gang whose memory moves before its slots would have no time together."""
    harness = make_harness(capacity=100)
    client(harness, A)
    rival = client(harness, B, mode=MemoryMode.SWAP)
    rival.report(allocated=60, resident=60)
    one = client(harness, A, gang="pair")
    two = client(harness, B, gang="pair", mode=MemoryMode.SWAP, wanted=False)
    two.report(allocated=60, resident=40, host=20)
    two.request()

    def moves() -> bool:
        pass_time(harness, 1)
        return bool(rival.told())

    harness.until(moves)
    harness.milliseconds(QUANTUM_MS // 2)
    assert runs(two) == (False,)
    rival.obeys()
    two.obeys()
    for _ in range(QUANTUM_MS - 1):
        pass_time(harness, 1)
        assert runs(one, two) == (True, True)


def test_programs_that_stay_in_a_slot_do_not_interrupt_each_other() -> None:
    """Broken: `auto` gives one of two interactive programs a turn, and the slot would keep only the other one, in turns
    of a few milliseconds."""
    harness = make_harness("auto", capacity=100, sharing=Sharing.AUTO)
    small = [client(harness, A) for _ in range(2)]
    large = client(harness, A), client(harness, B)
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    for each in (*small, *large, *pair):
        size = 6 if each in small else 60
        each.report(allocated=size, resident=size)
    for each in small:
        harness.handle(events.Set("class", "interactive", client=each.client))
    pass_time(harness, 3000)
    assert all(each.seat().statistics.leases >= 3 for each in (*large, *pair))
    assert all(each.seat().statistics.leases <= 100 for each in small)


@pytest.mark.parametrize("sharing", [Sharing.EXCLUSIVE, Sharing.AUTO])
def test_members_on_one_gpu_run_together(sharing: Sharing) -> None:
    """Broken: two ranks on one GPU would take turns, and each collective would wait for a drain's deadline."""
    harness = make_harness(gpus=1, sharing=sharing)
    pair = client(harness, A, gang="pair"), client(harness, A, gang="pair")
    rival = client(harness, A)
    seen: list[tuple[bool, ...]] = []
    pass_time(harness, 2000, lambda: seen.append(runs(*pair)))
    assert seen.count((True, True)) >= 700
    assert seen.count((True, False)) + seen.count((False, True)) <= 2 * QUANTUM_MS
    assert rival.seat().statistics.used_ns >= 700 * MILLISECOND_NS


def test_a_gang_alone_on_a_gpu_is_left_alone() -> None:
    """Broken: two ranks that nobody disturbs would stop at each quantum, or the timer fires without end."""
    harness = make_harness(gpus=1)
    pair = client(harness, A, gang="pair"), client(harness, A, gang="pair")
    pass_time(harness, 5 * QUANTUM_MS)
    assert runs(*pair) == (True, True)
    assert harness.timer_ns is None
    assert sum(each.seat().statistics.leases for each in pair) <= 3
    client(harness, A)
    wait_for(harness, lambda: runs(*pair) == (False, False))


def test_a_drain_that_waits_for_a_mate_on_the_same_gpu_ends_soon() -> None:
    """Broken: a collective that one of two ranks on one GPU has launched at the end of the slot keeps the other one out
    until the drain's deadline, ten seconds each time."""
    harness = make_harness(gpus=1)
    one, two = client(harness, A, gang="pair"), client(harness, A, gang="pair")
    client(harness, A)
    wait_for(harness, lambda: runs(one, two) == (True, True))
    pass_time(harness, 3 * QUANTUM_MS // 2, but=(one,))
    assert one.seat().phase == "revoking"
    harness.until(lambda: runs(two) == (True,))
    one.release(one.seat().lease_id, wanted=True)
    assert runs(one, two) == (True, True)


def test_members_that_do_not_fit_beside_each_other_are_named() -> None:
    """Broken: two ranks whose memory together exceeds the card wait for each other, and nothing says why."""
    harness = make_harness(gpus=1, capacity=100)
    pair = [client(harness, A, gang="pair", mode=MemoryMode.SWAP) for _ in range(2)]
    for each, resident in zip(pair, (60, 40), strict=True):
        each.report(allocated=60, resident=resident, host=60 - resident)
    pass_time(harness, QUANTUM_MS // 2)
    assert runs(*pair).count(True) == 1
    assert harness.logged("does not fit beside the other members of gang")


def test_an_event_costs_little_more_beside_many_gangs() -> None:
    """Broken: with 250 gangs each event takes the coordinator 25 ms."""

    def cost(gangs: int) -> int:
        harness = make_harness(check_invariants=False)
        for number in range(120):
            client(harness, A if number % 2 else B, gang=f"g{number // 2}" if number // 2 < gangs else "")
        pass_time(harness, QUANTUM_MS)
        return steps(lambda: pass_time(harness, QUANTUM_MS))

    assert cost(60) < 3 * cost(0)


def test_a_change_of_the_quantum_changes_a_gangs_turns() -> None:
    """Broken: after a quantum of an hour a gang, or its rivals, would wait for an hour although it was taken back."""
    harness = make_harness()
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    rivals = client(harness, A), client(harness, B)
    for want in (pair, rivals):
        wait_for(harness, partial(all_run, *want))
        harness.handle(events.Set("quantum", 3_600_000 * MILLISECOND_NS))
        pass_time(harness, 10)
        harness.handle(events.Set("quantum", QUANTUM_MS * MILLISECOND_NS))
        before = [each.seat().statistics.leases for each in (*pair, *rivals)]
        pass_time(harness, 8 * QUANTUM_MS)
        assert all(each.seat().statistics.leases > had for each, had in zip((*pair, *rivals), before, strict=True))


def test_one_program_on_two_gpus_is_a_gang_if_it_asks_and_the_gang_may_change() -> None:
    """Broken: a program that exchanges data between its GPUs would have them at different times, or an annotation
    that is changed while the pod runs would do nothing."""
    harness = make_harness()
    client(harness, A), client(harness, B)
    wide = client(harness, A)
    wide.attach(B, gpu=1, wanted=True)
    harness.handle(events.Set("gang", "wide", client=wide.client))
    seen: list[tuple[str, str]] = []
    pass_time(harness, 1000, lambda: seen.append((wide.seat(0).phase, wide.seat(1).phase)))
    late = seen[QUANTUM_MS * 2 :]
    assert ("holding", "holding") in late
    assert not [phases for phases in late if phases.count("holding") == 1]
    (gang,) = harness.scheduler.snapshot(harness.clock.now_ns).gangs
    assert (gang.name, gang.clients, gang.gpus) == ("wide", (wide.client,), (A, B))
    harness.handle(events.Set("gang", "", client=wide.client))
    assert harness.scheduler.snapshot(harness.clock.now_ns).gangs == ()
    pass_time(harness, 500)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_members_overlap_under_every_policy(policy: str) -> None:
    """Broken: gangs would work with some policies only."""
    harness = make_harness(policy, sharing=Sharing.AUTO)
    client(harness, A), client(harness, B)
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    seen: list[tuple[bool, ...]] = []
    pass_time(harness, 2000, lambda: seen.append(runs(*pair)))
    apart = seen.count((True, False)) + seen.count((False, True))
    assert seen.count((True, True)) >= 9 * apart
    assert seen.count((True, True)) >= 400


def test_two_gangs_of_the_same_gpus_are_tried_once_each() -> None:
    """Broken: the slots of one void the result of the other one, so that they are tried in turns for ever."""
    harness = make_harness("auto", sharing=Sharing.AUTO)
    members = [client(harness, uuid, gang=gang) for gang in ("one", "two") for uuid in (A, B)]
    work(harness, 12)
    turns = harness.notifications("gang_gathered")
    assert {each["gang"] for each in turns} == {"one", "two"}
    work(harness, 8)
    assert len(harness.notifications("gang_gathered")) == len(turns)
    assert all_run(*members)


def work(harness: Harness, seconds: int) -> None:
    """All programs work at one speed, whoever runs beside them: slots gain nothing."""
    done: Counter[int] = Counter()
    for _ in range(seconds * 50):
        pass_time(harness, 20)
        for each in harness.clients.values():
            seat = each.seat()
            if seat.phase == "holding":
                done[each.client] += 20
                each.progress(seat.lease_id, harness.clock.now_ns, done[each.client], 0, 0)


@pytest.mark.parametrize(
    ("what", "measured"),
    [("rivals", True), ("two rivals", False), ("best_effort", False), ("limit", False), ("concurrent", False)],
)
def test_slots_are_tried_where_they_would_be_fair(what: str, measured: bool) -> None:
    """Broken: `auto` never learns what slots would give a gang, or gives a gang half of a GPU that three want, or of
    one whose rival has a rate."""
    harness = make_harness("auto", sharing=Sharing.CONCURRENT if what == "concurrent" else Sharing.AUTO)
    rivals = [client(harness, uuid) for uuid in (A, B)]
    pair = client(harness, A, gang="pair"), client(harness, B, gang="pair")
    if what == "two rivals":
        client(harness, B)
    elif what == "best_effort":
        harness.handle(events.Set("class", "best_effort", client=rivals[0].client))
    elif what == "limit":
        harness.handle(events.Set("share_limit", 0.3, client=pair[0].client))
    work(harness, 7)
    assert bool(harness.notifications("gang_gathered")) is measured
    assert all_run(*pair), "side by side is better"
    turns = len(harness.notifications("gang_gathered"))
    work(harness, 3)
    assert len(harness.notifications("gang_gathered")) == turns, "the result holds"
    if measured:
        assert "in turns" in harness.gpu_snapshot(A).rules.why
        rivals[0].release(idle=True)
        work(harness, 2)
        rivals[0].request()
        work(harness, 6)
        assert len(harness.notifications("gang_gathered")) == turns, "also while a rival is idle"
        harness.milliseconds(120_000)
        work(harness, 5)
        assert len(harness.notifications("gang_gathered")) > turns, "for two minutes"
