"""Gangs of programs that do their worst: they come, go, die and fall idle at any millisecond.

The worlds of test_gang_worlds.py work in bursts as programs do.  Here every client of a node may do anything at every
step, at rates that the seed chooses, so that mates come and go in the middle of turns and turns are as short as they
can be.  Afterwards all behave, and each of them must be served.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.scheduler_policies.registry import BUILT_IN, create
from tests.harness import SEEDS, Harness, ScriptedClient

STORMS, STEPS, PEACE = 2 * SEEDS, 600, 10_000


@dataclass(slots=True)
class Actor:
    """A client on one GPU, and how restless it is: chances at each step."""

    client: ScriptedClient
    asks: float
    idles: float
    obeys: float
    dies: float
    pauses: float = 0.002

    def step(self, harness: Harness, chance: random.Random) -> bool:
        """Something, or nothing.  False: it is dead."""
        client = self.client
        if chance.random() < self.dies:
            client.die()
            return False
        client.inbox.clear()
        seen = harness.scheduler.client_snapshot(client.client, harness.clock.now_ns)
        assert seen is not None
        (seat,) = seen.seats
        if seat.phase == "idle" and chance.random() < self.asks:
            client.request()
        elif seat.phase == "holding" and chance.random() < self.idles:
            client.release(seat.lease_id, idle=True, wanted=chance.random() < 0.5)
        elif seat.phase in ("revoking", "overdue") and chance.random() < self.obeys:
            client.release(seat.lease_id, wanted=chance.random() < 0.8)
        if chance.random() < self.pauses:
            pausing = chance.random() < 0.5
            harness.handle(events.Set("paused", pausing, client=client.client))
        return True


def appear(harness: Harness, chance: random.Random, uuids: list[str], gangs: int) -> Actor:
    """One more, perhaps in a gang."""
    gang = f"g{chance.randrange(gangs)}" if chance.random() < 0.6 else ""
    priority, weight = chance.randint(0, 1), chance.choice([1, 1, 3])
    client = harness.client(attach=False, gang=gang, priority=priority, weight=weight)
    client.attach(chance.choice(uuids), wanted=chance.random() < 0.5)
    asks, idles = chance.choice([1.0, 0.5, 0.05]), chance.choice([0.0, 0.02, 0.5])
    obeys, dies = chance.choice([1.0, 0.5, 0.02]), chance.choice([0.0, 0.0, 0.01, 0.1])
    return Actor(client, asks, idles, obeys, dies)


def rage(seed: int, policy: str) -> Harness:
    """All of it, with every check on after every event."""
    chance = random.Random(seed)
    quantum_ns = chance.choice([3, 10, 40]) * MILLISECOND_NS
    drain_ns = chance.choice([5, 200, 5000]) * MILLISECOND_NS
    harness = Harness(create, policy=policy, quantum_ns=quantum_ns, drain_deadline_ns=drain_ns)
    uuids = [f"GPU-{number}" for number in range(chance.randint(2, 4))]
    for uuid in uuids:
        harness.gpu(uuid)
        if chance.random() < 0.3:
            harness.handle(events.Set("quantum", chance.choice([2, 20]) * MILLISECOND_NS, uuid))
    gangs, crowd = chance.randint(1, 4), chance.randint(len(uuids) + 1, 4 * len(uuids))
    actors: list[Actor] = []
    for _ in range(STEPS):
        while len(actors) < crowd:
            actors.append(appear(harness, chance, uuids, gangs))
        harness.milliseconds(1)
        actors = [actor for actor in actors if actor.step(harness, chance)]
    make_peace(harness, chance, actors)
    return harness


def make_peace(harness: Harness, chance: random.Random, actors: list[Actor]) -> None:
    """All want the GPU and obey, until each has had a lease."""
    had: dict[int, int] = {}
    for actor in actors:
        harness.handle(events.Set("priority", 0, client=actor.client.client))
        harness.handle(events.Set("paused", False, client=actor.client.client))
        actor.asks, actor.idles, actor.obeys, actor.dies, actor.pauses = 1.0, 0.0, 1.0, 0.0, 0.0
        had[actor.client.client] = actor.client.seat().statistics.leases
    for _ in range(PEACE):
        harness.milliseconds(1)
        for actor in actors:
            actor.step(harness, chance)
        waits = [actor for actor in actors if actor.client.seat().statistics.leases == had[actor.client.client]]
        if all(actor.client.seat().phase == "holding" for actor in waits):
            return
    raise AssertionError(f"{[actor.client.client for actor in waits]} are not served")


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_each_client_is_served_after_any_storm(policy: str) -> None:
    """Broken: gangs that come and go would keep a client from its GPU for ever; the note names the seed."""
    grants = turns = 0
    for seed in range(1, STORMS + 1):
        try:
            harness = rage(seed, policy)
        except Exception as error:
            error.add_note(f"rage({seed}, {policy!r})")
            raise
        snapshot = harness.scheduler.snapshot(harness.clock.now_ns)
        grants += sum(gpu.statistics.grants for gpu in snapshot.gpus)
        turns += snapshot.gang_turns
    assert grants > STORMS * STEPS // 20
    assert turns > STORMS * STEPS // 80
