"""Models of hooked processes: they connect, ask for leases, work, drain, hang and die, and their memory moves.

A model keeps the hook's rules: its gate is open only between `Grant` and `Release`, and it claims its lease after a
reconnect.  In mode `swap` it asks before it grows, first for its share of the host budget, then for room; its mover
obeys the newest target.  It may answer late.  All randomness and time come from the world.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import HOST, MemoryMode

if TYPE_CHECKING:
    from nvshare.bench.virtual_node.world import World


@dataclass(slots=True, eq=False)
class Lease:
    """The present or last lease.  `newest` and `released` belong to one connection, since a coordinator with a lost
    journal restarts the numbering."""

    number: int = 0
    newest: int = 0
    released: int = 0
    used: bool = False
    """The process has worked under this lease."""
    waiters: int = 0


@dataclass(slots=True, eq=False)
class Mover:
    """Moves the memory of one process on one GPU; a new one begins with each connection."""

    number: int = 0
    """Of the newest target."""
    goal: int = 0
    at_rest: bool = True
    error: int = 0
    coming: int = 0
    """Bytes on their way in, which count as resident."""
    going: int = 0
    steps: int = 0
    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(slots=True, eq=False)
class SideMemory:
    """Memory of one process on one GPU."""

    allocated: int = 0
    resident: int = 0
    pinned: int = 0
    pinning: int = 0
    """Size of an open request for pins."""
    pin_requests: int = 0
    """Number of the last request for pins."""
    mover: Mover = field(default_factory=Mover)
    growing: int = 0
    """Size of an open request for room."""
    requests: int = 0
    """Number of the last request for room."""
    reserved: int = 0
    """The last answer."""
    restoring: bool = False
    """The open request is for memory that is missing at a grant; work waits for it."""

    def clear(self) -> None:
        """The process has ended."""
        self.mover = Mover()
        self.resident = self.allocated = self.pinned = 0


@dataclass(slots=True, eq=False)
class Counts:
    """The last report of work, and when it was sent."""

    wanted: bool = False
    at_ns: int = 0
    work: int = 0
    watched_ns: int = 0


@dataclass(slots=True, eq=False)
class Side:
    """One process on one GPU.  `open` and `closing` are the gate's states."""

    uuid: str
    ordinal: int
    lease: Lease = field(default_factory=Lease)
    memory: SideMemory = field(default_factory=SideMemory)
    open: bool = False
    closing: bool = False
    wanted: bool = False
    asked: bool = False
    excused: bool = False
    """Other clients may be granted beside this one."""
    busy_until_ns: int = 0
    settings: messages.GpuSettings | None = None
    counts: Counts = field(default_factory=Counts)
    over_its_limit: bool | None = None
    """It had more than its limit when it connected, so a coordinator that has begun since believes only the limit.
    None: it has no settings yet."""


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

    def answered(self, answer: messages.Target) -> None:
        """Handles an answer; ignores it when a newer request is open."""
        if answer.answers != self.asked:
            return
        self.bytes = answer.total_bytes
        continuation, self.continuation = self.continuation, None
        if continuation is not None and self.needed_bytes <= self.bytes:
            continuation()

    def lost(self) -> None:
        """Handles the loss of the connection."""
        self.bytes, self.continuation = 0, None


class Memory:
    """Memory of one process, on all its GPUs."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self.host = HostShare(
            lambda number, total: process.tell(messages.State(HOST, 0, 0, 0, 0, 0, asks=number, total_bytes=total))
        )

    # --- connection and lease ---------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Asks for the host memory in use."""
        if self._process.mode is MemoryMode.SWAP and self._world.plan.memory_bytes:
            self.host.ask(self._evictable())

    def lost(self, side: Side) -> None:
        """The connection is lost: open requests get no answer, and what is on the GPU stays."""
        memory = side.memory
        side.over_its_limit = None
        memory.mover = Mover()
        memory.growing = memory.pinning = 0
        if memory.restoring:
            memory.restoring = False
            self._world.after(0, lambda: self._process.work(side) if side.open and not side.closing else None)

    def granted(self, side: Side) -> bool:
        """The process holds a lease.  Whether all its memory is resident, so that it can work."""
        memory = side.memory
        if not memory.mover.at_rest:  # the rest of the target is void
            self._rest(side, 0)
        memory.growing = 0
        memory.restoring = self._process.mode is MemoryMode.SWAP and _missing(side) > 0
        if memory.restoring:
            self._ask_for_room(side, memory.resident + _missing(side))
        return not memory.restoring

    def report(self, side: Side) -> None:
        """Sends `State`."""
        if self._process.connection is None or not self._world.plan.memory_bytes:
            return
        memory, mover = side.memory, side.memory.mover
        allocated, resident = memory.allocated, memory.resident
        self._process.tell(
            messages.State(
                side.ordinal,
                mover.number,
                allocated,
                min(allocated, resident + mover.coming),
                self.pinned(side),
                allocated - resident,
                prepared_bytes=resident,
                moved_out_bytes=mover.out_bytes,
                moved_in_bytes=mover.in_bytes,
                moving_ns=1000 * mover.steps,
                at_rest=mover.at_rest,
                error=mover.error,
                asks=memory.requests,
                total_bytes=memory.growing or memory.reserved,
                asks_pins=memory.pin_requests,
                pins_bytes=memory.pinning,
            )
        )

    def pinned(self, side: Side) -> int:
        """Immovable bytes; in mode `device` all."""
        return side.memory.resident if self._process.mode is MemoryMode.DEVICE else side.memory.pinned

    # --- growth -----------------------------------------------------------------------------------------------------

    def allocate(self, side: Side) -> None:
        """Grows or shrinks.  In mode `managed` the surplus stays off the GPU, as with a driver's pager; in mode `swap`
        the process asks for room."""
        memory, plan, world = side.memory, self._world.plan, self._world
        swap = self._process.mode is MemoryMode.SWAP
        if not plan.memory_bytes or self._process.mode is MemoryMode.DEVICE:
            return
        wanted = max(memory.pinned, self._within_room(side, world.chance.randint(0, plan.memory_bytes)))
        if swap and wanted > memory.allocated:
            if self._process.connection is not None and not memory.growing:
                total = self._evictable() + wanted - memory.allocated
                self.host.need(total, lambda: self._grow(side, wanted))
            return
        memory.allocated = wanted
        if swap and world.chance.random() < 0.5:
            self.host.ask(self._evictable())
        room = plan.capacity_bytes - world.resident(side.uuid) + memory.resident
        most = room if self._process.mode is MemoryMode.MANAGED else memory.resident
        memory.resident = max(0, min(memory.allocated, max(memory.resident, most)))
        self.report(side)

    def allocate_ahead(self, side: Side) -> None:
        """Sometimes allocates without a lease: such memory has only addresses and needs no request."""
        plan, chance = self._world.plan, self._world.chance
        if not plan.pin_chance or self._process.mode is not MemoryMode.SWAP or chance.random() >= plan.pin_chance:
            return
        wanted = self._within_room(side, chance.randint(0, plan.memory_bytes))
        side.memory.allocated = max(side.memory.allocated, wanted)
        self.report(side)

    def _within_room(self, side: Side, wanted: int) -> int:
        """The possible part of an allocation: an old hook does not know `room_bytes`, only its limit and the GPU's
        size."""
        if side.settings is None:
            return side.memory.allocated
        room, limit = 0 if self._process.old else side.settings.room_bytes, side.settings.memory_limit_bytes
        within = min(most for most in (self._world.plan.capacity_bytes, room, limit) if most)
        return min(wanted, max(within, side.memory.allocated))

    def _evictable(self) -> int:
        return sum(max(side.memory.allocated, side.memory.growing) for side in self._process.sides.values())

    def _grow(self, side: Side, wanted: int) -> None:
        """The host memory is there: asks for room."""
        if side.open and not side.closing and not side.memory.growing and wanted > side.memory.allocated:
            self._ask_for_room(side, wanted)

    def _ask_for_room(self, side: Side, total: int) -> None:
        assert self._process.connection is not None
        side.memory.growing = total
        side.memory.requests += 1
        self.report(side)

    def _reserved(self, side: Side, reserved: int) -> None:
        """Handles the answer to a request for room.  Growth after the lease's end has only addresses."""
        memory = side.memory
        wanted, memory.growing, memory.reserved = memory.growing, 0, reserved
        if memory.restoring:
            self._restore(side, wanted, has_room=reserved >= wanted)
            return
        if reserved < wanted:
            return
        memory.allocated = max(memory.allocated, wanted)
        if side.open and not side.closing:
            self._world.bring_in(side, max(0, wanted - memory.resident))
        self.report(side)

    def _restore(self, side: Side, wanted: int, *, has_room: bool) -> None:
        """Brings in the memory missing at a grant; without room the lease is returned, so that room can be made."""
        side.memory.restoring = False
        if not side.open or side.closing:
            return
        if has_room:
            left = min(wanted - side.memory.resident, _missing(side))  # some may be freed by now
            self._world.bring_in(side, max(0, left))
            self.report(side)
            self._process.work(side)
            return
        side.wanted, number = True, side.lease.number
        patience_ns = self._world.chance.randint(2, 200) * MILLISECOND_NS
        self._world.after(patience_ns, lambda: self._return_lease(side, number))

    def _return_lease(self, side: Side, number: int) -> None:
        if side.open and not side.closing and side.lease.number == number:
            self._process.release(side, idle=False, drained=True)

    # --- pins -------------------------------------------------------------------------------------------------------

    def change_pins(self, side: Side) -> None:
        """Sometimes makes memory immovable or movable; asks first, unless the hook is old."""
        memory, plan, chance = side.memory, self._world.plan, self._world.chance
        if not plan.pin_chance or self._process.mode is not MemoryMode.SWAP or chance.random() >= plan.pin_chance:
            return
        total = chance.randint(0, memory.resident) if chance.random() < 0.5 else 0
        if total <= memory.pinned:
            memory.pinned = total
            self.report(side)
        elif self._process.old or side.settings is None or not side.settings.ask_pins:
            self._pin(side, total)
        elif self._process.connection is not None and not memory.pinning:
            memory.pinning = total
            memory.pin_requests += 1
            self.report(side)

    def _pins_reserved(self, side: Side, allowed: int) -> None:
        """Handles the answer to a request for pins.  The gate stays open until then, so the memory is resident."""
        total, side.memory.pinning = side.memory.pinning, 0
        self._world.checks.pins_refused += allowed < total
        if total <= allowed:
            self._pin(side, total)

    def _pin(self, side: Side, total: int) -> None:
        if side.open:
            side.memory.pinned = max(side.memory.pinned, min(total, side.memory.resident))
            self.report(side)

    # --- targets ----------------------------------------------------------------------------------------------------

    def targeted(self, side: Side, target: messages.Target) -> None:
        """There is a newer target, or an answer.  A piece of memory on its way in comes in all the same."""
        memory, mover = side.memory, side.memory.mover
        if target.number != mover.number:
            assert not side.open, f"a target under a lease: {target}"
            assert target.number == mover.number + 1, f"{target} after {mover.number}"
            mover.number, mover.goal, mover.error = target.number, target.bytes, 0
            if mover.at_rest:
                mover.at_rest = False
                self._begin_step(side)
        if memory.growing and target.answers == memory.requests:
            self._reserved(side, target.total_bytes)
        if memory.pinning and target.answers_pins == memory.pin_requests:
            self._pins_reserved(side, target.pins_bytes)

    def _begin_step(self, side: Side) -> None:
        """The next piece of memory, or the mover is at rest.  What comes in counts from now on."""
        memory, mover = side.memory, side.memory.mover
        chance, plan = self._world.chance, self._world.plan
        coming, going = min(mover.goal, memory.allocated) - memory.resident, memory.resident - memory.pinned
        if coming == 0 or (coming < 0 and going <= 0):
            self._rest(side, 0)
            return
        piece = max(1, memory.allocated // 4)
        mover.coming, mover.going = max(0, min(piece, coming)), max(0, min(piece, -coming, going))
        mover.steps += 1
        number, delay_ns = mover.steps, chance.randint(1, 8) * MILLISECOND_NS
        if plan.stop_chance and not self._world.calm and chance.random() < plan.stop_chance:
            delay_ns = chance.randint(1, 30) * SECOND_NS
        self._world.after(delay_ns, lambda: self._end_step(side, mover, number))
        self.report(side)

    def _end_step(self, side: Side, mover: Mover, number: int) -> None:
        memory, chance, plan = side.memory, self._world.chance, self._world.plan
        if not self._process.alive or memory.mover is not mover or mover.steps != number or mover.at_rest:
            return
        coming, mover.coming, going, mover.going = mover.coming, 0, mover.going, 0
        came = self._world.bring_in(side, coming)
        going = max(0, min(going, memory.resident - memory.pinned))
        memory.resident -= going
        mover.in_bytes += came
        mover.out_bytes += going
        if chance.random() < plan.short_move_chance:
            self._rest(side, 2)
        elif came < coming:
            self._rest(side, 0)
        else:
            self._begin_step(side)

    def _rest(self, side: Side, error: int) -> None:
        mover = side.memory.mover
        mover.at_rest, mover.error, mover.coming = True, error, 0
        self.report(side)


def _missing(side: Side) -> int:
    """Evicted bytes that work under a lease needs."""
    return max(0, side.memory.allocated - side.memory.resident)


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
        self.spatial = False
        self.profile = ""
        """What it says of itself, besides priority, weight and gang."""
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
        said = f"priority={self.priority}\nweight={weight}\n" + (f"gang={gang}\n" if gang else "") + self.profile
        self.tell(messages.Hello(protocol, name, "model", self.mode, 0, spatial=self.spatial, profile=said))
        self.memory.connected()
        for side in self.sides.values():
            lease = side.lease.number if side.open or side.closing else 0
            side.asked = side.wanted and not lease
            side.lease.newest = side.lease.released = 0
            memory = side.memory
            state = (lease, side.asked, memory.allocated, memory.resident, self.memory.pinned(side))
            self.tell(messages.AttachGpu(side.ordinal, side.uuid, *state))

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
        elif isinstance(message, messages.Target) and message.gpu == HOST:
            self.memory.host.answered(message)
        if side is None:
            return
        if isinstance(message, messages.GpuSettings):
            side.settings, side.counts.wanted = message, message.report
            if side.over_its_limit is None:
                side.over_its_limit = 0 < message.memory_limit_bytes < side.memory.allocated
        elif isinstance(message, messages.Grant):
            self._granted(side, message)
        elif isinstance(message, messages.Waiters) and message.lease_id == side.lease.number:
            side.lease.waiters = message.waiters
            self._consider_idle(side)
        elif isinstance(message, messages.Revoke) and message.lease_id == side.lease.number and side.open:
            self._close(side, message.drain_deadline_ns)
        elif isinstance(message, messages.Target):
            self.memory.targeted(side, message)

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


def draw_profile(chance: random.Random) -> str:
    """A process's profile."""
    request = chance.choice((0, 0, 200, 600))
    limit, deadline_ns = chance.choice((300, 1000, 1000)), chance.choice((0, SECOND_NS, 20 * SECOND_NS))
    job_class = ("batch", "interactive", "best-effort")[chance.randint(0, 2)]
    said = f"share_request={request / 1000}\nshare_limit={limit / 1000}\nclass={job_class}\n"
    return said + (f"deadline={deadline_ns}ns\n" if deadline_ns else "")
