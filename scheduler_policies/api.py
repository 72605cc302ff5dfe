"""The policy interface: the views that a policy sees, and its operations.

A policy decides for ONE GPU.  It sees frozen views, never the engine's records, so it cannot break an invariant.  The
engine checks every answer.  It logs a policy that raises or answers nonsense, and replaces it by round robin.

Each operation says when it is *not* called.  A policy must implement only `choose`.  Time is an argument: policies use
no clock and no randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ClientView:
    """One client of this GPU.  Times are in ns of a monotonic clock, memory in bytes."""

    client: int
    name: str
    priority: int
    attached_at_ns: int
    waiting_since_ns: int | None
    """None: it does not wait for the lease."""
    holding_since_ns: int | None
    """None: it does not hold the lease."""
    last_released_ns: int | None
    used_ns: int
    """Total time of its leases, including the present one."""
    leases: int
    submissions: int
    """Gated calls in all finished leases: a rough measure of progress."""
    allocated_bytes: int
    resident_bytes: int
    user_id: int = 0
    weight: int = 1
    """1 to 10 000, for policies that divide time."""
    group: str = ""
    """Clients of one group share one part of the time, as the processes of a Kubernetes slot do; "": no group."""
    owner: str = ""
    """The user or slot.  Time is divided between owners first, then between the programs of each.  "" for all clients
    if the operator divides time between programs."""
    called: bool = False
    """In `released`: the policy of another GPU gave the client this turn, together with its gang."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """The policy's GPU."""

    uuid: str
    capacity_bytes: int
    quantum_ns: int
    """The present quantum, fixed or automatic."""
    contended: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The next lease holder.  `quantum_ns` None: the GPU's quantum."""

    client: int
    quantum_ns: int | None = None


@runtime_checkable
class Policy(Protocol):
    """The required operation.  `PolicyBase` has defaults for the others."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        """Chooses the next holder of the free lease.

        `waiting` is in turn order: the client with the oldest release is first, and a client that never held the lease
        counts from its attachment.  It is a fresh tuple that the policy may keep.  Paused clients are not in it.

        Called again at the same time, with fewer clients, when the chosen client's gang cannot have all its GPUs yet.
        That client gets its turn later without a new choice, and other clients must not lose by it.

        None leaves the GPU idle, for a policy that throttles; `wake_at_ns` must then return a time in the future.  Not
        called while a client holds the lease, without waiting clients, while memory moves for an already chosen client,
        or in concurrent sharing.
        """
        ...


class PolicyBase:
    """Defaults of the optional operations.  An operation that is not overridden is never called."""

    name = ""

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Whether to revoke the lease before its quantum ends.

        Called when a client starts to wait, when a priority changes, and at the grant of a client that was chosen
        before its memory moved.  Also called for a waiting gang member (its `holding_since_ns` is None), to find out
        whether it could keep this GPU.  Not called during a revocation, or without waiting clients.
        """
        return False

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Whether the holder keeps the lease for another quantum, because it would be chosen again anyway.

        Called when the quantum has ended and other clients wait.  Not called without waiting clients: the lease then
        continues.
        """
        return False

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Sequence[int]:
        """The clients in the expected order of their turns.  The memory plan evicts from its end (Belady).

        A wrong order costs only time.  Not called when all clients' memory fits.
        """
        return [view.client for view in waiting]

    def wake_at_ns(self, now_ns: int) -> int | None:
        """Time of the next `choose` without an event; None: never.  Called only after `choose` returned None."""
        return None

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """Longest wait with this number of clients on the GPU, without drains and memory moves; None: no bound.

        The tests check it.  Not called in production.
        """
        return None

    def released(self, client: ClientView, now_ns: int) -> None:
        """Notes the end of a turn, also by the end of its client; `gone` then follows.

        The turn of a client that misses its drain's deadline ends then, and not again at its release.  Not called when
        a gang interrupts a turn, which continues later.
        """

    def gone(self, client: int) -> None:
        """Forgets a client that has left this GPU."""
