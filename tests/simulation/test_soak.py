"""A short soak with fixed seeds, and that each of its checks can fail.

A failure prints the command that runs its world again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench import soak
from nvshare.bench.virtual_node import checks
from nvshare.bench.virtual_node.hostile import HostileClient
from nvshare.bench.virtual_node.nonsense import NONSENSE, with_nonsense
from nvshare.bench.virtual_node.world import Plan, World, core_settings
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.engine import reconcile, scheduler
from nvshare.coordinator.engine.event_log import InvariantError
from nvshare.coordinator.engine.memory import switch_credit
from nvshare.coordinator.model.commands import MANY_HOLDERS
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.journal import Journal
from nvshare.scheduler_policies.registry import create
from tests.harness import SEEDS

WORLDS = 16 * SEEDS
SWAPPING = Plan(gpus=1, processes=5, memory_bytes=900, swap_share=1.0, duration_ns=4 * SECOND_NS)


def world(plan: Plan, seed: int = 7, **settings: Any) -> World:
    """A world with every check on."""
    core = core_settings(drain_deadline_ns=50 * MILLISECOND_NS, **settings)
    return World(seed, plan, with_nonsense(create, seed), core)


def test_a_short_soak_is_clean() -> None:
    """Broken: whatever the message says; run its command."""
    report = soak.Report()
    for seed in range(WORLDS):
        report.run(seed)
    assert not report.failures, report.failures
    assert report.events > WORLDS * 200, "the worlds must have lived"
    met = {"gangs", "hostile", "memory", "nonsense", "operator", "profiles", "restarts"}
    met |= {"shared turns", "slots", "slow ends", "torn journal", "waits", "work"}
    assert set(report.by_kind) == met


@pytest.mark.parametrize(
    "seed",
    [
        12549090860748,  # a program of a slot allocates beyond its limit, as no hook does, and keeps its turn for ever
        8859097133635,  # a program that has more than its lowered limit waits for ever, once it has connected again
        110812203848556,  # two members of a gang count as strangers, when the slot has ended with the grant
        115180171499236,  # a check takes memory for known, of which a new coordinator believes only the lowered limit
        45081576988274,  # a gang that waits is called and dropped for ever: the rival, alone by then, has no turn
        85565775437832,  # a gang waits for a GPU that rests, with no timer for the end of the rest
        99025532190949,  # the same: others keep memory that it had
        127252191475471,  # a turn that is renewed each 2 ms has an alert before each end
        17946471801988,  # the check of waits counts the drain of another program, while others run beside it
    ],
)
def test_what_earlier_soaks_found(seed: int) -> None:
    """Broken: what the comment beside the seed says."""
    report = soak.Report()
    report.run(seed)
    assert not report.failures


def test_a_failure_names_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a failure of a soak could not be run again, or would not fail the soak."""

    def broken(node: Any, seat: Any, message: messages.Request, now_ns: int) -> None:
        raise KeyError(seat.ordinal)

    monkeypatch.setitem(scheduler._OF_SEAT, messages.Request, broken)
    report = soak.Report()
    report.run(3)
    (failure,) = report.failures
    assert failure["seed"] == 3
    assert failure["command"] == "python -m nvshare.bench.soak --replay 3"
    assert failure["message"].startswith("KeyError")
    with pytest.raises(InvariantError, match="KeyError"):
        soak.replay(3, 5)


# --- each trouble is met, and survived ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(NONSENSE))
def test_a_policy_of_no_use_harms_nobody(policy: str) -> None:
    """Broken: a policy that throttles, raises or answers nonsense could stop a GPU or the coordinator."""
    failures = grants = 0
    for seed in range(3):
        lived = world(Plan(gpus=1, processes=4, duration_ns=2 * SECOND_NS), seed, policy=policy)
        lived.run()
        assert lived.scheduler is not None
        grants += lived.checks.grants
        failures += sum(gpu.rules.policy_failures for gpu in lived.scheduler.snapshot(lived.now_ns).gpus)
    assert grants > 50
    assert bool(failures) == (policy not in ("throttle", "restless", "starves")), "these find nobody to harm, or may"


def test_hostile_clients_send_every_message_and_are_cut() -> None:
    """Broken: hostile clients would be refused at the door and show nothing."""
    wanted = {"AttachGpu", "Request", "Release", "State"}
    wanted |= {"ClientRegistered", "Progress", "Settled"}
    handled: set[str] = set()
    refused = 0
    for seed in range(16):
        if wanted <= handled and refused > 50:
            break
        plan = Plan(hostiles=2, slot_share=0.3, memory_bytes=600, swap_share=1.0, duration_ns=4 * SECOND_NS)
        lived = world(plan, seed)
        watch, refuse = lived.watch, lived.network.refuse

        def see(event: Any, out: Any, lived: World = lived, watch: Any = watch) -> None:
            if isinstance(lived.network.connections.get(getattr(event, "client", 0)), HostileClient):
                handled.add(type(getattr(event, "message", event)).__name__)
            watch(event, out)

        def cut(number: int, refuse: Any = refuse) -> None:
            nonlocal refused
            refused += 1
            refuse(number)

        lived.watch, lived.network.refuse = see, cut  # type: ignore[method-assign]
        lived.run()
    assert wanted <= handled
    assert refused > 50


def test_a_torn_record_is_not_believed(tmp_path: Path) -> None:
    """Broken: half of a record would name a holder that is none, or hide a holder from the next coordinator."""
    path, uuid = tmp_path / "journal", "GPU-0"
    journal = Journal(path, [uuid], lambda process_id: process_id * 3)
    journal.record(uuid, 1, 1000)
    before = path.read_bytes()
    journal.record(uuid, 0x0203040506, 0x01020304)
    after = path.read_bytes()
    journal.close()
    for cut in range(len(after) + 1):
        path.write_bytes(after[:cut] + before[cut:])
        again = Journal(path, [uuid], lambda process_id: process_id * 3, 77)
        found = (again.next_lease_id(uuid), again.holder(uuid))
        again.close()
        assert found in {(2, 1000), (0x0203040507, 0x01020304), (78, MANY_HOLDERS)}, cut


# --- each bound can be broken ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late_ns", "said"), [(-1, r"overdue again|fired"), (100_000, "times for nothing")])
def test_a_timer_that_fires_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch, late_ns: int, said: str) -> None:
    """Broken: a coordinator that spins or polls would pass all worlds."""
    real = reconcile.deadline_ns

    def early(node: Any, gpu: Any, now_ns: int) -> int | None:
        found = real(node, gpu, now_ns)
        return None if found is None else min(found, now_ns + late_ns)

    monkeypatch.setattr(reconcile, "deadline_ns", early)
    with pytest.raises(Exception, match=said):
        world(Plan(gpus=1, processes=3)).run()


def test_too_many_messages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an event could make the coordinator write to everybody again and again."""
    monkeypatch.setattr(checks, "MESSAGES_PER_SEAT", 0)
    with pytest.raises(Exception, match="messages for one event"):
        world(Plan(gpus=1, processes=3)).run()


def test_entries_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the coordinator's memory could grow with every client that has been there."""
    gone = Dispatcher.gone

    def leaking(dispatcher: Any, connection: int, now_ns: int) -> None:
        gone(dispatcher, connection, now_ns)
        dispatcher.__dict__.setdefault("left", []).append([connection])

    monkeypatch.setattr(Dispatcher, "gone", leaking)
    with pytest.raises(AssertionError, match="entries"):
        world(Plan(gpus=1, processes=8, death_chance=0.3, duration_ns=20 * SECOND_NS)).run()


SHORT_TURNS: dict[str, Any] = {"policy": "round_robin", "quantum_ns": 2 * MILLISECOND_NS}


def test_memory_that_moves_most_of_the_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: worlds in which nobody gets to work would pass, or nothing would bound what switches cost."""
    plan = replace(SWAPPING, duration_ns=12 * SECOND_NS)
    world(plan, **SHORT_TURNS).run()
    monkeypatch.setattr(switch_credit, "lacking_ns", lambda *_, **__: 0)
    with pytest.raises(AssertionError, match="without work"):
        world(plan, **SHORT_TURNS).run()


def test_a_long_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: time in which memory moves would not count as waiting."""
    monkeypatch.setattr(checks, "TURN_COST_NS", -90 * MILLISECOND_NS)
    with pytest.raises(AssertionError, match="at most"):
        world(SWAPPING).run()
