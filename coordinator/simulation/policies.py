"""Policies that no operator wants, for worlds (simulation/world.py): they throttle, raise, and answer nonsense.

The core replaces all of them but `throttle` and `restless`, which only use their rights.

Invariants: chance comes from a seed.  Non-goals: policies that are worth their while.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from nvshare.coordinator.engine.policy_guard import PolicyFactory
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, Policy, PolicyBase


class _Odd(PolicyBase):
    """Behaves well until its chance says otherwise."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.patience = chance.choice((0.0, 0.01, 0.2))
        """How often it is odd."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        """The first, mostly."""
        return self.odd(waiting, now_ns) if self.chance.random() <= self.patience else Choice(waiting[0].client)

    def odd(self, waiting: Sequence[ClientView], now_ns: int) -> Choice | None:
        """What is wrong with it."""
        raise NotImplementedError


class Throttle(PolicyBase):
    """One turn in 50 ms.  While it says no, its wake-up is always ahead."""

    def __init__(self, chance: random.Random) -> None:
        self._pause_ns = chance.choice((20, 50, 400)) * MILLISECOND_NS
        self._next_ns = 0

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        """Nobody, before the time has come."""
        if now_ns < self._next_ns:
            return None
        self._next_ns = now_ns + self._pause_ns
        return Choice(waiting[0].client, min(self._pause_ns, 5 * MILLISECOND_NS))

    def wake_at_ns(self, now_ns: int) -> int:
        """A little later than now."""
        return self._next_ns


class Restless(PolicyBase):
    """Interrupts every other client, renews at random, and orders backwards."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """Anybody, for any time that is allowed."""
        return Choice(self.chance.choice(waiting).client, self.chance.choice((None, 100_000, 10_000 * MILLISECOND_NS)))

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Always the same of one client: the core's checks ask, too."""
        return holder.client % 2 == 0

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Sometimes."""
        return self.chance.random() < 0.3

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """A permutation, as it must be."""
        return [view.client for view in reversed(waiting)]


class Raises(_Odd):
    """Raises, in any operation."""

    def odd(self, waiting: Sequence[ClientView], now_ns: int) -> Choice:
        raise ZeroDivisionError("a policy's mistake")

    def released(self, client: ClientView, now_ns: int) -> None:
        if self.chance.random() < self.patience:
            raise KeyError(client.client)

    def gone(self, client: int) -> None:
        if self.chance.random() < self.patience:
            raise RuntimeError


class Stranger(_Odd):
    """Names clients that do not wait."""

    def odd(self, waiting: Sequence[ClientView], now_ns: int) -> Choice:
        answers: tuple[Any, ...] = (Choice(-1), Choice(1 << 64), Choice("nobody"), "Choice", 7)  # type: ignore[arg-type]
        answer: Choice = self.chance.choice(answers)
        return answer

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        return [view.client for view in waiting] * (2 if self.chance.random() < self.patience else 1)


class Past(_Odd):
    """Lets nobody run, and names no time at which that changes, or one that has passed."""

    def odd(self, waiting: Sequence[ClientView], now_ns: int) -> None:
        return None

    def wake_at_ns(self, now_ns: int) -> Any:
        return self.chance.choice((now_ns, now_ns - 1, 0, -(1 << 70), None, True, 1e30, "soon"))


class Quanta(_Odd):
    """Asks for quanta that cannot be."""

    def odd(self, waiting: Sequence[ClientView], now_ns: int) -> Choice:
        quantum: Any = self.chance.choice((0, -1, 1, 1 << 70, 1e9, True, "1s"))
        return Choice(waiting[0].client, quantum)

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Any:
        return self.chance.choice((False, None)) if self.chance.random() < self.patience else False


NONSENSE: Final[dict[str, type[Throttle | Restless | _Odd]]] = {
    "throttle": Throttle,
    "restless": Restless,
    "raises": Raises,
    "stranger": Stranger,
    "past": Past,
    "quanta": Quanta,
}


def with_nonsense(create: PolicyFactory, seed: int) -> PolicyFactory:
    """A factory that knows these policies besides its own."""
    chance = random.Random(seed)

    def make(name: str, uuid: str) -> Policy:
        kind = NONSENSE.get(name)
        return create(name, uuid) if kind is None else kind(random.Random(chance.getrandbits(64)))

    return make
