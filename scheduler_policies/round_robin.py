"""Round robin, the default: whoever had its last turn longest ago is next.

Invariant: while a client waits, every other client runs at most once before it; so it waits at most (clients - 1)
quanta, and the quantum that was running.  A newcomer counts from when it attached, so newcomers cannot keep others
from their turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase


class RoundRobin(PolicyBase):
    """No state: turn order is the order in which the core shows those who wait."""

    name = "round_robin"

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """The first in turn order; O(1)."""
        return Choice(waiting[0].client)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """Each other client once."""
        return max(0, clients - 1) * gpu.quantum_ns
