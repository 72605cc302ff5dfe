"""The states of the MPS daemon, event by event: no process, no socket, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nvshare.coordinator.system.mps.machine import (
    BACKOFF_NS,
    LINGER_NS,
    MAX_BACKOFF_NS,
    MAX_PROGRAMS,
    STEADY_NS,
    Action,
    Answer,
    CountClients,
    Machine,
    Note,
    Phase,
    Quit,
    Start,
)

ANNE, BOB = 1000, 1001


def facts(actions: Sequence[Action]) -> list[Action]:
    """Without the lines for the log."""
    return [action for action in actions if not isinstance(action, Note)]


def refusal(actions: Sequence[Action]) -> str:
    (answer,) = facts(actions)
    assert isinstance(answer, Answer)
    assert answer.refusal is not None
    return answer.refusal


@pytest.fixture
def machine() -> Machine:
    """Machine of a coordinator that runs as root."""
    return Machine(owner=0, all_users=True)


@pytest.fixture
def ready(machine: Machine) -> Machine:
    """With one program of Anne, number 1."""
    assert machine.asks(1, ANNE) == [Start(ANNE)]
    assert facts(machine.started(0)) == [Answer(1)]
    return machine


def test_the_first_program_starts_the_daemon_and_others_wait_for_it(machine: Machine) -> None:
    """Broken: a program that asks during the start runs without MPS, or starts a second daemon."""
    assert machine.asks(1, ANNE) == [Start(ANNE)]
    assert machine.asks(2, ANNE) == []
    assert facts(machine.started(5)) == [Answer(1), Answer(2)]
    assert machine.asks(3, ANNE) == [Answer(3)]
    assert (machine.programs, machine.deadline_ns) == ({1, 2, 3}, None)


def test_a_program_that_leaves_during_the_start_gets_no_answer(machine: Machine) -> None:
    """Broken: the answer goes to a connection that is closed, or the daemon never stops."""
    machine.asks(1, ANNE)
    machine.left(1, 0)
    assert facts(machine.started(5)) == []
    assert machine.deadline_ns == 5 + LINGER_NS


def test_another_user_waits_for_the_last_program(ready: Machine) -> None:
    """Broken: two users share a server, so one reads or ends the work of the other."""
    assert f"serves user {ANNE}" in refusal(ready.asks(2, BOB))
    ready.left(1, 10)
    assert ready.asks(3, BOB) == [CountClients()]
    assert ready.counted(0) == [Quit(wait=True)]
    assert facts(ready.ended()) == [Start(BOB)]
    assert f"serves user {BOB}" in refusal(ready.asks(4, ANNE))
    assert facts(ready.started(20)) == [Answer(3)]


def test_clients_that_no_launcher_started_keep_the_daemon(ready: Machine) -> None:
    """Broken: a child that outlives its program loses its server, or its user's server goes to another user."""
    ready.left(1, 10)
    assert ready.tick(10 + LINGER_NS) == [CountClients()]
    assert ready.counted(2) == []
    assert (ready.phase, ready.deadline_ns) == (Phase.READY, 10 + 2 * LINGER_NS)
    assert ready.asks(2, BOB) == [CountClients()]
    assert "2 processes still use it" in refusal(ready.counted(2))


def test_an_idle_daemon_is_stopped(ready: Machine) -> None:
    """Broken: the server keeps its memory on the card for ever, or a pause between programs restarts it."""
    ready.left(1, 10)
    assert ready.tick(9 + LINGER_NS) == []
    assert ready.asks(2, ANNE) == [Answer(2)]
    assert ready.tick(10 + LINGER_NS) == []
    ready.left(2, 20)
    assert ready.tick(20 + LINGER_NS) == [CountClients()]
    assert ready.counted(0) == [Quit(wait=True)]
    ready.ended()
    assert (ready.phase, ready.user, ready.deadline_ns) == (Phase.IDLE, None, None)


def test_another_users_program_is_refused_by_ones_own_coordinator() -> None:
    """Broken: root's program joins a server of another user, which CUDA does not allow."""
    machine = Machine(owner=ANNE, all_users=False)
    assert f"serves user {ANNE} only" in refusal(machine.asks(1, 0))
    assert machine.asks(2, ANNE) == [Start(ANNE)]


def test_a_dead_daemon_is_restarted_for_its_programs(ready: Machine) -> None:
    """Broken: a daemon that dies at once is started in a loop, or never again."""
    now_ns, pauses = 0, []
    for _ in range(8):
        assert facts(ready.died(now_ns)) == []
        assert "control daemon died" in refusal(ready.asks(2, ANNE))
        assert ready.deadline_ns is not None
        pauses.append(ready.deadline_ns - now_ns)
        now_ns = ready.deadline_ns
        assert ready.tick(now_ns - 1) == []
        assert ready.tick(now_ns) == [Start(ANNE)]
        ready.started(now_ns)
    assert pauses == [min(BACKOFF_NS << turn, MAX_BACKOFF_NS) for turn in range(8)]
    now_ns += STEADY_NS
    ready.died(now_ns)
    assert ready.deadline_ns == now_ns + BACKOFF_NS
    assert ready.programs == {1}


def test_a_dead_daemon_without_programs_stays_away(ready: Machine) -> None:
    """Broken: a daemon comes back that nobody needs, or servers of the dead one stay."""
    ready.left(1, 0)
    assert facts(ready.died(5)) == [Quit(wait=True)]
    ready.ended()
    assert ready.phase is Phase.IDLE
    assert ready.asks(2, BOB) == [Start(BOB)]


def test_programs_that_end_before_the_restart_cancel_it(ready: Machine) -> None:
    """Broken: the daemon is restarted for programs that its death has ended."""
    ready.died(0)
    ready.left(1, 1)
    assert ready.tick(BACKOFF_NS) == [Quit(wait=True)]
    ready.ended()
    assert ready.phase is Phase.IDLE


def test_a_failed_start_refuses_with_its_reason_and_is_tried_again(machine: Machine) -> None:
    """Broken: programs wait for MPS that cannot start, each of them tries, or none tries after the remedy."""
    machine.asks(1, ANNE)
    machine.asks(2, ANNE)
    actions = machine.failed("no binary; install it", 0)
    assert facts(actions) == [Answer(1, "no binary; install it"), Answer(2, "no binary; install it")]
    assert any(isinstance(action, Note) and action.is_problem for action in actions)
    assert "no binary; install it" in refusal(machine.asks(3, ANNE))
    machine.tick(BACKOFF_NS)
    machine.ended()
    assert machine.problem is not None
    assert machine.asks(4, ANNE) == [Start(ANNE)]
    assert facts(machine.failed("no binary; install it", BACKOFF_NS)) == [Answer(4, "no binary; install it")]
    machine.tick(3 * BACKOFF_NS)
    machine.ended()
    machine.asks(5, ANNE)
    machine.started(4 * BACKOFF_NS)
    assert machine.problem is None


def test_the_number_of_programs_has_a_bound(ready: Machine) -> None:
    """Broken: a program fails in cuInit because the server has no room for it."""
    for program in range(2, MAX_PROGRAMS + 1):
        assert ready.asks(program, ANNE) == [Answer(program)]
    assert "limit" in refusal(ready.asks(MAX_PROGRAMS + 1, ANNE))
    ready.left(7, 0)
    assert ready.asks(MAX_PROGRAMS + 2, ANNE) == [Answer(MAX_PROGRAMS + 2)]


def test_the_end_of_the_coordinator_ends_no_program(ready: Machine) -> None:
    """Broken: a restart of the coordinator ends every MPS client."""
    assert facts(ready.stop()) == [Quit(wait=False)]
    ready.left(1, 0)
    assert ready.stop() == [Quit(wait=True)]


def test_a_daemon_of_an_earlier_coordinator_goes_on(machine: Machine) -> None:
    """Broken: after a crash its clients have no daemon, or a second daemon starts beside it."""
    machine.adopted(ANNE, quitting=False, now_ns=0)
    assert machine.asks(1, BOB) == [CountClients()]
    assert "3 processes" in refusal(machine.counted(3))
    assert machine.asks(2, ANNE) == [Answer(2)]


def test_a_daemon_that_quits_is_left_to_its_clients(machine: Machine) -> None:
    """Broken: a program waits for clients of the earlier coordinator, or the draining daemon is ended."""
    machine.adopted(ANNE, quitting=True, now_ns=0)
    assert "ends with the last one" in refusal(machine.asks(1, ANNE))
    assert facts(machine.stop()) == []
    assert facts(machine.died(5)) == []
    assert machine.asks(2, BOB) == [Start(BOB)]
