"""One life of the coordinator in a world (simulation/world.py): the real dispatcher, decoder, journal and slot book.

Only what is outside of the process is a model: the sockets (simulation/network.py), the clock, other processes.  As in
daemon/loop.py a turn handles what has come, and what it sends leaves at the end of the turn.

A coordinator may be killed within a turn, after any step that the outside could see (`kill_within`).  Then nothing of
that turn is sent, and the journal's last write is cut off at any byte.

Invariants: all chance and time come from the world.  Non-goals: what the world does when a coordinator has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.simulation.network import MICROSECOND_NS
from nvshare.coordinator.system.journal import Journal

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.transport import Peer
    from nvshare.coordinator.simulation.world import World

RECOVERY_NS = 2 * SECOND_NS


class KilledError(Exception):
    """SIGKILL of the coordinator in the midst of a turn."""


class _WatchedScheduler(Scheduler):
    """The world sees every event with its commands, before they are carried out."""

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
        self._journal = Journal(journal, world.uuids, world.started_at)
        self._outgoing: list[tuple[int, bytes]] = []
        self._refused: list[int] = []
        self._greeted: set[int] = set()
        self._fuse: int | None = None
        self._armed_ns: int | None = None
        self._timer = 0
        self.scheduler = _WatchedScheduler(world)
        self.dispatcher = Dispatcher(
            self.scheduler,
            self,
            self,
            max_clients=world.settings.max_clients,
            end_process=world.end_process,
        )
        self.dispatcher.slots = SlotBook() if world.plan.slot_share else None

    def begin(self) -> None:
        """GPUs with what the journal says of them, and slots.  As daemon/main.py does it."""
        world = self._world
        for uuid in world.uuids:
            holder = self._journal.holder(uuid)
            capacity = world.plan.capacity_bytes
            number, deadline_ns = self._journal.next_lease_id(uuid), world.now_ns + RECOVERY_NS
            world.waits_for(uuid, holder)
            self.give(events.GpuAdded(uuid, "Model", capacity, capacity, number, holder, deadline_ns))
        if self.dispatcher.slots is not None:
            for slot in world.slots.present():
                self.dispatcher.slots.put(slot)

    def kill_within(self, steps: int) -> None:
        """SIGKILL in the next turn, after so many of its steps, or at its end if it has fewer."""
        self._fuse = steps

    def end(self) -> None:
        """The process is gone; its journal stays."""
        self._journal.close()

    # --- turns ------------------------------------------------------------------------------------------------------

    def give(self, *given: events.Event) -> None:
        """Events that no client has sent."""

        def work() -> None:
            for event in given:
                self.dispatcher.event(event, self._world.now_ns)

        self._turn(work)

    def receive(self, number: int, frames: Iterable[bytes]) -> None:
        """Frames of one peer."""

        def work() -> None:
            for frame in frames:
                self.dispatcher.frame(number, frame, self._world.now_ns)

        self._turn(work)

    def hear_end(self, number: int) -> None:
        """A connection ended."""
        self._greeted.discard(number)
        self._turn(lambda: self.dispatcher.gone(number, self._world.now_ns))

    def _turn(self, work: Callable[[], None]) -> None:
        if self._world.shell is not self:  # killed by an earlier part of what happens now
            return
        try:
            work()
        except KilledError:
            self._world.died()
            return
        if self._fuse is not None:  # it had fewer steps
            self._world.died()
            return
        self._flush()
        self._arm()
        self.dispatcher.tell_news()

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
            self._armed_ns = self.dispatcher.deadline_ns = None
            self.give(events.TimerFired())

    def _step(self) -> None:
        """Something that the outside could see."""
        if self._fuse is not None:
            if self._fuse == 0:
                raise KilledError
            self._fuse -= 1

    # --- what the dispatcher does with connections ------------------------------------------------------------------

    def send(self, connection: int, frame: bytes) -> None:
        self._step()
        if self.peer(connection) is not None:
            self._outgoing.append((connection, frame))

    def greeted(self, connection: int) -> None:
        self._greeted.add(connection)

    def has_greeted(self, connection: int) -> bool:
        """Whether the peer introduced itself in time."""
        return connection in self._greeted

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        self.send(connection, frame)
        self._greeted.discard(connection)
        self._refused.append(connection)

    def peer(self, connection: int) -> Peer | None:
        if connection in self._refused or not self._network.reaches(connection, self):
            return None
        return self._network.connections[connection].peer

    # --- what the dispatcher does with the journal ------------------------------------------------------------------

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        before = self._path.read_bytes() if self._fuse == 0 else b""
        self._journal.record(uuid, lease_id, process_id)
        if before:
            self._tear(before)
        self._step()

    def _tear(self, before: bytes) -> None:
        """The write that was under way is there up to some byte of what it changed."""
        after = self._path.read_bytes()
        changed = [index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
        if changed:
            cut = self._world.chance.randint(changed[0], changed[-1] + 1)
            with self._path.open("r+b") as file:
                file.write(after[:cut] + before[cut:])

    def forget(self, process_id: int) -> None:
        self._journal.forget(process_id)
