"""How a model of simulation/client.py keeps to the host budget: nothing is allocated that could not be evicted.

As the hook, it asks for its share before it allocates, says what it has when it has connected again, and gives back
now and then what it does not need.

Invariant: `bytes` is never more than the coordinator last said.  May not go here: memory on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvshare.coordinator.protocol.messages import HostReserved


@dataclass(slots=True, eq=False)
class HostShare:
    """One process.  `send` asks for a share of so many bytes under a number; if that cannot be sent, nobody answers."""

    send: Callable[[int, int], None]
    bytes: int = 0
    asked: int = 0
    """Number of the last question."""
    wish: Callable[[], None] | None = None
    """What is done if the share that it was asked for has come."""
    wished_bytes: int = 0

    def ask(self, total: int) -> None:
        """For so much in all; what is more than that is given back at once."""
        self.bytes = min(self.bytes, total)
        self.asked += 1
        self.send(self.asked, total)

    def need(self, total: int, then: Callable[[], None]) -> None:
        """Go on when there is a share of so much; if it is refused, do not."""
        if total <= self.bytes:
            then()
            return
        self.wish, self.wished_bytes = then, total
        self.ask(total)

    def answered(self, answer: HostReserved) -> None:
        """The coordinator's word; not if a newer question is under way."""
        if answer.sequence != self.asked:
            return
        self.bytes = answer.bytes
        wish, self.wish = self.wish, None
        if wish is not None and self.wished_bytes <= self.bytes:
            wish()

    def lost(self) -> None:
        """There is no connection any more."""
        self.bytes, self.wish = 0, None
