"""The simulated transport of a world: frames arrive late and in order, and connections break.

It replaces daemon/transport.py.  A connection number is never reused.  A refused peer gets a last frame; the dispatcher
learns of the end of every other peer.  Non-goals: ZMTP, limits on rates and queues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.protocol import messages

if TYPE_CHECKING:
    from nvshare.coordinator.simulation.shell import Shell
    from nvshare.coordinator.simulation.world import World

MICROSECOND_NS = 1000


class Endpoint(Protocol):
    """The client's end of a connection."""

    connection: int | None
    """The present connection; messages of earlier ones are not delivered."""

    @property
    def peer(self) -> Peer:
        """The process as reported by the kernel."""

    def hear(self, message: messages.Message) -> None:
        """Handles a message."""

    def lost(self) -> None:
        """Handles the loss of the connection."""


class Network:
    """All connections of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.connections: dict[int, Endpoint] = {}
        self._shells: dict[int, Shell] = {}
        """The coordinator of each connection, which may be dead.  Missing after the coordinator has cut the peer."""
        self._next = 1
        self._up_ns: dict[int, int] = {}
        self._down_ns: dict[int, int] = {}

    def open(self, endpoint: Endpoint, shell: Shell) -> int:
        """Opens a connection."""
        number = self._next
        self._next += 1
        self.connections[number] = endpoint
        self._shells[number] = shell
        return number

    def reaches(self, number: int, shell: Shell | None) -> bool:
        """Whether this coordinator still receives from the connection."""
        return number in self.connections and self._shells.get(number) is shell

    # --- to the coordinator -----------------------------------------------------------------------------------------

    def send_up(self, number: int, *frames: bytes) -> None:
        """Sends frames to the coordinator, after a delay and in order.

        They are lost if the coordinator or the connection is gone by then.  They arrive together, even if the first of
        them ends the connection.
        """
        at_ns = self._delay(self._up_ns, number)
        self._world.after(at_ns - self._world.now_ns, lambda: self._arrive(number, frames))

    def _delay(self, last_ns: dict[int, int], number: int) -> int:
        world = self._world
        at_ns = max(last_ns.get(number, 0), world.now_ns + world.chance.randint(5, 300) * MICROSECOND_NS)
        last_ns[number] = at_ns
        return at_ns

    def _arrive(self, number: int, frames: tuple[bytes, ...]) -> None:
        shell = self._world.shell
        if shell is not None and self.reaches(number, shell):
            shell.receive(number, frames)

    # --- to a client ------------------------------------------------------------------------------------------------

    def send_down(self, number: int, frame: bytes) -> None:
        """Sends a frame to the client, after a delay and in order."""
        at_ns = self._delay(self._down_ns, number)
        message = messages.decode(frame, messages.TO_CLIENT)
        assert isinstance(message, messages.Message), f"clients do not know {message}"
        self._world.after(at_ns - self._world.now_ns, lambda: self._deliver(number, message))

    def _deliver(self, number: int, message: messages.Message) -> None:
        endpoint = self.connections.get(number)
        if endpoint is not None and endpoint.connection == number:
            endpoint.hear(message)

    # --- ends -------------------------------------------------------------------------------------------------------

    def refuse(self, number: int) -> None:
        """The coordinator cuts the peer without a report of its end.  Frames sent before still arrive."""
        self._shells.pop(number, None)
        self._cut_after_last(number)

    def abandon(self, number: int) -> None:
        """The coordinator has died.  Its frames may still arrive."""
        if self._world.chance.random() < 0.5:
            endpoint = self.connections[number]
            self._forget(number)
            endpoint.lost()
        else:
            self._cut_after_last(number)

    def break_off(self, number: int) -> None:
        """Ends a connection and reports that to the coordinator."""
        shell = self._shells.get(number)
        self._forget(number)
        if shell is not None and shell is self._world.shell:
            shell.hear_end(number)

    def _cut_after_last(self, number: int) -> None:
        last_ns = max(0, self._down_ns.get(number, 0) - self._world.now_ns)
        self._world.after(last_ns + 1, lambda: self._cut(number))

    def _cut(self, number: int) -> None:
        endpoint = self.connections.get(number)
        self._forget(number)
        if endpoint is not None and endpoint.connection == number:
            endpoint.lost()

    def _forget(self, number: int) -> None:
        for table in (self.connections, self._shells, self._up_ns, self._down_ns):
            table.pop(number, None)
