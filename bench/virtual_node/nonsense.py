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
from nvshare.scheduler_policies.api import Allotment, GpuView, Happened, JobView, Plan, Policy, PolicyBase


def _turn(jobs: Sequence[JobView], gpu: GpuView, now_ns: int) -> Plan:
    """Turns: the first job until its turn is over, then the one with the oldest turn."""
    first = jobs[0]
    over = first.turn.granted_at_ns is not None and now_ns >= first.turn.began_ns + gpu.quantum_ns
    waiting = [job for job in jobs if job.turn.waiting_since_ns is not None]
    if over and waiting:
        first = waiting[0]
    return Plan((Allotment(first.client, gpu.quantum_ns),))


class _Faulty(PolicyBase):
    """Fails at random."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.fault_rate = chance.choice((0.0, 0.01, 0.2))

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Turns, or a failure."""
        if self.chance.random() <= self.fault_rate:
            answer: Plan = self.fail(gpu, jobs, now_ns)
            return answer
        return _turn(jobs, gpu, now_ns)

    def fail(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Any:
        """The policy's kind of fault."""
        raise NotImplementedError


class Throttle(PolicyBase):
    """Leaves pauses between turns, and asks to be asked again."""

    def __init__(self, chance: random.Random) -> None:
        self._pause_ns = chance.choice((20, 50, 400)) * MILLISECOND_NS

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Every second period of the clock is a pause."""
        period = now_ns // self._pause_ns
        end_ns = (period + 1) * self._pause_ns
        if period % 2:
            return Plan(ask_again_ns=end_ns)
        plan = _turn(jobs, gpu, now_ns)
        return Plan(plan.running, ask_again_ns=end_ns)


class Restless(PolicyBase):
    """Changes its mind all the time, and orders backwards."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Any jobs, for any allowed time."""
        chosen = self.chance.sample(list(jobs), self.chance.randint(1, len(jobs)))
        quanta = (None, 100_000, 10_000 * MILLISECOND_NS)
        running = tuple(
            Allotment(job.client, self.chance.choice(quanta), self.chance.random() or 1.0) for job in chosen
        )
        some_wait = any(job.turn.waiting_since_ns is not None for job in jobs)
        again_ns = now_ns + 30 * MILLISECOND_NS if some_wait else None
        return Plan(running, tuple(job.client for job in reversed(jobs)), again_ns)


class Raises(_Faulty):
    """Raises, in any operation."""

    def fail(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Any:
        raise ZeroDivisionError("a policy's mistake")

    def observe(self, happened: Happened) -> None:
        if self.chance.random() < self.fault_rate:
            raise KeyError(happened)


class Stranger(_Faulty):
    """Names clients that do not want the GPU, or one twice."""

    def fail(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Any:
        own = Allotment(jobs[0].client)
        answers: tuple[Any, ...] = (
            Plan((Allotment(-1),)), Plan((Allotment(1 << 64),)), Plan((Allotment("nobody"),)),  # type: ignore[arg-type]
            Plan((own, own)), Plan((own, Allotment(-7))), "Plan", None, 7,
        )  # fmt: skip
        return self.chance.choice(answers)


class Past(_Faulty):
    """Leaves the GPU idle, with a missing or past time."""

    def fail(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Any:
        again: Any = self.chance.choice((now_ns, now_ns - 1, 0, -(1 << 70), None, True, 1e30, "soon"))
        return Plan(ask_again_ns=again)


class Quanta(_Faulty):
    """Asks for impossible quanta, rates and pacing."""

    def fail(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Any:
        quantum: Any = self.chance.choice((0, -1, 1, 1 << 70, 1e9, True, "1s"))
        rate: Any = self.chance.choice((0.0, -1.0, 7, float("nan"), "all"))
        client = jobs[0].client
        return Plan((self.chance.choice((Allotment(client, quantum), Allotment(client, None, rate))),))


class Starves(_Faulty):
    """Names the youngest job only."""

    def fail(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Any:
        return Plan((Allotment(max(job.client for job in jobs), gpu.quantum_ns),))


NONSENSE: Final[dict[str, Any]] = {
    "throttle": Throttle,
    "restless": Restless,
    "raises": Raises,
    "stranger": Stranger,
    "past": Past,
    "quanta": Quanta,
    "starves": Starves,
}


def with_nonsense(create: PolicyFactory, seed: int) -> PolicyFactory:
    """The factory `create`, extended by these policies."""
    chance = random.Random(seed)

    def make(name: str, uuid: str) -> Policy:
        kind = NONSENSE.get(name)
        if kind is None:
            return create(name, uuid)
        policy: Policy = kind(random.Random(chance.getrandbits(64)))
        return policy

    return make
