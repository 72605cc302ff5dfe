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
    weight: int = 1
    """From 1 to 10 000, for policies that divide time."""
    group: str = ""
    """Not "": clients of one group have one share together; the processes of a Kubernetes slot are one."""
    owner: str = ""
    """Not "": the user or slot whose programs have their time together.  Time is divided between owners first, then
    between the programs of each.  "" for all if the operator has it divided between programs."""
    called: bool = False
    """In `released`: the policy of another GPU gave it this turn, with its gang."""


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
    """What the core asks of a policy.  Everything but `choose` has a default in `PolicyBase`."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice | None:
        """Who gets the free lease.

        Called again in the same moment, with fewer clients, when the one that was chosen is in a gang that cannot have
        all of its GPUs yet.  That one has its turn later, without being chosen again; others must lose nothing by it.

        `waiting` is in turn order: who released longest ago stands first, a client that never held the lease counts
        from when it attached.  It is a fresh tuple that may be kept.  Paused clients are not in it.

        None leaves the GPU idle, which is right only for a policy that throttles; `wake_at_ns` must then name a time in
        the future.  Not called while somebody holds the lease, with nobody waiting, while memory moves for a client
        that was chosen already, nor in concurrent sharing.
        """
        ...


class PolicyBase:
    """Defaults for everything but `choose`.  An operation that is not overridden costs nothing: it is not called."""

    name = ""

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Whether to revoke the lease before its quantum ends.

        Called when somebody starts to wait, when a priority changes, and when a client is granted that was chosen
        before its memory moved; also of a member of a gang that waits (its `holding_since_ns` is None), to learn
        whether it could keep this GPU if it had it.  Not called for a holder that is already being revoked, nor with
        nobody waiting.
        """
        return False

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Whether the holder keeps the lease for another quantum, because it would be chosen again anyway.

        Called when the quantum has run out and somebody waits.  Not called for a holder alone, which simply goes on.
        """
        return False

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Sequence[int]:
        """The clients in the order in which they are expected to run; the memory plan evicts from its end (Belady).
        A wrong order costs time, never correctness.  Not called when everybody's memory fits."""
        return [view.client for view in waiting]

    def wake_at_ns(self, now_ns: int) -> int | None:
        """When to ask again although nothing happened; None: never.  Asked only when `choose` returned None."""
        return None

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """Longest time that a waiting client may have to wait, drains and memory moves aside, with so many clients on
        the GPU; None: no bound.  The tests hold the policy to it.  Not called in production."""
        return None

    def released(self, client: ClientView, now_ns: int) -> None:
        """A turn ended, also by the end of its client; `gone` follows then.  A client that does not give its lease back
        in time ends its turn by that, and not again when it does.  Not called when a gang interrupts a turn, which goes
        on later."""

    def gone(self, client: int) -> None:
        """A client left this GPU; forget it."""
