"""Round robin, the default: the owner that had its last turn longest ago is next, with its program of which the same
is true.

Invariant: while a client waits, each other owner runs at most once for each turn of its own owner, and each other
program of its owner once; see owner_turns.py.  A newcomer counts from when it attached, so newcomers cannot keep others
from their turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase
from nvshare.scheduler_policies.owner_turns import OwnerTurns


class RoundRobin(PolicyBase):
    """Remembers when each owner had its last turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns = OwnerTurns()

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """The first in turn order of the owner that is next."""
        return Choice(self._turns.first(waiting).client)

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """Owner by owner, round by round."""
        return self._turns.order(waiting)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """See owner_turns.py."""
        return self._turns.longest_wait(clients) * gpu.quantum_ns

    def released(self, client: ClientView, now_ns: int) -> None:
        """Its owner has had a turn."""
        self._turns.released(client, now_ns)

    def gone(self, client: int) -> None:
        """Forget it."""
        self._turns.gone(client)
