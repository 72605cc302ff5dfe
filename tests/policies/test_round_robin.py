"""Round robin: fair turns, the stated bound, newcomers in their place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.coordinator.engine.scheduler import Settings
from nvshare.coordinator.model.state import MILLISECOND_NS
from nvshare.coordinator.simulation.harness import Desk, ScriptedClient
from nvshare.scheduler_policies.registry import create

QUANTUM_MS = 100


def crowd(count: int, **settings: object) -> tuple[Desk, list[ScriptedClient]]:
    """So many clients that all want the GPU all the time; every check on, the wait bound among them."""
    desk = Desk(create, Settings(check_invariants=True, **settings))  # type: ignore[arg-type]
    desk.gpu()
    return desk, [desk.client(wanted=True) for _ in range(count)]


def turns(desk: Desk, count: int) -> list[int]:
    """Who holds the lease, for so many full quanta; each wants again at once."""
    held = []
    for _ in range(count):
        (holder,) = desk.sight().holders
        held.append(holder)
        desk.until(lambda h=holder: desk.clients[h].seat().phase == "revoking")  # type: ignore[misc]
        desk.clients[holder].release(wanted=True)
    return held


def test_turns_go_round() -> None:
    """Broken: somebody would run twice before another runs once."""
    desk, clients = crowd(3)
    order = [client.client for client in clients]
    assert turns(desk, 7) == [*order, *order, order[0]]


def test_everybody_gets_the_same_time() -> None:
    """Broken: unfair shares."""
    desk, clients = crowd(4)
    turns(desk, 40)
    used = [client.seat().used_ns for client in clients]
    assert max(used) - min(used) <= QUANTUM_MS * MILLISECOND_NS


def test_a_newcomer_stands_behind_those_who_wait() -> None:
    """Broken: a stream of new processes would keep others from their turn."""
    desk, clients = crowd(2)
    newcomer = desk.client(wanted=True)
    first, second = (client.client for client in clients)
    assert turns(desk, 3) == [first, second, newcomer.client]


def test_one_that_was_away_is_before_those_who_ran_meanwhile() -> None:
    """Broken: an interactive client would wait for a full round each time."""
    desk, clients = crowd(3)
    a, b, c = clients
    a.release(idle=True)
    b.release(idle=True, wanted=True)
    a.request()
    c.release(idle=True, wanted=True)
    (holder,) = desk.sight().holders
    assert holder == a.client


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 150), st.booleans()), max_size=40))
def test_the_stated_bound_holds(count: int, script: list[tuple[int, int, bool]]) -> None:
    """Broken: invariant 5 for round robin, whoever comes and goes when; the core's check measures each wait."""
    desk, clients = crowd(count)
    for which, pause_ms, wanted in script:
        client = clients[which % count]
        phase = client.seat().phase
        if phase == "idle":
            client.request()
        elif phase in ("holding", "revoking"):
            client.release(idle=phase == "holding", wanted=wanted)
        desk.milliseconds(pause_ms)
    grants = desk.sight().grants
    assert grants >= 1
