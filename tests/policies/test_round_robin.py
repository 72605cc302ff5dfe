"""Round robin: fair turns, the stated bound, newcomers in their place."""

from __future__ import annotations

from typing import Any

from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.simulation.harness import Harness, ScriptedClient
from tests.harness import one_gpu, play_turn

QUANTUM_MS = 100


def crowd(count: int, **settings: Any) -> tuple[Harness, list[ScriptedClient]]:
    """So many clients that all want the GPU all the time; every check on, the wait bound among them."""
    harness = one_gpu(**settings)
    return harness, [harness.client(wanted=True) for _ in range(count)]


def turns(harness: Harness, count: int) -> list[int]:
    """Who holds the lease, for so many full quanta; each wants again at once."""
    return [play_turn(harness) for _ in range(count)]


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
