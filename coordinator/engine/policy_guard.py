"""Stands between the core and one GPU's policy: asks, checks every plan, and replaces a policy that breaks the rules.

No exception of a policy passes, also none that ends programs, and no plan that names a client which does not want the
GPU.  After the first breach round robin replaces the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from nvshare.coordinator.model.commands import Command, Log, Notify
from nvshare.scheduler_policies.api import Allotment, GpuView, Happened, JobView, Plan, Policy, PolicyBase

FALLBACK: Final = "round_robin"
QUANTUM_BOUNDS_NS: Final = (100_000, 3_600_000_000_000)
"""A policy may choose a quantum from 100 us to an hour."""
SOONEST_NS: Final = 1_000_000
"""A policy is asked again after this time at the earliest."""
LATEST_NS: Final = 3_600 * 1_000_000_000
"""The latest time that a policy may name to be asked again: timers of the operating system have a bound."""

MOST_WHY: Final = 2000

PolicyFactory = Callable[[str, str], Policy]
"""(name, uuid) -> a new policy for that GPU; raises for a name that it does not know."""


def _overrides(policy: Policy, operation: str) -> bool:
    method = getattr(type(policy), operation, None)
    return method is not None and method is not getattr(PolicyBase, operation)


class PolicyGuard:
    """One for each GPU."""

    time_limit: Callable[[], Callable[[Callable[[], Any]], Any]] = staticmethod(lambda: lambda call: call())
    """Makes what calls a policy of another package.  The shell's interrupts calls that take too long."""

    def __init__(self, uuid: str, name: str, policy: Policy, factory: PolicyFactory) -> None:
        self._uuid = uuid
        self._factory = factory
        self.failures = 0
        self.replaced = 0
        """Grows with each new policy."""
        self.failed: str
        """What the policy before this one did wrong; "": the operator chose this one."""
        self.replace(name, policy)

    def __getstate__(self) -> tuple[str, str, int, int, Policy | None]:
        """State for the event log.  Policies of other packages are left out: copying them may have effects."""
        return self._uuid, self.name, self.failures, self.replaced, self.policy if self._own else None

    def __setstate__(self, state: tuple[str, str, int, int, Policy | None]) -> None:
        self._uuid, self.name, self.failures, replaced, policy = state
        self.replaced = replaced - 1
        if policy is not None:
            self.replace(self.name, policy)

    def loaded(self, factory: PolicyFactory) -> None:
        """Completes the guard after `__setstate__`."""
        self._factory = factory
        if not hasattr(self, "policy"):
            self.replace(self.name, factory(self.name, self._uuid))

    def make(self, name: str) -> Policy:
        """A new policy for this GPU.  Raises what the factory raises."""
        return self._factory(name, self._uuid)

    def replace(self, name: str, policy: Policy) -> None:
        """A new policy from now on."""
        self.replaced += 1
        self.failed = ""
        self.name = name
        self.policy = policy
        self._own = type(policy).__module__.startswith("nvshare.scheduler_policies.")
        self._caught = Exception if self._own else BaseException
        self._limited = (lambda call: call()) if self._own else self.time_limit()
        self._observes = _overrides(policy, "observe")
        self.reads_progress = self._observes and bool(getattr(policy, "reads_progress", False))
        self._bounds = _overrides(policy, "wait_bound_ns")

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int, out: list[Command]) -> Plan:
        """The policy's plan for these jobs, of which there is at least one.  A plan without members names a time."""
        try:
            plan: Plan = self._limited(lambda: _checked(self.policy.decide(gpu, jobs, now_ns), gpu, jobs, now_ns))
        except self._caught as error:
            self._give_up("decide", error, out)
            return self.decide(gpu, jobs, now_ns, out)
        return plan

    def observe(self, happened: Callable[[], Happened], out: list[Command]) -> None:
        """Tells the policy, if it listens."""
        if not self._observes:
            return
        try:
            self._limited(lambda: self.policy.observe(happened()))  # type: ignore[attr-defined]
        except self._caught as error:
            self._give_up("observe", error, out)

    def starves(self, job: JobView, now_ns: int, out: list[Command]) -> None:
        """A job has waited far too long."""
        seconds = (now_ns - (job.turn.waiting_since_ns or now_ns)) // 1_000_000_000
        self._give_up("decide", RuntimeError(f"{job.name} has waited for {seconds} s and is not named"), out)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """The longest wait that the policy states; None: it states none."""
        if not self._bounds:
            return None
        bound: int | None = self.policy.wait_bound_ns(clients, gpu)  # type: ignore[attr-defined]
        return bound

    def _give_up(self, operation: str, error: BaseException, out: list[Command]) -> None:
        failed = self.name
        assert type(self.policy) is not type(self._factory(FALLBACK, self._uuid)), f"{FALLBACK}.{operation}: {error!r}"
        self.failures += 1
        why = _text_of(error)
        text = f"{operation}: {type(error).__name__}: {why}"
        out.append(Log(logging.ERROR, f"{self._uuid}: the policy {failed} failed ({text}); {FALLBACK} decides instead"))
        values = {"uuid": self._uuid, "policy": FALLBACK, "failed": failed, "error": why[:200]}
        out.append(Notify("policy", {**values}))
        self.replace(FALLBACK, self._factory(FALLBACK, self._uuid))
        self.failed = f"the policy {failed} failed ({text[:200]})"


def _text_of(error: BaseException) -> str:
    """What can be sent and logged of an exception of another package."""
    try:
        text = str(error)[:1000]
    except BaseException:
        return "(its text cannot be made)"
    return "".join(c if c.isprintable() else "?" for c in text)


def _checked(plan: object, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
    if type(plan) is not Plan:
        raise TypeError(f"decide() answered {plan!r}, not a Plan")
    if type(plan.running) is not tuple or type(plan.order) is not tuple or type(plan.why) is not str:
        raise TypeError("a Plan has a tuple of Allotments, a tuple of clients, and a text")
    if not set(map(type, plan.order)) <= {int}:
        raise TypeError("the order of a Plan names clients by their numbers")
    if len(plan.why) > MOST_WHY or not plan.why.isprintable():
        raise ValueError(f"a Plan's reason is one printable line of at most {MOST_WHY} characters")
    again_ns = plan.ask_again_ns
    if again_ns is not None and type(again_ns) is not int:
        raise TypeError(f"ask_again_ns is {again_ns!r}")
    if not plan.running and (again_ns is None or again_ns <= now_ns):
        raise ValueError(f"the plan leaves the GPU idle, but ask_again_ns is {again_ns!r}: no time in the future")
    for allotment in plan.running:
        _check_allotment(allotment, gpu)
    unknown = {allotment.client for allotment in plan.running}
    if len(unknown) < len(plan.running):
        raise ValueError("the plan names a client twice")
    for job in jobs:  # those that run and the next ones are the first
        if not unknown:
            break
        unknown.discard(job.client)
    if unknown:
        raise ValueError(f"the plan names client c{min(unknown)}, which does not want the GPU")
    return plan


def _check_allotment(allotment: object, gpu: GpuView) -> None:
    if type(allotment) is not Allotment:
        raise TypeError(f"the plan has {allotment!r}, not an Allotment")
    if type(allotment.watch) is not bool:
        raise TypeError(f"watch is {allotment.watch!r}")
    client, quantum, rate, pacing = allotment.client, allotment.quantum_ns, allotment.rate, allotment.pacing_ns
    if type(client) is not int:
        raise ValueError(f"the plan names client {client!r}, which does not want the GPU")
    low, high = QUANTUM_BOUNDS_NS
    # The operator may set any quantum, and the policy repeat it.
    if quantum not in (None, gpu.quantum_ns) and (type(quantum) is not int or not low <= quantum <= high):
        raise ValueError(f"a quantum of {quantum!r} ns, outside [{low}, {high}]")
    if type(rate) not in (float, int) or not 0.0 < rate <= 1.0:
        raise ValueError(f"a rate of {rate!r}, outside (0, 1]")
    if pacing is not None and (type(pacing) is not int or pacing < low):
        raise ValueError(f"pacing of {pacing!r} ns, below {low}")
