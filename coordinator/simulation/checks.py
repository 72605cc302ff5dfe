"""Checks of a world (world.py) against what its models really do, and counts of what happened.

- Invariants 1 and 7: at a grant each other process that has its gate open or unfinished work on that GPU holds a lease
  of the plan; or gives one back, if the new lease has no turn.  Under exclusive sharing such a process is a mate in a
  gang's slot.
  Excused are processes past their drain's deadline, with a connection lost at work, or missing in a damaged journal.
  A confirmed claim under other sharing begins no work, so it is not checked.
- Invariant 7: in the end every process was served, and no client waits.  Excepted are clients that do not fit beside
  immovable memory of others and are reported as such.
- Gangs: time in which members had their gates open together, and in which one had while another waited.

Limits of effort and work are in bounds.py, the engine's own checks in engine/invariants.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvshare.coordinator.model import commands
from nvshare.coordinator.model.seat import HOLDING, REVOKING
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.programs.client import Process

if TYPE_CHECKING:
    from nvshare.coordinator.simulation.world import World

CALM_EVENTS = 20_000
"""Most events in the ten minutes of calm at the end; a world with more does not come to rest."""


class Checks:
    """The checks of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._handled_before_calm = 0
        self.grants = 0
        self.excused = 0
        self.restores = 0
        self.credits = 0
        self.host_refused = 0
        """Refused requests for host memory."""
        self.refused_in_calm = 0
        """Refused requests for room in the calm, when no process allocates: they were for existing memory."""
        self.pins_refused = 0
        self.lacking = 0
        """Clients that did not fit beside immovable memory of others.  In the second after a restart they do not count:
        they may have allocated before other clients were back."""
        self.shut_out = 0
        self.gathered = 0
        self.together_ns = 0
        self.apart_ns = 0

    def calm_begins(self) -> None:
        """From now on no process begins new work."""
        self._handled_before_calm = self._world.handled

    def watch(self, out: Sequence[commands.Command]) -> None:
        """Checks the commands of one event, in their order."""
        world = self._world
        restless = world.calm and world.handled > self._handled_before_calm + CALM_EVENTS
        assert not restless, f"the world has not come to rest after {CALM_EVENTS} events without new work"
        for command in out:
            if isinstance(command, commands.Send):
                self._check_send(command, out)
            elif isinstance(command, commands.Notify):
                self._count(command)

    def _count(self, note: commands.Notify) -> None:
        self.gathered += note.kind == "gang_gathered"
        self.host_refused += note.kind == "refused" and "owner" in note.values
        self.refused_in_calm += note.kind == "refused" and self._world.calm
        self.lacking += note.kind == "lacks_room" and not self._is_reconnecting(str(note.values["uuid"]))
        self.shut_out += note.kind == "shut_out"

    def _is_reconnecting(self, uuid: str) -> bool:
        assert self._world.scheduler is not None
        return self._world.scheduler._node.gpus[uuid].reconnecting(self._world.now_ns)

    def _check_send(self, command: commands.Send, out: Sequence[commands.Command]) -> None:
        world = self._world
        process, message = world.network.connections.get(command.client), command.message
        if not isinstance(process, Process):
            return
        if isinstance(message, messages.Restore | messages.MoveCredit):
            self.restores += isinstance(message, messages.Restore)
            self.credits += isinstance(message, messages.MoveCredit)
            return
        if not isinstance(message, messages.Grant | messages.Revoke):
            return
        side = process.sides[message.gpu]
        uuid = side.uuid
        if isinstance(message, messages.Revoke):
            number = message.lease_id
            world.after(message.drain_deadline_ns, lambda: process.excuse(side, number))
            return
        self.grants += 1
        for other in world.processes.values():
            for its in other.sides.values():
                if its.uuid == uuid and its.open and other is not process:
                    fits = its.excused or self._may_be_beside(command, uuid, other, side.open, out)
                    assert fits, f"invariant 1 or 7: {uuid} granted to {process.pid} while {other.pid} has it"
                    self.excused += its.excused

    def _may_be_beside(
        self, grant: commands.Send, uuid: str, other: Process, claimed: bool, out: Sequence[commands.Command]
    ) -> bool:
        """Whether the plan has the other process run beside the grant, which is one of the commands `out`."""
        assert self._world.scheduler is not None
        gpu = self._world.scheduler._node.gpus[uuid]
        seat = None if other.connection is None else gpu.seats.get(other.connection)
        gang = None if gpu.gang is None else gpu.gang.name
        if seat is not None and seat.client.gang == gpu.seats[grant.client].client.gang == gang:
            return True
        if gpu.settings.sharing is messages.Sharing.EXCLUSIVE:
            return False
        if claimed or (seat is not None and seat.phase is HOLDING):
            return True
        after = out[out.index(grant) :]
        notes = [
            note for note in after if isinstance(note, commands.Notify) and note.values.get("client") == grant.client
        ]
        if any(note.kind == "claimed" for note in notes):  # it has given back meanwhile what it claims
            return True
        quantum = next(note.values["quantum_ns"] for note in notes if note.kind == "granted")
        if seat is None or seat.phase is not REVOKING:
            return False
        revoked = any(
            isinstance(each, commands.Send)
            and isinstance(each.message, messages.Revoke)
            and each.client == other.connection
            for each in after
        )
        return quantum == 0 or revoked  # perhaps after the grant

    def pass_time(self, elapsed_ns: int) -> None:
        """Accounts for the gangs' time since the last change."""
        at_work: dict[str, set[str]] = {}
        waiting: dict[str, set[str]] = {}
        for process in self._world.processes.values():
            if process.alive and process.gang:
                for side in process.sides.values():
                    if side.open:
                        at_work.setdefault(process.gang, set()).add(side.uuid)
                    elif side.asked:
                        waiting.setdefault(process.gang, set()).add(side.uuid)
        for gang, gpus in at_work.items():
            if len(gpus) > 1:
                self.together_ns += elapsed_ns
            elif waiting.get(gang, gpus) - gpus:
                self.apart_ns += elapsed_ns

    def check_end(self) -> None:
        """Asserts that every process was served."""
        world = self._world
        assert world.scheduler is not None
        snapshot = world.scheduler.snapshot(world.now_ns)
        reported = {
            (client.client, seat.uuid)
            for client in snapshot.clients
            for seat in client.seats
            if seat.memory.shut_out and seat.memory.lacking_bytes and seat.turn.waiting_since_ns is not None
        }
        for gpu in snapshot.gpus:
            waiting = gpu.leases.waiting - sum(uuid == gpu.uuid for _, uuid in reported)
            assert waiting == 0, f"{waiting} wait for {gpu.uuid} for ever: {gpu}"
        for process in world.processes.values():
            for side in process.sides.values():
                waits = process.alive and side.wanted and not side.open
                lost = waits and (process.connection, side.uuid) not in reported
                assert not lost, f"process {process.pid} was lost: {side}"
