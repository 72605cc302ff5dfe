"""Round robin, the default policy: the owner with the oldest last turn is next, with its program with the oldest turn.

The invariant and the longest wait are those of owner_turns.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase
from nvshare.scheduler_policies.owner_turns import OwnerTurns


class RoundRobin(PolicyBase):
    """Keeps the last turn of each owner."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns = OwnerTurns()

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """Chooses the first client, in turn order, of the next owner."""
        return Choice(self._turns.first(waiting).client)

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """Round by round, owner by owner."""
        return self._turns.order(waiting)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of owner_turns.py."""
        return self._turns.longest_wait(clients) * gpu.quantum_ns

    def released(self, client: ClientView, now_ns: int) -> None:
        """Notes a turn of the client's owner."""
        self._turns.released(client, now_ns)

    def gone(self, client: int) -> None:
        """Forgets the client."""
        self._turns.gone(client)
