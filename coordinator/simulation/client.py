"""Models of hooked processes for simulation/world.py: they ask, work, drain, hang, move memory, and connect again.

A model keeps the hook's rules: its gate is open only between `Grant` and `Release`, it claims what it holds when it
has connected again, and it obeys orders; sometimes late, sometimes in part.  It restores no more than it has credit
for, and in `swap` mode it asks before it grows: for host memory (simulation/host.py), then for room.

Invariants: all chance and time come from the world.  May not go here: the coordinator's side, checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvshare.coordinator.daemon.transport import Peer
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.host import HostShare
from nvshare.coordinator.simulation.plan import Plan as Plan

if TYPE_CHECKING:
    from nvshare.coordinator.simulation.world import World


@dataclass(slots=True, eq=False)
class Move:
    """A memory order that a model carries out, in pieces."""

    evict: bool
    order_id: int
    size: int
    credit: int
    moved: int = 0
    waiting: bool = False


@dataclass(slots=True, eq=False)
class Side:
    """One process on one GPU."""

    uuid: str
    ordinal: int
    lease_id: int = 0
    newest_id: int = 0
    released_id: int = 0
    """Both of this connection: a coordinator whose journal is lost numbers anew."""
    open: bool = False
    closing: bool = False
    wanted: bool = False
    asked: bool = False
    busy_until_ns: int = 0
    used: bool = False
    """It has worked under the lease at hand."""
    waiters: int = 0
    excused: bool = False
    served: int = 0
    attached: bool = False
    allocated: int = 0
    resident: int = 0
    reserved: int = 0
    pinned: int = 0
    pinning: int = 0
    """What it has asked to have immovable."""
    settings: messages.GpuSettings | None = None
    move: Move | None = None
    growing: int = 0
    """What it has asked to grow to."""
    asked_for_room: int = 0
    """Number of its last question."""
    bringing: bool = False
    """The question is whether what is missing at a grant may come in: nothing runs before it is there."""


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
        """Unique in its world, where process ids are used again."""
        self.slot = ""
        """Its container's."""
        self.ending = False
        """Its container ends."""
        self.hidden = False
        """The kernel does not tell its process id."""
        self.old = False
        """Its hook asks nobody before memory becomes immovable."""
        self.host = HostShare(lambda number, total: self.tell(messages.ReserveHost(number, total)))

    def connect(self) -> None:
        """Hello, then claim what is held and ask for what is wanted."""
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
        if self.mode is messages.MemoryMode.SWAP and world.plan.memory_bytes:
            self.host.ask(self._evictable())
        for side in self.sides.values():
            lease = side.lease_id if side.open or side.closing else 0
            side.asked = side.wanted and not lease
            side.attached = True
            side.newest_id = side.released_id = 0
            pinned = side.resident if self.mode is messages.MemoryMode.DEVICE else side.pinned
            told = (lease, side.asked, side.allocated, side.resident, pinned)
            self.tell(messages.AttachGpu(side.ordinal, side.uuid, world.plan.capacity_bytes, *told))

    def lost(self) -> None:
        """The connection is gone; the holder goes on, and everybody connects again."""
        self.connection = None
        self.host.lost()
        for side in self.sides.values():
            side.asked = False
            side.move = None
            side.growing = side.pinning = 0
            if side.bringing:  # nobody answers any more
                side.bringing = False
                self.world.after(0, lambda s=side: self.work(s) if s.open and not s.closing else None)  # type: ignore[misc]
        self.world.after(self.world.chance.randint(1, 800) * MILLISECOND_NS, self.connect)

    @property
    def peer(self) -> Peer:
        """As the kernel says."""
        return Peer(0 if self.hidden else self.pid, self.pid % self.world.plan.users, self.slot)

    def kill(self) -> None:
        """SIGKILL."""
        self.world.kill(self)

    def tell(self, message: messages.Message) -> None:
        """Send to the coordinator, if there is a connection."""
        if self.connection is not None:
            self.world.network.send_up(self.connection, messages.encode(message))

    def hear(self, message: messages.Message) -> None:
        """A message has come."""
        if not self.alive:
            return
        side = self.sides.get(getattr(message, "gpu", -1))
        if isinstance(message, messages.Rejected):
            refused = message.code == messages.Rejection.NOT_ALLOWED and (self.ending or not message.final)
            assert refused, f"an honest process was rejected: {message}"
        elif isinstance(message, messages.HostReserved):
            self.host.answered(message)
        if side is None:
            return
        if isinstance(message, messages.GpuSettings):
            side.settings = message
        elif isinstance(message, messages.Grant):
            self._granted(side, message)
        elif isinstance(message, messages.Waiters) and message.lease_id == side.lease_id:
            side.waiters = message.waiters
            self._consider_idle(side)
        elif isinstance(message, messages.Revoke) and message.lease_id == side.lease_id and side.open:
            self._close(side, message.drain_deadline_ns)
        elif isinstance(message, messages.Evict | messages.Restore):
            evict = isinstance(message, messages.Evict)
            assert side.move is None, f"a second order: {message}"
            assert not side.open, f"an order under a lease: {message}"
            credit = message.credit_bytes if isinstance(message, messages.Restore) else message.bytes
            side.move = Move(evict, message.order_id, message.bytes, credit)
            self._go_on(side, side.move)
        elif isinstance(message, messages.MoveCredit):
            self._more_credit(side, message)
        elif isinstance(message, messages.MemoryReserved):
            self._reserved(side, message)
        elif isinstance(message, messages.PinsReserved):
            self._pin(side, message.bytes)

    def live(self, side: Side) -> None:
        """Think, then want to work; for ever."""
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
        """A thread submits: at once under a lease, else it waits for one."""
        chance = self.world.chance
        if side.open and not side.closing:
            side.wanted, side.used = False, True
            side.served += 1
            side.busy_until_ns = self.world.now_ns + chance.choice((1, 5, 50, 400)) * MILLISECOND_NS
            self._allocate(side)
            self._ask_to_pin(side)
            self.world.after(side.busy_until_ns - self.world.now_ns, lambda: self._done(side))
            return
        side.wanted = True
        self._allocate_ahead(side)
        if not side.asked and not side.closing and self.connection is not None:
            side.asked = True
            self.tell(messages.Request(side.ordinal))

    def _done(self, side: Side) -> None:
        if self.world.now_ns < side.busy_until_ns or not self.alive:
            return
        self._consider_idle(side)
        think = self.world.chance.choice((0, 1, 20, 300)) * MILLISECOND_NS
        self.world.after(think, lambda: self.live(side))

    def _granted(self, side: Side, grant: messages.Grant) -> None:
        assert grant.lease_id >= side.newest_id, f"lease ids only grow: {grant}, had {side.newest_id}"
        if side.open:
            assert grant.lease_id == side.lease_id, f"a second lease: {grant}, has {side.lease_id}"
            side.newest_id, side.waiters = grant.lease_id, grant.waiters
            return
        if grant.lease_id in (side.newest_id, side.released_id):
            return  # its claim was confirmed, but it has released meanwhile: the two messages crossed
        side.lease_id = side.newest_id = grant.lease_id
        side.open = True
        side.asked = side.used = False
        side.excused = self.world.is_unrecorded(self.connection)
        side.waiters = grant.waiters
        if side.move is not None:  # what has not come stays where it is
            self._finish_move(side, side.move, 0)
        side.reserved = side.resident
        side.growing = 0
        side.bringing = False
        if self.mode is messages.MemoryMode.SWAP and self._missing(side):
            side.bringing = True
            self._ask_for_room(side, side.resident + self._missing(side))
        else:
            self.work(side)

    def _missing(self, side: Side) -> int:
        """Of what must be on the card."""
        return max(0, side.allocated - side.resident)

    def _ask_for_room(self, side: Side, total: int) -> None:
        assert self.connection is not None
        side.growing = total
        side.asked_for_room += 1
        self.tell(messages.ReserveMemory(side.ordinal, side.asked_for_room, total))

    def _consider_idle(self, side: Side) -> None:
        wait = side.settings.idle_release_ns if side.settings else 0
        if wait and side.open and not side.closing and side.waiters and self.world.now_ns >= side.busy_until_ns:
            lease = side.lease_id
            self.world.after(wait, lambda: self._idle_release(side, lease))

    def _idle_release(self, side: Side, lease: int) -> None:
        still = side.open and not side.closing and side.lease_id == lease and side.waiters
        if still and self.alive and self.world.now_ns >= side.busy_until_ns and self.connection is not None:
            self._finish(side, idle=True, drained=True)

    def _close(self, side: Side, deadline_ns: int) -> None:
        world = self.world
        side.closing = True
        drain_ns = world.chance.randint(0, 10) * MILLISECOND_NS
        if world.chance.random() < world.plan.hang_chance:
            drain_ns = deadline_ns + world.chance.randint(1, 3000) * MILLISECOND_NS
            if world.chance.random() < 0.5:  # the hook sees the deadline and says so; the work goes on
                world.after(deadline_ns, lambda: self._finish(side, idle=False, drained=False))
        world.after(drain_ns, lambda: self._finish(side, idle=False, drained=True))

    def excuse(self, side: Side, lease: int) -> None:
        """Its drain is past the deadline: others may be let on."""
        side.excused = side.excused or (side.open and side.lease_id == lease)

    def _finish(self, side: Side, *, idle: bool, drained: bool) -> None:
        """The gate is closed and the work done, or the deadline passed."""
        if not self.alive or not side.open:
            return
        lease, side.open, side.closing, side.waiters = side.lease_id, False, False, 0
        side.excused = False
        interrupted = self.world.now_ns < side.busy_until_ns
        side.busy_until_ns = 0
        side.pinning = 0
        side.wanted = side.wanted or interrupted
        if self.connection is None:
            return
        side.asked, side.released_id = side.wanted, lease
        self._report(side)
        reason = messages.ReleaseReason.IDLE if idle else messages.ReleaseReason.REVOKED
        self.tell(messages.Release(side.ordinal, lease, reason, drained, side.wanted, 1000, 0, int(side.used)))
        if interrupted:
            return
        if idle or not side.wanted:
            self.world.after(self.world.chance.randint(1, 200) * MILLISECOND_NS, lambda: self.live(side))

    # --- memory -------------------------------------------------------------------------------------------------

    def _report(self, side: Side) -> None:
        if self.connection is None or not self.world.plan.memory_bytes:
            return
        pinned = side.resident if self.mode is messages.MemoryMode.DEVICE else side.pinned
        host = side.allocated - side.resident
        self.tell(messages.MemoryReport(side.ordinal, side.allocated, side.resident, pinned, host))

    def _allocate(self, side: Side) -> None:
        """Grow or shrink.  In mode `managed` what does not fit on the card stays off it, as a driver's pager would have
        it; in mode `swap` it asks for room."""
        plan, world = self.world.plan, self.world
        if not plan.memory_bytes or self.mode is messages.MemoryMode.DEVICE:
            return
        wanted = max(side.pinned, self._within_room(side, world.chance.randint(0, plan.memory_bytes)))
        if self.mode is messages.MemoryMode.SWAP and wanted > side.allocated:
            if self.connection is not None and not side.growing:
                total = self._evictable() + wanted - side.allocated
                self.host.need(total, lambda: self._grow(side, wanted))
            return
        side.allocated = wanted
        if self.mode is messages.MemoryMode.SWAP and world.chance.random() < 0.5:
            self.host.ask(self._evictable())
        room = plan.capacity_bytes - world.resident(side.uuid) + side.resident
        most = room if self.mode is messages.MemoryMode.MANAGED else side.resident
        side.resident = max(0, min(side.allocated, max(side.resident, most)))
        self._report(side)

    def _within_room(self, side: Side, wanted: int) -> int:
        """An allocation beyond what was told is out of memory, unless the hook is too old to have heard of it.  So is
        one beyond the card."""
        wanted = min(wanted, self.world.plan.capacity_bytes)
        room = side.settings.room_bytes if side.settings and not self.old else 0
        return min(wanted, room) if room else wanted

    def _allocate_ahead(self, side: Side) -> None:
        """Without a lease the memory has addresses only, and nobody is asked."""
        plan, chance = self.world.plan, self.world.chance
        if not plan.pin_chance or self.mode is not messages.MemoryMode.SWAP or chance.random() >= plan.pin_chance:
            return
        side.allocated = max(side.allocated, self._within_room(side, chance.randint(0, plan.memory_bytes)))
        self._report(side)

    def _ask_to_pin(self, side: Side) -> None:
        plan, chance = self.world.plan, self.world.chance
        if not plan.pin_chance or self.mode is not messages.MemoryMode.SWAP or chance.random() >= plan.pin_chance:
            return
        total = chance.randint(0, side.resident) if chance.random() < 0.5 else 0
        if total <= side.pinned:
            side.pinned = total
            self._report(side)
        elif self.old or side.settings is None or not side.settings.ask_pins:
            self._pin(side, total, asked=False)
        elif self.connection is not None and not side.pinning:
            side.pinning = total
            self.tell(messages.ReservePins(side.ordinal, 0, total))

    def _pin(self, side: Side, allowed: int, *, asked: bool = True) -> None:
        """Answered, or not asked.  The gate stays open until the answer has come, so the memory is there."""
        total, side.pinning = (side.pinning, 0) if asked else (allowed, side.pinning)
        self.world.pins_refused += asked and allowed < total
        if side.open and total <= allowed:
            side.pinned = max(side.pinned, min(total, side.resident))
            self._report(side)

    def _evictable(self) -> int:
        return sum(max(side.allocated, side.growing) for side in self.sides.values())

    def _grow(self, side: Side, wanted: int) -> None:
        """There is host memory for it."""
        if side.open and not side.closing and not side.growing and wanted > side.allocated:
            self._ask_for_room(side, wanted)

    def _reserved(self, side: Side, answer: messages.MemoryReserved) -> None:
        """Room to grow, or none.  After its lease the memory has addresses only."""
        if answer.sequence != side.asked_for_room or not side.growing:
            return
        wanted, side.growing = side.growing, 0
        if side.bringing:
            self._bring(side, wanted, there_is_room=answer.bytes >= wanted)
            return
        if answer.bytes < wanted:
            return
        side.allocated = max(side.allocated, wanted)
        if side.open and not side.closing:
            self.world.occupy(side, max(0, wanted - side.resident))
        self._report(side)

    def _bring(self, side: Side, wanted: int, *, there_is_room: bool) -> None:
        """What is missing at a grant comes in; without room the lease goes back, so that room can be made."""
        side.bringing = False
        if not side.open or side.closing:
            return
        if there_is_room:
            left = min(wanted - side.resident, self._missing(side))  # some may be freed by now
            self.world.occupy(side, max(0, left))
            self._report(side)
            self.work(side)
            return
        side.wanted, lease = True, side.lease_id
        patience_ns = self.world.chance.randint(2, 200) * MILLISECOND_NS
        self.world.after(patience_ns, lambda: self._give_back(side, lease))

    def _give_back(self, side: Side, lease: int) -> None:
        if side.open and not side.closing and side.lease_id == lease:
            self._finish(side, idle=False, drained=True)

    def _more_credit(self, side: Side, message: messages.MoveCredit) -> None:
        move = side.move
        if move is None or move.order_id != message.order_id:
            return  # it is over, and the two messages crossed
        assert message.credit_bytes > move.credit, f"credit only grows: {message}, had {move.credit}"
        move.credit = message.credit_bytes
        if move.waiting:
            move.waiting = False
            self._go_on(side, move)

    def _go_on(self, side: Side, move: Move) -> None:
        chance, plan = self.world.chance, self.world.plan
        delay_ns = chance.randint(1, 8) * MILLISECOND_NS
        if plan.stop_chance and not self.world.calm and chance.random() < plan.stop_chance:
            delay_ns = chance.randint(1, 30) * SECOND_NS
        self.world.after(delay_ns, lambda: self._step(side, move))

    def _step(self, side: Side, move: Move) -> None:
        """The next part of an order."""
        chance, plan = self.world.chance, self.world.plan
        if not self.alive or self.connection is None or side.move is not move:
            return
        there = side.resident - side.pinned if move.evict else side.allocated - side.resident
        size = min(max(1, move.size // 4), move.credit - move.moved, there)
        if move.evict:
            side.resident -= size
        else:
            size = self.world.occupy(side, size)
        move.moved += size
        failing = chance.random() < plan.short_move_chance
        if failing or move.moved >= move.size or (size == 0 and move.moved < move.credit):
            self._finish_move(side, move, 2 if failing else 0)
        elif move.moved < move.credit:
            self._tell_progress(side, move)
            self._go_on(side, move)
        else:
            move.waiting = True
            self._tell_progress(side, move)

    def _tell_progress(self, side: Side, move: Move, *, finished: bool = False, error: int = 0) -> None:
        if self.connection is not None:
            moved = move.moved
            self.tell(messages.MoveProgress(side.ordinal, move.order_id, moved, 1000, finished, error))

    def _finish_move(self, side: Side, move: Move, error: int) -> None:
        side.move = None
        early = self.world.chance.random() < 0.5
        if early:
            self._report(side)
        self._tell_progress(side, move, finished=True, error=error)
        if not early:
            self._report(side)
