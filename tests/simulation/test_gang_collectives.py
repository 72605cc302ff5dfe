"""Two ranks whose drains last until the other one has had its GPU: a kernel of a collective (NCCL) that is in flight on
one GPU ends when the other rank's has been launched, and that one may stand at its gate.

The core is real; ranks and rivals are models in steps of 0.1 ms.  A step of a rank: its thread launches for a while,
the collective last; then it waits for what it launched.  Rivals want all of the time and drain at once.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness, ScriptedClient

TICK_NS = MILLISECOND_NS // 10
QUANTUM_MS = 100
RUN_MS = 4000
LAUNCH_TICKS, RUN_TICKS = 3, 6
"""A step takes 0.9 ms where both ranks are at work."""
RIVAL_TICKS = 3
"""A rival's drain."""


@dataclass(slots=True, eq=False)
class Program:
    """A client on one GPU, as its hook."""

    client: ScriptedClient
    chance: random.Random
    open: bool = False
    lease_id: int = 0
    close_in: int | None = None
    """Ticks until a revocation has reached it."""
    asks_in: int | None = None

    def hear(self) -> None:
        """Handles the messages since the last tick."""
        for grant in self.client.take(messages.Grant):
            self.lease_id, self.open, self.asks_in = grant.lease_id, True, None
        if self.client.take(messages.Revoke):
            self.close_in = self.chance.randint(1, 4)
        if self.asks_in is not None:
            self.asks_in -= 1
            if self.asks_in < 0:
                self.asks_in = None
                self.client.request()
        if self.close_in is not None:
            self.close_in -= 1
            self.open = self.open and self.close_in > 0

    def drained(self) -> None:
        """Its thread stands at the gate already, or comes to it a moment later."""
        wanted = self.chance.random() < 0.95
        self.close_in = None
        self.asks_in = None if wanted else 2
        self.client.release(self.lease_id, wanted=wanted)

    @property
    def closing(self) -> bool:
        """The gate is closed, and the lease not given back."""
        return self.close_in is not None and not self.open


@dataclass(slots=True, eq=False)
class Rank(Program):
    """One of two."""

    mate: Rank | None = None
    launched: int = 0
    """Ticks of the launches of this step."""
    ran: int = 0
    """Ticks for which both collectives of this step have been there."""
    steps: int = 0

    @property
    def in_flight(self) -> bool:
        """Its collective is."""
        return self.launched == LAUNCH_TICKS

    def tick(self) -> None:
        """One after the other."""
        self.hear()
        assert self.mate is not None
        if self.open and not self.in_flight:
            self.launched += 1
        if self.in_flight and (self.mate.steps > self.steps or self.mate.in_flight):
            self.ran += 1
            if self.ran >= RUN_TICKS:
                self.steps, self.launched, self.ran = self.steps + 1, 0, 0
        if self.closing and not self.in_flight:
            self.drained()


@dataclass(slots=True, eq=False)
class Rival(Program):
    """Saturates its GPU."""

    drains: int = 0
    worked_ns: int = 0

    def tick(self) -> None:
        """Work is done while the gate is open."""
        self.hear()
        self.worked_ns += TICK_NS * self.open
        self.drains = self.drains + 1 if self.closing else 0
        if self.drains > RIVAL_TICKS:
            self.drained()


@dataclass(slots=True)
class Outcome:
    """Shares of the time that each could have at best."""

    gang: float
    rivals: list[float] = field(default_factory=list)
    longest_wait_ns: int = 0


def pass_tick(harness: Harness, chance: random.Random) -> None:
    """Time passes, and a timer that is due fires somewhat late, as it does on a machine."""
    harness.clock.now_ns += chance.randint(TICK_NS // 2, TICK_NS * 3 // 2)
    if harness.timer_ns is not None and harness.timer_ns <= harness.clock.now_ns:
        harness.timer_ns = None
        harness.handle(events.TimerFired())


def run(seed: int, *, gang: str = "pair", rivals: bool = True) -> Outcome:
    """Ranks beside rivals, or alone."""
    chance = random.Random(seed)
    harness = Harness(create, policy="round_robin", check_invariants=False)
    uuids = ("GPU-0", "GPU-1")
    for uuid in uuids:
        harness.gpu(uuid)

    def client(uuid: str, name: str) -> ScriptedClient:
        made = harness.client(attach=False, gang=name)
        made.attach(uuid, wanted=True)
        return made

    others = [Rival(client(uuid, ""), chance) for uuid in uuids] if rivals else []
    one, two = (Rank(client(uuid, gang), chance) for uuid in uuids)
    one.mate, two.mate = two, one
    for _ in range(RUN_MS * MILLISECOND_NS // TICK_NS):
        pass_tick(harness, chance)
        for other in others:
            other.tick()
        for rank in chance.sample((one, two), 2):
            rank.tick()
    waits = [each.client.seat().statistics.max_wait_ns for each in (one, two, *others)]
    possible = RUN_MS * MILLISECOND_NS // TICK_NS / (LAUNCH_TICKS + RUN_TICKS)
    shares = [rival.worked_ns / (RUN_MS * MILLISECOND_NS) for rival in others]
    return Outcome(min(one.steps, two.steps) / possible, shares, max(waits))


def test_ranks_find_back_to_each_other() -> None:
    """Broken: once a drain has waited for the other rank's next turn, each would have its turns while the other one is
    out, for long.  0.44 of what they do alone, in the mean of 16 worlds, where it was 0.23 (0.06 to 0.45)."""
    alone = run(0, rivals=False).gang
    found = [run(seed) for seed in range(2)]
    assert statistics.mean(one.gang for one in found) > 0.4 * alone
    assert min(one.gang for one in found) > 0.35 * alone
    assert min(share for one in found for share in one.rivals) > 0.35
    assert max(one.longest_wait_ns for one in found) < 6 * QUANTUM_MS * MILLISECOND_NS


def test_without_a_gang_they_wait_for_each_other() -> None:
    """The check above can fail: the same ranks in no gang."""
    assert run(0, rivals=False).gang > 0.9
    assert run(0, gang="").gang < 0.2
