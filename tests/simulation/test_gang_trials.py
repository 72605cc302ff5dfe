"""Two ranks and a rival on each of two cards that slice their time: the gang runs beside its rivals or in slots,
whichever gives more.

The core is real.  Cards and programs are models in steps of 0.5 ms: a card gives a slice to one program after the
other, whose lengths have nothing to do with those of the other card; a collective needs both ranks in a slice, and
fills the slice of a rank that waits for its mate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness, ScriptedClient

TICK_NS = MILLISECOND_NS // 2
TICKS_PER_SECOND = 2000
REPORT_TICKS = 200
DRAIN_TICKS, AWAY_TICKS = 10, 2
MEASURED_S = 3
TIGHT, LOOSE = (2, 3, 0), (4, 1, 6)
"""Ticks of a rank's step: products, collective, the host's part."""


@dataclass(slots=True, eq=False)
class Program:
    """A rank, or a rival without a mate, which always has a kernel."""

    client: ScriptedClient
    step: tuple[int, int, int]
    mate: Program | None = None
    lease_id: int = 0
    done: int = 0
    """Ticks of the present step."""
    steps: int = 0
    ticks: int = 0
    """Until it has drained, or asks again."""

    def hear(self) -> None:
        """Drains, gives the lease back, and comes to its gate a moment later."""
        for grant in self.client.take(messages.Grant):
            self.lease_id = grant.lease_id
        if self.client.take(messages.Revoke):
            self.ticks = DRAIN_TICKS
        self.ticks -= 1
        if self.ticks == 0 and self.lease_id:
            self.report()
            lease_id, self.lease_id, self.ticks = self.lease_id, 0, AWAY_TICKS
            self.client.release(lease_id)
        elif self.ticks == 0:
            self.client.request()

    def report(self) -> None:
        """The steps so far."""
        if self.lease_id:
            self.client.progress(self.lease_id, self.client.harness.clock.now_ns, self.steps, 0, 0)

    @property
    def on_host(self) -> bool:
        """It has nothing for the GPU."""
        return self.done >= sum(self.step[:2])

    @property
    def in_collective(self) -> bool:
        """Its next kernel needs the mate."""
        return self.step[0] <= self.done < sum(self.step[:2])

    def run(self) -> None:
        """One tick of work."""
        self.done += 1
        if self.done == sum(self.step):
            self.done, self.steps = 0, self.steps + 1


@dataclass(slots=True)
class Card:
    """Time in slices."""

    programs: list[Program]
    chance: random.Random
    left: int = 0
    current: Program | None = None

    def choose(self) -> Program | None:
        """The program that has this tick."""
        ready = [each for each in self.programs if each.lease_id and not each.on_host]
        self.left -= 1
        if self.left <= 0 or self.current not in ready:
            others = [each for each in ready if each is not self.current]
            self.current = next(iter(others or ready), None)
            self.left = self.chance.randint(2, 6)
        return self.current


def total(step: tuple[int, int, int], sharing: Sharing) -> tuple[float, float]:
    """Speed of a rank and of a rival, as parts of their speeds alone, together; part of the time in which both have a
    lease of one card."""
    chance, uuids = random.Random(1), ("GPU-0", "GPU-1")
    settled_s = 7 if sharing is Sharing.AUTO else 1
    harness = Harness(create, policy="auto", sharing=sharing, quantum_ns=50 * MILLISECOND_NS, check_invariants=False)
    programs: list[Program] = []
    for uuid in uuids:
        harness.gpu(uuid)
        for gang in ("pair", ""):
            client = harness.client(attach=False, gang=gang)
            client.attach(uuid, wanted=True)
            programs.append(Program(client, step if gang else (1, 0, 0)))
    programs[0].mate, programs[2].mate = programs[2], programs[0]
    cards = [Card(programs[:2], chance), Card(programs[2:], chance)]
    began: list[int] = []
    both_ticks = 0
    for tick in range((settled_s + MEASURED_S) * TICKS_PER_SECOND):
        harness.advance(TICK_NS)
        if tick == settled_s * TICKS_PER_SECOND:
            began, both_ticks = [each.steps for each in programs], 0
        both_ticks += all(each.lease_id for each in programs[:2])
        chosen = [card.choose() for card in cards]
        both = all(each is not None and each.mate is not None and each.in_collective for each in chosen)
        for each in programs:
            each.hear()
            if each.lease_id and each.on_host:
                each.run()
        for one in chosen:
            if one is not None and one.lease_id and (both or not one.in_collective):
                one.run()
        if tick % REPORT_TICKS == 0:
            for each in programs:
                each.report()
    made = [each.steps - before for each, before in zip(programs, began, strict=True)]
    alone = [MEASURED_S * TICKS_PER_SECOND / sum(each.step) for each in programs]
    return sum(some / most for some, most in zip(made, alone, strict=True)) / 2, both_ticks / (
        MEASURED_S * TICKS_PER_SECOND
    )


@pytest.mark.parametrize(("step", "slots"), [(TIGHT, True), (LOOSE, False)])
def test_a_gang_has_the_better_one(step: tuple[int, int, int], slots: bool) -> None:
    """Broken: ranks that exchange much lose a third beside rivals for ever, or ranks that leave the card idle are given
    turns."""
    beside, turns = (total(step, sharing)[0] for sharing in (Sharing.CONCURRENT, Sharing.EXCLUSIVE))
    assert turns > 1.1 * beside if slots else beside > 1.1 * turns, "the check below can fail"
    found, both = total(step, Sharing.AUTO)
    assert found > 0.97 * max(beside, turns)
    assert both < 0.01 if slots else both > 0.99
