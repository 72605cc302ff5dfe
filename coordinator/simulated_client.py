"""Models of hooked processes for simulation.py: they ask, work, drain, hang, move memory, and connect again.

A model keeps the hook's rules: its gate is open only between `Grant` and `Release`, it claims what it holds when it
has connected again, and it obeys orders; sometimes late, sometimes in part.

Invariants: all chance and time come from the world.  May not go here: the coordinator's side, checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator import events, wire
from coordinator.state import MILLISECOND_NS, SECOND_NS

if TYPE_CHECKING:
    from coordinator.simulation import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How wild the world is.  Chances are per turn of the thing that they are about."""

    gpus: int = 2
    processes: int = 6
    duration_ns: int = 20 * SECOND_NS
    capacity_bytes: int = 1000
    memory_bytes: int = 0
    """Most that a process allocates on a GPU; 0: memory plays no part."""
    device_share: float = 0.0
    hang_chance: float = 0.0
    death_chance: float = 0.0
    drop_chance: float = 0.0
    crash_every_ns: int = 0
    admin_every_ns: int = 0
    short_move_chance: float = 0.0


@dataclass(slots=True, eq=False)
class Side:
    """One process on one GPU."""

    uuid: str
    ordinal: int
    lease_id: int = 0
    open: bool = False
    closing: bool = False
    wanted: bool = False
    asked: bool = False
    busy_until_ns: int = 0
    waiters: int = 0
    excused: bool = False
    served: int = 0
    attached: bool = False
    allocated: int = 0
    resident: int = 0
    reserved: int = 0
    settings: wire.GpuSettings | None = None
    orders: list[tuple[bool, int, int]] = field(default_factory=list)


class Process:
    """A model of a hooked process.  It survives the coordinator; its connection does not."""

    def __init__(self, world: World, pid: int, uuids: list[str], mode: wire.MemoryMode, priority: int) -> None:
        self.world = world
        self.pid = pid
        self.mode = mode
        self.priority = priority
        self.sides = {ordinal: Side(uuid, ordinal) for ordinal, uuid in enumerate(uuids)}
        self.connection: int | None = None
        self.alive = True

    def connect(self) -> None:
        """Hello, then claim what is held and ask for what is wanted."""
        world = self.world
        if not self.alive or self.connection is not None:
            return
        if world.scheduler is None:
            world.after(world.chance.randint(1, 50) * MILLISECOND_NS, self.connect)
            return
        self.connection = world.new_connection(self)
        number = self.connection
        self.tell(events.ClientRegistered(number, f"p{self.pid}", "model", self.pid, 0, self.priority, self.mode, 0))
        for side in self.sides.values():
            lease = side.lease_id if side.open or side.closing else 0
            side.asked = side.wanted and not lease
            side.attached = True
            pinned = side.resident if self.mode is wire.MemoryMode.DEVICE else 0
            self.tell(
                events.GpuAttached(
                    number, side.ordinal, side.uuid, lease, side.asked, side.allocated, side.resident, pinned
                )
            )

    def lost(self) -> None:
        """The connection is gone; the holder goes on, and everybody connects again."""
        self.connection = None
        for side in self.sides.values():
            side.asked = False
            side.orders.clear()
        self.world.after(self.world.chance.randint(1, 800) * MILLISECOND_NS, self.connect)

    def tell(self, event: events.Event) -> None:
        """Send to the coordinator, if there is a connection."""
        if self.connection is not None:
            self.world.send_up(self.connection, event)

    def hear(self, message: wire.Message) -> None:
        """A message has come."""
        if not self.alive:
            return
        side = self.sides.get(getattr(message, "gpu", -1))
        assert not isinstance(message, wire.Rejected), f"an honest process was rejected: {message}"
        if side is None:
            return
        if isinstance(message, wire.GpuSettings):
            side.settings = message
        elif isinstance(message, wire.Grant):
            self._granted(side, message)
        elif isinstance(message, wire.Waiters) and message.lease_id == side.lease_id:
            side.waiters = message.waiters
            self._consider_idle(side)
        elif isinstance(message, wire.Revoke) and message.lease_id == side.lease_id and side.open:
            self._close(side, message.drain_deadline_ns)
        elif isinstance(message, wire.Evict | wire.Restore):
            order = (isinstance(message, wire.Evict), message.order_id, message.bytes)
            side.orders.append(order)
            self.world.after(self.world.chance.randint(1, 30) * MILLISECOND_NS, lambda: self._move(side, order))

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
            side.wanted = False
            side.served += 1
            side.busy_until_ns = self.world.now_ns + chance.choice((1, 5, 50, 400)) * MILLISECOND_NS
            self._allocate(side)
            self.world.after(side.busy_until_ns - self.world.now_ns, lambda: self._done(side))
            return
        side.wanted = True
        if not side.asked and not side.closing and self.connection is not None:
            side.asked = True
            self.tell(events.Requested(self.connection, side.ordinal))

    def _done(self, side: Side) -> None:
        if self.world.now_ns < side.busy_until_ns or not self.alive:
            return
        self._consider_idle(side)
        think = self.world.chance.choice((0, 1, 20, 300)) * MILLISECOND_NS
        self.world.after(think, lambda: self.live(side))

    def _granted(self, side: Side, grant: wire.Grant) -> None:
        if side.open:
            assert grant.lease_id == side.lease_id, f"a second lease: {grant}, has {side.lease_id}"
            side.waiters = grant.waiters
            return
        if grant.lease_id == side.lease_id:
            return  # its claim was confirmed, but it has released meanwhile: the two messages crossed
        assert grant.lease_id > side.lease_id, f"lease ids only grow: {grant}, had {side.lease_id}"
        side.lease_id = grant.lease_id
        side.open = True
        side.asked = False
        side.excused = False
        side.waiters = grant.waiters
        self.work(side)

    def _consider_idle(self, side: Side) -> None:
        if side.open and not side.closing and side.waiters and self.world.now_ns >= side.busy_until_ns:
            wait = side.settings.idle_release_ns if side.settings else 0
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
        side.wanted = side.wanted or interrupted
        if self.connection is None:
            return
        side.asked = side.wanted
        self._report(side)
        self.tell(events.Released(self.connection, side.ordinal, lease, idle, drained, side.wanted, 1000, 0, 1))
        if interrupted:
            return
        if idle or not side.wanted:
            self.world.after(self.world.chance.randint(1, 200) * MILLISECOND_NS, lambda: self.live(side))

    # --- memory -------------------------------------------------------------------------------------------------

    def _report(self, side: Side) -> None:
        if self.connection is None or not self.world.plan.memory_bytes:
            return
        pinned = side.resident if self.mode is wire.MemoryMode.DEVICE else 0
        host = side.allocated - side.resident
        self.tell(events.MemoryReported(self.connection, side.ordinal, side.allocated, side.resident, pinned, host))

    def _allocate(self, side: Side) -> None:
        """Grow or shrink; what does not fit on the card stays off it, as a driver's pager would have it."""
        plan = self.world.plan
        if not plan.memory_bytes or self.mode is wire.MemoryMode.DEVICE:
            return
        side.allocated = self.world.chance.randint(0, plan.memory_bytes)
        room = plan.capacity_bytes - self.world.resident(side.uuid) + side.resident
        side.resident = max(0, min(side.allocated, max(side.resident, room)))
        self._report(side)

    def _move(self, side: Side, order: tuple[bool, int, int]) -> None:
        if not self.alive or self.connection is None or order not in side.orders:
            return
        side.orders.remove(order)
        evict, order_id, size = order
        moved = min(size, side.resident if evict else side.allocated - side.resident)
        error = 0
        if self.world.chance.random() < self.world.plan.short_move_chance:
            moved, error = moved // 2, 2
        if not evict:  # a driver makes no room that there is not
            moved = min(moved, self.world.plan.capacity_bytes - self.world.resident(side.uuid))
        side.resident += -moved if evict else moved
        early = self.world.chance.random() < 0.5
        if early:
            self._report(side)
        self.tell(events.MoveProgressed(self.connection, side.ordinal, order_id, moved, 1000, True, error))
        if not early:
            self._report(side)
