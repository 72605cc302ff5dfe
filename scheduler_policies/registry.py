"""Names of policies: the built-in ones, and those of other packages in the entry-point group `nvshare.policies`.

Invariants: the built-in policies are always available, and no package can take their names.  A package that cannot be
imported makes only its own policies unavailable.  Policies are imported on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from nvshare.scheduler_policies.api import Policy

GROUP: Final = "nvshare.policies"
BUILT_IN: Final = {
    "auto": "nvshare.scheduler_policies.auto:Auto",
    "edf": "nvshare.scheduler_policies.edf:Edf",
    "fair_share": "nvshare.scheduler_policies.fair_share:FairShare",
    "least_attained": "nvshare.scheduler_policies.least_attained:LeastAttained",
    "priority": "nvshare.scheduler_policies.priority:Priority",
    "round_robin": "nvshare.scheduler_policies.round_robin:RoundRobin",
}


class UnknownPolicyError(LookupError):
    """No policy has that name.  The text lists the known names."""


class BrokenPolicyError(RuntimeError):
    """An offered policy is unusable.  The text names its package and the reason."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One available policy.  `origin` is its distribution."""

    name: str
    target: str
    origin: str


def offers() -> dict[str, Offer]:
    """All available policies by name, without importing them."""
    found = {name: Offer(name, target, "nvshare") for name, target in BUILT_IN.items()}
    for entry in _entries():
        if entry.name not in found:
            found[entry.name] = Offer(entry.name, entry.value, entry.dist.name if entry.dist else "unknown package")
    return dict(sorted(found.items()))


def _entries() -> Iterator[EntryPoint]:
    yield from sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))


def factory(name: str) -> Callable[[], Policy]:
    """The factory of the policies of this name, one for each GPU.

    Raises UnknownPolicyError, and BrokenPolicyError for a package that cannot be imported or offers something else.
    """
    offer = Offer(name, BUILT_IN[name], "nvshare") if name in BUILT_IN else offers().get(name)
    if offer is None:
        raise UnknownPolicyError(f"no policy {name!r}; known: {', '.join(offers())}")
    try:
        module, _, attribute = offer.target.partition(":")
        made: object = import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
    except (Exception, SystemExit) as error:
        raise BrokenPolicyError(f"policy {name!r} of {offer.origin}: {offer.target}: {error!r}") from error
    if not callable(made):
        raise BrokenPolicyError(f"policy {name!r} of {offer.origin}: {offer.target} is not a class or function")

    def make() -> Policy:
        try:
            policy = made()
        except (Exception, SystemExit) as error:
            raise BrokenPolicyError(f"policy {name!r} of {offer.origin}: {error!r}") from error
        if not isinstance(policy, Policy):
            raise BrokenPolicyError(f"policy {name!r} of {offer.origin}: {type(policy).__name__} has no decide()")
        return policy

    return make


def create(name: str, uuid: str) -> Policy:
    """A policy for one GPU; the policy factory of `Scheduler`."""
    return factory(name)()
