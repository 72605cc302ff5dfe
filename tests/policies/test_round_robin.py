"""Round robin: fair turns, the stated bound, newcomers in their place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.simulation.harness import Harness, ScriptedClient
from nvshare.scheduler_policies.registry import create

QUANTUM_MS = 100


def crowd(count: int, **settings: object) -> tuple[Harness, list[ScriptedClient]]:
    """So many clients that all want the GPU all the time; every check on, the wait bound among them."""
    harness = Harness(create, **settings)
    harness.gpu()
    return harness, [harness.client(wanted=True) for _ in range(count)]


def turns(harness: Harness, count: int) -> list[int]:
    """Who holds the lease, for so many full quanta; each wants again at once."""
    held = []
    for _ in range(count):
        (holder,) = harness.gpu_snapshot().leases.holders
        held.append(holder)
        harness.until(lambda h=holder: harness.clients[h].seat().phase == "revoking")  # type: ignore[misc]
        harness.clients[holder].release(wanted=True)
    return held


def test_turns_go_round() -> None:
    """Broken: somebody would run twice before another runs once."""
    harness, clients = crowd(3)
    order = [client.client for client in clients]
    assert turns(harness, 7) == [*order, *order, order[0]]


def test_everybody_gets_the_same_time() -> None:
    """Broken: unfair shares."""
    harness, clients = crowd(4)
    turns(harness, 40)
    used = [client.seat().statistics.used_ns for client in clients]
    assert max(used) - min(used) <= QUANTUM_MS * MILLISECOND_NS


def test_a_newcomer_stands_behind_those_who_wait() -> None:
    """Broken: a stream of new processes would keep others from their turn."""
    harness, clients = crowd(2)
    newcomer = harness.client(wanted=True)
    first, second = (client.client for client in clients)
    assert turns(harness, 3) == [first, second, newcomer.client]


def test_one_that_was_away_is_before_those_who_ran_meanwhile() -> None:
    """Broken: an interactive client would wait for a full round each time."""
    harness, clients = crowd(3)
    a, b, c = clients
    a.release(idle=True)
    b.release(idle=True, wanted=True)
    a.request()
    c.release(idle=True, wanted=True)
    (holder,) = harness.gpu_snapshot().leases.holders
    assert holder == a.client


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 150), st.booleans()), max_size=40))
def test_the_stated_bound_holds(count: int, script: list[tuple[int, int, bool]]) -> None:
    """Broken: invariant 5 for round robin, whoever comes and goes when; the core's check measures each wait."""
    harness, clients = crowd(count)
    for which, pause_ms, wanted in script:
        client = clients[which % count]
        phase = client.seat().phase
        if phase == "idle":
            client.request()
        elif phase in ("holding", "revoking"):
            client.release(idle=phase == "holding", wanted=wanted)
        harness.milliseconds(pause_ms)
    grants = harness.gpu_snapshot().statistics.grants
    assert grants >= 1
