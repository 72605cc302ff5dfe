"""The policy interface: what a policy sees, and what it may answer.

A policy decides for ONE GPU.  It sees frozen views, never the core's records, so it cannot break an invariant; the core
checks every answer, and a policy that raises or answers nonsense is logged and replaced by round robin.

Each operation says when it is *not* called.  A policy needs to implement `choose` only.

May not go here: messages, sockets, clocks, randomness.  Time comes as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ClientView:
    """One client of this GPU as a policy sees it.  Times in ns of a monotonic clock, memory in bytes."""

    client: int
    name: str
    priority: int
    attached_at_ns: int
    waiting_since_ns: int | None
    """None: does not wait for the lease."""
    holding_since_ns: int | None
    """None: does not hold it."""
    last_released_ns: int | None
    used_ns: int
    """Time that it has held the lease in all, the present lease included."""
    leases: int
    submissions: int
    """Gated calls in all finished leases: a rough measure of progress."""
    allocated_bytes: int
    resident_bytes: int
    user_id: int = 0


@dataclass(frozen=True, slots=True)
class GpuView:
    """The GPU that the policy decides for."""

    uuid: str
    capacity_bytes: int
    quantum_ns: int
    """The quantum in force: fixed, or the automatic one as computed."""
    contended: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """Who runs next.  `quantum_ns` None: the GPU's."""

    client: int
    quantum_ns: int | None = None


@runtime_checkable
class Policy(Protocol):
    """What the core asks of a policy."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        """Who gets the free lease.  None leaves the GPU idle, which is right only for a policy that throttles; it must then name
        a time in `wake_at_ns`.  Not called while somebody holds the lease, nor with nobody waiting."""
        ...


class PolicyBase:
    """Defaults for everything but `choose`."""

    name = ""

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Whether to revoke the lease before its quantum ends.  Called when somebody starts to wait and when priorities change;
        not called for a holder that is already being revoked, nor with nobody waiting."""
        return False

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Sequence[int]:
        """The clients in the order in which they are expected to run; the memory plan evicts from its end (Belady).  A wrong
        order costs time, never correctness."""
        return [view.client for view in waiting]

    def wake_at_ns(self, now_ns: int) -> int | None:
        """When to ask again although nothing happened; None: never.  Asked after each decision."""
        return None

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """Longest time that a waiting client may have to wait, drains and memory moves aside, with so many clients on the GPU;
        None: no bound.  The tests hold the policy to it."""
        return None

    def released(self, client: ClientView, now_ns: int) -> None:
        """A lease ended.  Not called for a client that is gone."""

    def gone(self, client: int) -> None:
        """A client left this GPU; forget it."""
