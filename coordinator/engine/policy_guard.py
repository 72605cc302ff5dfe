"""Stands between the core and one GPU's policy: asks, checks every answer, and replaces a policy that breaks the rules.

No exception of a policy passes, and no answer that names a client which does not wait.  After the first breach round
robin replaces the policy.  An operation that a policy does not override is not called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from nvshare.coordinator.model.commands import Command, Log, Notify
from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, Policy, PolicyBase

T = TypeVar("T")
FALLBACK: Final = "round_robin"
QUANTUM_BOUNDS_NS: Final = (100_000, 3_600_000_000_000)
"""A policy may choose a quantum from 100 us to an hour."""

PolicyFactory = Callable[[str, str], Policy]
"""(name, uuid) -> a new policy for that GPU; raises for a name that it does not know."""


def _overrides(policy: Policy, operation: str) -> bool:
    method = getattr(type(policy), operation, None)
    return method is not None and method is not getattr(PolicyBase, operation)


class PolicyGuard:
    """One for each GPU."""

    def __init__(self, uuid: str, name: str, policy: Policy, factory: PolicyFactory) -> None:
        self._uuid = uuid
        self._factory = factory
        self.failures = 0
        self.replaced = 0
        """Grows with each new policy."""
        self.replace(name, policy)

    def __getstate__(self) -> tuple[str, str, int, int, Policy | None]:
        """For the event log.  Policies of other packages are left out: copying them may have effects."""
        own = type(self.policy).__module__.startswith("nvshare.scheduler_policies.")
        return self._uuid, self.name, self.failures, self.replaced, self.policy if own else None

    def __setstate__(self, state: tuple[str, str, int, int, Policy | None]) -> None:
        self._uuid, self.name, self.failures, replaced, policy = state
        self.replaced = replaced - 1
        if policy is not None:
            self.replace(self.name, policy)

    def restored(self, factory: PolicyFactory) -> None:
        """Completes the guard after `__setstate__`."""
        self._factory = factory
        if not hasattr(self, "policy"):
            self.replace(self.name, factory(self.name, self._uuid))

    def replace(self, name: str, policy: Policy) -> None:
        """A new policy from now on."""
        self.replaced += 1
        self.name = name
        self.policy = policy
        self._has = {
            operation
            for operation in ("preempt", "renew", "order", "wake_at_ns", "wait_bound_ns", "released", "gone")
            if _overrides(policy, operation)
        }

    def choose(
        self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int, out: list[Command]
    ) -> tuple[Choice | None, int | None]:
        """The next client, or none and when to ask again.  There is always a client or a time in the future."""
        try:
            choice = self.policy.choose(waiting, gpu, now_ns)
            if choice is not None:
                return self._checked(choice, waiting), None
            return None, self._wake_at_ns(now_ns)
        except Exception as error:
            self._give_up("choose", error, out)
            return self.choose(waiting, gpu, now_ns, out)

    def preempt(
        self,
        holder: Callable[[], ClientView],
        waiting: Sequence[ClientView],
        gpu: GpuView,
        now: int,
        out: list[Command],
    ) -> bool:
        """Whether to revoke early."""
        if "preempt" not in self._has:
            return False
        return self._ask("preempt", lambda p: p.preempt(holder(), waiting, gpu, now), bool, False, out)

    def renew(
        self,
        holder: Callable[[], ClientView],
        waiting: Sequence[ClientView],
        gpu: GpuView,
        now: int,
        out: list[Command],
    ) -> bool:
        """Whether the holder has another quantum."""
        if "renew" not in self._has:
            return False
        return self._ask("renew", lambda p: p.renew(holder(), waiting, gpu, now), bool, False, out)

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now: int, out: list[Command]) -> list[int]:
        """Expected order of turns; always a permutation of the waiting clients."""
        expected = [view.client for view in waiting]
        if "order" not in self._has:
            return expected
        answer = self._ask("order", lambda p: list(p.order(waiting, gpu, now)), list, expected, out)
        whole = len(answer) == len(expected) and all(type(client) is int for client in answer)
        if whole and set(answer) == set(expected):
            return answer
        self._give_up("order", ValueError(f"{answer!r} is no permutation of {expected!r}"), out)
        return expected

    def expected(self, waiting: Sequence[ClientView], gpu: GpuView, now: int, out: list[Command]) -> int:
        """The waiting client that will probably be next."""
        if "order" not in self._has:
            return waiting[0].client
        return self.order(waiting, gpu, now, out)[0]

    def released(self, client: Callable[[], ClientView], now: int, out: list[Command]) -> None:
        """A lease ended."""
        if "released" in self._has:
            self._ask("released", lambda p: p.released(client(), now), type(None), None, out)

    def gone(self, client: int, out: list[Command]) -> None:
        """A client left this GPU."""
        if "gone" in self._has:
            self._ask("gone", lambda p: p.gone(client), type(None), None, out)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """The longest wait that the policy states; None: it states none."""
        if "wait_bound_ns" not in self._has:
            return None
        bound: int | None = self.policy.wait_bound_ns(clients, gpu)  # type: ignore[attr-defined]
        return bound

    def _wake_at_ns(self, now_ns: int) -> int:
        wake = self.policy.wake_at_ns(now_ns) if "wake_at_ns" in self._has else None  # type: ignore[attr-defined]
        if type(wake) is not int or wake <= now_ns:
            raise ValueError(f"choose() left the GPU idle, but wake_at_ns() is {wake!r}: no time in the future")
        return min(wake, now_ns + QUANTUM_BOUNDS_NS[1])  # timers of the operating system have a bound

    def _checked(self, choice: object, waiting: Sequence[ClientView]) -> Choice:
        if type(choice) is not Choice:
            raise TypeError(f"choose() answered {choice!r}, not a Choice")
        client = choice.client
        # The usual answer is the first client of the queue.
        if waiting[0].client != client and not any(view.client == client for view in waiting):
            raise ValueError(f"choose() named client {client!r}, which does not wait")
        quantum = choice.quantum_ns
        if quantum is None:
            return choice
        if type(quantum) is not int:
            raise TypeError(f"choose() answered a quantum of {quantum!r}")
        low, high = QUANTUM_BOUNDS_NS
        if not low <= quantum <= high:
            raise ValueError(f"choose() answered a quantum of {quantum} ns, outside [{low}, {high}]")
        return choice

    def _ask(self, operation: str, call: Callable[..., object], kind: type[T], default: T, out: list[Command]) -> T:
        try:
            answer = call(self.policy)
        except Exception as error:
            self._give_up(operation, error, out)
            return default
        if type(answer) is kind:
            return answer
        self._give_up(operation, TypeError(f"{answer!r} is not a {kind.__name__}"), out)
        return default

    def _give_up(self, operation: str, error: Exception, out: list[Command]) -> None:
        failed = self.name
        assert type(self.policy) is not type(self._factory(FALLBACK, self._uuid)), f"{FALLBACK}.{operation}: {error!r}"
        self.failures += 1
        text = f"policy {failed} on {self._uuid}: {operation}: {type(error).__name__}: {error}; {FALLBACK} takes over"
        out.append(Log(logging.ERROR, text[:2000]))
        values = {"uuid": self._uuid, "policy": FALLBACK, "failed": failed, "error": str(error)[:200]}
        out.append(Notify("policy", {**values}))
        self.replace(FALLBACK, self._factory(FALLBACK, self._uuid))
