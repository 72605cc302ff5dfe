"""A model's share of the host budget.

As a hook does, a model asks for its share before it allocates, reports it after a reconnect, and sometimes returns
memory.  Invariant: `bytes` never exceeds the coordinator's last answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvshare.coordinator.protocol.messages import HostReserved


@dataclass(slots=True, eq=False)
class HostShare:
    """The share of one process.  `send` sends a request number and a size; without a connection it does nothing."""

    send: Callable[[int, int], None]
    bytes: int = 0
    asked: int = 0
    """Number of the last request."""
    continuation: Callable[[], None] | None = None
    """Runs once the needed share is there."""
    needed_bytes: int = 0

    def ask(self, total: int) -> None:
        """Asks for a share; returns a surplus at once."""
        self.bytes = min(self.bytes, total)
        self.asked += 1
        self.send(self.asked, total)

    def need(self, total: int, then: Callable[[], None]) -> None:
        """Runs `then` once there is a share of `total`; not after a refusal."""
        if total <= self.bytes:
            then()
            return
        self.continuation, self.needed_bytes = then, total
        self.ask(total)

    def answered(self, answer: HostReserved) -> None:
        """Handles an answer; ignores it when a newer request is open."""
        if answer.sequence != self.asked:
            return
        self.bytes = answer.bytes
        continuation, self.continuation = self.continuation, None
        if continuation is not None and self.needed_bytes <= self.bytes:
            continuation()

    def lost(self) -> None:
        """Handles the loss of the connection."""
        self.bytes, self.continuation = 0, None
