"""The coordinator of a world: the real dispatcher, decoder, journal and slot book over simulated connections.

Frames arrive late and in order, and connections break.  A connection number is never reused.  A refused peer gets a
last frame; the dispatcher learns of the end of every other peer.  As in daemon/loop.py, a turn handles the received
frames, and its frames are sent at its end.

A coordinator may be killed within a turn, after any externally visible step (`kill_within`).  The turn's frames are
then lost, and the journal's last write is cut off at any byte.  Non-goals: ZMTP, limits on rates and queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.system.journal import Journal

if TYPE_CHECKING:
    from nvshare.bench.virtual_node.world import World

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


class KilledError(BaseException):
    """SIGKILL of the coordinator within a turn: the dispatcher must not catch it."""


class _StrictDispatcher(Dispatcher):
    """A mistake of ours ends the world."""

    def failed(self, connection: int, error: Exception, now_ns: int) -> None:
        raise error


class _WatchedScheduler(Scheduler):
    """Shows the world every event with its commands, before these are carried out."""

    def __init__(self, world: World) -> None:
        super().__init__(world.policies, world.settings)
        self._world = world

    def handle(self, event: events.Event, now_ns: int) -> list[commands.Command]:
        out = super().handle(event, now_ns)
        self._world.watch(event, out)
        return out


class Shell:
    """A coordinator from its start to its end.  It is the dispatcher's outbox and journal."""

    def __init__(self, world: World, journal: Path) -> None:
        self._world = world
        self._network = world.network
        self._path = journal
        self._journal = Journal(journal, world.uuids, world.started_at, world.now_ns // 1000)
        self._outgoing: list[tuple[int, bytes]] = []
        self._refused: list[int] = []
        self._fuse: int | None = None
        self._armed_ns: int | None = None
        self._timer = 0
        self.scheduler = _WatchedScheduler(world)
        self.dispatcher = _StrictDispatcher(
            self.scheduler,
            self,
            self,
            Rights(own_user=0),
            max_clients=world.settings.max_clients,
            slots=SlotBook() if world.plan.slot_share else None,
            watch_end=world.watch_end,
            end_process=world.end_process,
            check_memory=self._look,
        )

    def begin(self) -> None:
        """Adds the GPUs with their journal records, and the slots, as daemon/coordinator.py does."""
        world = self._world
        for uuid in world.uuids:
            holder = self._journal.holder(uuid)
            capacity = world.plan.capacity_bytes
            total = 2 * capacity  # contexts and late figures lack no room
            number = self._journal.next_lease_id(uuid)
            self.give(events.GpuAdded(uuid, "Model", total, capacity, number, holder))
            self.give(events.MemoryChecked(uuid, *world.figures(uuid)))
        if self.dispatcher.slots is not None:
            for slot in world.slots.present():
                self.dispatcher.slots.put(slot)

    def _look(self, uuid: str) -> None:
        """The driver's figures are read a while after the question, and told a while after that."""
        world = self._world

        def read() -> None:
            told = events.MemoryChecked(uuid, *world.figures(uuid))
            world.after(world.chance.randint(1, 30) * MILLISECOND_NS, lambda: self.give(told))

        world.after(world.chance.randint(1, 250) * MILLISECOND_NS, read)

    def kill_within(self, steps: int) -> None:
        """Kills the coordinator in the next turn, after this number of steps or at the turn's end."""
        self._fuse = steps

    def end(self) -> None:
        """Closes the journal; the file stays."""
        self._journal.close()

    # --- turns ------------------------------------------------------------------------------------------------------

    def give(self, *given: events.Event) -> None:
        """Handles events that no client sent, in one turn."""

        def work() -> None:
            for event in given:
                self.dispatcher.event(event, self._world.now_ns)

        self._turn(work)

    def settle(self, clients: Iterable[int]) -> None:
        """Something of these clients' slot has changed, in one turn."""

        def work() -> None:
            for client in clients:
                self.dispatcher.settle(client, self._world.now_ns)

        self._turn(work)

    def receive(self, number: int, frames: Iterable[bytes]) -> None:
        """Handles frames of one peer, in one turn."""

        def work() -> None:
            for frame in frames:
                self.dispatcher.frame(number, frame, self._world.now_ns)

        self._turn(work)

    def hear_end(self, number: int) -> None:
        """Handles the end of a connection."""
        self._turn(lambda: self.dispatcher.gone(number, self._world.now_ns))

    def _turn(self, work: Callable[[], None]) -> None:
        if self._world.shell is not self:  # killed by an earlier turn of this action
            return
        try:
            work()
        except KilledError:
            self._world.died()
            return
        if self._fuse is not None:  # the turn had fewer steps
            self._world.died()
            return
        self._flush()
        self._arm()
        self.dispatcher.publish_notes()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for number, frame in outgoing:
            if number in self._network.connections:
                self._network.send_down(number, frame)
        refused, self._refused = self._refused, []
        for number in refused:
            self._network.refuse(number)

    def _arm(self) -> None:
        deadline_ns = self.dispatcher.deadline_ns
        if deadline_ns == self._armed_ns:
            return
        self._armed_ns = deadline_ns
        self._timer += 1
        number, world = self._timer, self._world
        if deadline_ns is not None:
            late_ns = world.chance.randint(0, 100) * MICROSECOND_NS
            world.after(max(0, deadline_ns - world.now_ns) + late_ns, lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number == self._timer and self._world.shell is self:
            self._armed_ns = None
            self.give(events.TimerFired())

    def _step(self) -> None:
        """Counts an externally visible step."""
        if self._fuse is not None:
            if self._fuse == 0:
                raise KilledError
            self._fuse -= 1

    # --- outbox -----------------------------------------------------------------------------------------------------

    def send(self, connection: int, frame: bytes) -> None:
        self._step()
        if self.peer(connection) is not None:
            self._outgoing.append((connection, frame))

    def greeted(self, connection: int) -> None:
        pass

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        self.send(connection, frame)
        self._refused.append(connection)

    def peer(self, connection: int) -> Peer | None:
        if connection in self._refused or not self._network.reaches(connection, self):
            return None
        return self._network.connections[connection].peer

    # --- journal ----------------------------------------------------------------------------------------------------

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        before = self._path.read_bytes() if self._fuse == 0 else b""
        self._journal.record(uuid, lease_id, process_id)
        if before:
            self._tear(before)
        self._step()

    def _tear(self, before: bytes) -> None:
        """Cuts off the last write at any changed byte."""
        after = self._path.read_bytes()
        changed = [index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
        if changed:
            cut = self._world.chance.randint(changed[0], changed[-1] + 1)
            with self._path.open("r+b") as file:
                file.write(after[:cut] + before[cut:])

    def forget(self, process_id: int) -> None:
        self._journal.forget(process_id)
