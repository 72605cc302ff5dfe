"""Models of hooked processes: they connect, ask for leases, work, drain, hang and die.

A model keeps the hook's rules: its gate is open only between `Grant` and `Release`, and it claims its lease after a
reconnect.  It may answer late.  All randomness and time come from the world.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.programs.memory import Memory
from nvshare.coordinator.simulation.programs.side import Side

if TYPE_CHECKING:
    from nvshare.coordinator.simulation.world import World


class Process:
    """A model of a hooked process.  It survives the coordinator; its connection does not."""

    def __init__(
        self, world: World, pid: int, uuids: list[str], mode: messages.MemoryMode, priority: int, gang: str = ""
    ) -> None:
        self.world = world
        self.gang = gang
        self.pid = pid
        self.mode = mode
        self.priority = priority
        self.sides = {ordinal: Side(uuid, ordinal) for ordinal, uuid in enumerate(uuids)}
        self.connection: int | None = None
        self.alive = True
        self.number = 0
        """Unique in its world, where process ids are reused."""
        self.slot = ""
        """The slot of its container."""
        self.ending = False
        """Its container ends."""
        self.hidden = False
        """The kernel does not report its process id."""
        self.old = False
        """Its hook does not ask for pins."""
        self.profile: messages.Profile | None = None
        self.memory = Memory(self)

    @property
    def peer(self) -> Peer:
        """The process as reported by the kernel."""
        return Peer(0 if self.hidden else self.pid, self.pid % self.world.plan.users, self.slot)

    # --- connection -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Says hello, claims held leases and asks for wanted ones."""
        world = self.world
        if not self.alive or self.connection is not None:
            return
        if world.shell is None:
            world.after(world.chance.randint(1, 50) * MILLISECOND_NS, self.connect)
            return
        self.connection = world.network.open(self, world.shell)
        weight, gang = 1 + self.pid % 3, self.gang if world.plan.gangs_are_told else ""
        name, protocol = f"p{self.pid}", messages.PROTOCOL_VERSION
        self.tell(messages.Hello(protocol, name, "model", 1, self.priority, self.mode, 0, "0", weight, gang))
        if self.profile is not None:
            self.tell(self.profile)
        self.memory.connected()
        for side in self.sides.values():
            lease = side.lease.number if side.open or side.closing else 0
            side.asked = side.wanted and not lease
            side.lease.newest = side.lease.released = 0
            memory = side.memory
            state = (lease, side.asked, memory.allocated, memory.resident, self.memory.pinned(side))
            self.tell(messages.AttachGpu(side.ordinal, side.uuid, world.plan.capacity_bytes, *state))

    def lost(self) -> None:
        """Handles the loss of the connection: a holder continues, and the process reconnects later."""
        self.connection = None
        self.memory.host.lost()
        for side in self.sides.values():
            side.asked = False
            self.memory.lost(side)
        self.world.after(self.world.chance.randint(1, 800) * MILLISECOND_NS, self.connect)

    def kill(self) -> None:
        """SIGKILL."""
        self.world.kill(self)

    def tell(self, message: messages.Message) -> None:
        """Sends a message, if there is a connection."""
        if self.connection is not None:
            self.world.network.send_up(self.connection, messages.encode(message))

    def hear(self, message: messages.Message) -> None:
        """Handles a message."""
        if not self.alive:
            return
        side = self.sides.get(getattr(message, "gpu", -1))
        if isinstance(message, messages.Rejected):
            expected = message.code == messages.Rejection.OUT_OF_MEMORY or (
                message.code == messages.Rejection.NOT_ALLOWED and (self.ending or not message.final)
            )
            assert expected, f"an honest process was rejected: {message}"
        elif isinstance(message, messages.HostReserved):
            self.memory.host.answered(message)
        if side is None:
            return
        if isinstance(message, messages.GpuSettings):
            side.settings = message
        elif isinstance(message, messages.Allot):
            side.counts.wanted = message.report
        elif isinstance(message, messages.Grant):
            self._granted(side, message)
        elif isinstance(message, messages.Waiters) and message.lease_id == side.lease.number:
            side.lease.waiters = message.waiters
            self._consider_idle(side)
        elif isinstance(message, messages.Revoke) and message.lease_id == side.lease.number and side.open:
            self._close(side, message.drain_deadline_ns)
        elif isinstance(message, messages.Evict | messages.Restore):
            self.memory.ordered(side, message)
        elif isinstance(message, messages.MoveCredit):
            self.memory.credited(side, message)
        elif isinstance(message, messages.MemoryReserved):
            self.memory.reserved(side, message)
        elif isinstance(message, messages.PinsReserved):
            self.memory.pins_reserved(side, message.bytes)

    # --- work -------------------------------------------------------------------------------------------------------

    def live(self, side: Side) -> None:
        """Begins the next work, unless the process dies first."""
        world = self.world
        if not self.alive or world.calm:
            return
        if world.chance.random() < world.plan.death_chance:
            world.kill(self)
            return
        if world.chance.random() < world.plan.drop_chance and self.connection is not None:
            world.drop(self)
        self.work(side)

    def work(self, side: Side) -> None:
        """A thread submits work: at once under a lease, else it waits for one."""
        chance = self.world.chance
        if side.open and not side.closing:
            side.wanted, side.lease.used = False, True
            side.busy_until_ns = self.world.now_ns + chance.choice((1, 5, 50, 400)) * MILLISECOND_NS
            self.memory.allocate(side)
            self.memory.change_pins(side)
            self._report_progress(side)
            self.world.after(side.busy_until_ns - self.world.now_ns, lambda: self._done(side))
            return
        side.wanted = True
        self.memory.allocate_ahead(side)
        if not side.asked and not side.closing and self.connection is not None:
            side.asked = True
            self.tell(messages.Request(side.ordinal))

    def _report_progress(self, side: Side) -> None:
        """Work that was done since the last report at a rate that varies, with the GPU busy for part of the time."""
        counts = side.counts
        if not counts.wanted:
            return
        chance, now_ns = self.world.chance, self.world.now_ns
        elapsed_ns = now_ns - counts.at_ns
        counts.work += elapsed_ns * chance.randint(1, 4) // MILLISECOND_NS
        counts.watched_ns += elapsed_ns
        counts.at_ns = now_ns
        busy_ns = counts.watched_ns * (1 + self.number % 10) // 10
        report = (side.ordinal, side.lease.number, now_ns, counts.work, busy_ns, counts.watched_ns)
        self.tell(messages.Progress(*report, steps=counts.work))

    def _done(self, side: Side) -> None:
        if self.world.now_ns < side.busy_until_ns or not self.alive:
            return
        if side.open:
            self._report_progress(side)
        self._consider_idle(side)
        pause_ns = self.world.chance.choice((0, 1, 20, 300)) * MILLISECOND_NS
        self.world.after(pause_ns, lambda: self.live(side))

    # --- lease ------------------------------------------------------------------------------------------------------

    def _granted(self, side: Side, grant: messages.Grant) -> None:
        lease = side.lease
        assert grant.lease_id >= lease.newest, f"lease ids only grow: {grant}, had {lease.newest}"
        if side.open:
            assert grant.lease_id == lease.number, f"a second lease: {grant}, has {lease.number}"
            lease.newest, lease.waiters = grant.lease_id, grant.waiters
            self._consider_idle(side)
            return
        if grant.lease_id in (lease.newest, lease.released):
            return  # its claim was confirmed after its release: the two messages crossed
        lease.number = lease.newest = grant.lease_id
        side.open = True
        side.asked = lease.used = False
        side.excused = self.world.is_unrecorded(self.connection)
        lease.waiters = grant.waiters
        if self.memory.granted(side):
            self.work(side)

    def _consider_idle(self, side: Side) -> None:
        wait_ns = side.settings.idle_release_ns if side.settings else 0
        idle = side.open and not side.closing and self.world.now_ns >= side.busy_until_ns
        if wait_ns and idle and side.lease.waiters:
            number = side.lease.number
            self.world.after(wait_ns, lambda: self._idle_release(side, number))

    def _idle_release(self, side: Side, number: int) -> None:
        still = side.open and not side.closing and side.lease.number == number and side.lease.waiters
        if still and self.alive and self.world.now_ns >= side.busy_until_ns and self.connection is not None:
            self.release(side, idle=True, drained=True)

    def _close(self, side: Side, deadline_ns: int) -> None:
        world = self.world
        side.closing = True
        drain_ns = world.chance.randint(0, 10) * MILLISECOND_NS
        if world.chance.random() < world.plan.hang_chance:
            drain_ns = deadline_ns + world.chance.randint(1, 3000) * MILLISECOND_NS
            if world.chance.random() < 0.5:  # the hook reports the missed deadline; the work continues
                world.after(deadline_ns, lambda: self.release(side, idle=False, drained=False))
        world.after(drain_ns, lambda: self.release(side, idle=False, drained=True))

    def excuse(self, side: Side, number: int) -> None:
        """The drain is past its deadline: other clients may be granted."""
        side.excused = side.excused or (side.open and side.lease.number == number)

    def release(self, side: Side, *, idle: bool, drained: bool) -> None:
        """Closes the gate and returns the lease, after the drain or its deadline."""
        if not self.alive or not side.open:
            return
        number, side.open, side.closing, side.lease.waiters = side.lease.number, False, False, 0
        side.excused = False
        interrupted = self.world.now_ns < side.busy_until_ns
        side.busy_until_ns = 0
        side.memory.pinning = 0
        side.wanted = side.wanted or interrupted
        if self.connection is None:
            return
        side.asked, side.lease.released = side.wanted, number
        self.memory.report(side)
        reason = messages.ReleaseReason.IDLE if idle else messages.ReleaseReason.REVOKED
        used = int(side.lease.used)
        self.tell(messages.Release(side.ordinal, number, reason, drained, side.wanted, 1000, 0, used))
        if interrupted:
            return
        if idle or not side.wanted:
            self.world.after(self.world.chance.randint(1, 200) * MILLISECOND_NS, lambda: self.live(side))


def draw_profile(chance: random.Random) -> messages.Profile:
    """A process's profile."""
    request = chance.choice((0, 0, 200, 600))
    limit, deadline_ns = chance.choice((300, 1000, 1000)), chance.choice((0, SECOND_NS, 20 * SECOND_NS))
    return messages.Profile(chance.randint(0, 2), request, limit, deadline_ns, chance.random() < 0.3)
