"""Bad policies for worlds (world.py): they throttle, raise, or answer nonsense.

The engine replaces all of them except `throttle` and `restless`, which keep the rules.  All randomness comes from a
seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from nvshare.coordinator.engine.policy_guard import PolicyFactory
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, Policy, PolicyBase


class _Faulty(PolicyBase):
    """Fails at random."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.fault_rate = chance.choice((0.0, 0.01, 0.2))

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        """Chooses the first client, or fails."""
        return self.fail(waiting, now_ns) if self.chance.random() <= self.fault_rate else Choice(waiting[0].client)

    def fail(self, waiting: Sequence[ClientView], now_ns: int) -> Choice | None:
        """The policy's kind of fault."""
        raise NotImplementedError


class Throttle(PolicyBase):
    """Leaves pauses between turns, with a wake-up in the future."""

    def __init__(self, chance: random.Random) -> None:
        self._pause_ns = chance.choice((20, 50, 400)) * MILLISECOND_NS
        self._next_ns = 0

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        """Chooses none before the end of the pause."""
        if now_ns < self._next_ns:
            return None
        self._next_ns = now_ns + self._pause_ns
        return Choice(waiting[0].client, min(self._pause_ns, 5 * MILLISECOND_NS))

    def wake_at_ns(self, now_ns: int) -> int:
        """The end of the pause."""
        return self._next_ns


class Restless(PolicyBase):
    """Preempts every second client, renews at random, and orders backwards."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """Any client, for any allowed time."""
        return Choice(self.chance.choice(waiting).client, self.chance.choice((None, 100_000, 10_000 * MILLISECOND_NS)))

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """The same answer for a client each time, since the engine's checks ask too."""
        return holder.client % 2 == 0

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """At random."""
        return self.chance.random() < 0.3

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """A valid permutation."""
        return [view.client for view in reversed(waiting)]


class Raises(_Faulty):
    """Raises, in any operation."""

    def fail(self, waiting: Sequence[ClientView], now_ns: int) -> Choice:
        raise ZeroDivisionError("a policy's mistake")

    def released(self, client: ClientView, now_ns: int) -> None:
        if self.chance.random() < self.fault_rate:
            raise KeyError(client.client)

    def gone(self, client: int) -> None:
        if self.chance.random() < self.fault_rate:
            raise RuntimeError


class Stranger(_Faulty):
    """Names clients that do not wait."""

    def fail(self, waiting: Sequence[ClientView], now_ns: int) -> Choice:
        answers: tuple[Any, ...] = (Choice(-1), Choice(1 << 64), Choice("nobody"), "Choice", 7)  # type: ignore[arg-type]
        answer: Choice = self.chance.choice(answers)
        return answer

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        return [view.client for view in waiting] * (2 if self.chance.random() < self.fault_rate else 1)


class Past(_Faulty):
    """Chooses none, with a missing or past wake-up."""

    def fail(self, waiting: Sequence[ClientView], now_ns: int) -> None:
        return None

    def wake_at_ns(self, now_ns: int) -> Any:
        return self.chance.choice((now_ns, now_ns - 1, 0, -(1 << 70), None, True, 1e30, "soon"))


class Quanta(_Faulty):
    """Asks for impossible quanta."""

    def fail(self, waiting: Sequence[ClientView], now_ns: int) -> Choice:
        quantum: Any = self.chance.choice((0, -1, 1, 1 << 70, 1e9, True, "1s"))
        return Choice(waiting[0].client, quantum)

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Any:
        return self.chance.choice((False, None)) if self.chance.random() < self.fault_rate else False


NONSENSE: Final[dict[str, type[Throttle | Restless | _Faulty]]] = {
    "throttle": Throttle,
    "restless": Restless,
    "raises": Raises,
    "stranger": Stranger,
    "past": Past,
    "quanta": Quanta,
}


def with_nonsense(create: PolicyFactory, seed: int) -> PolicyFactory:
    """The factory `create`, extended by these policies."""
    chance = random.Random(seed)

    def make(name: str, uuid: str) -> Policy:
        kind = NONSENSE.get(name)
        return create(name, uuid) if kind is None else kind(random.Random(chance.getrandbits(64)))

    return make
