"""Memory of a model: allocations, pins, and memory orders.

In mode `swap` a model asks before it grows, first for host memory (host.py), then for room.  It restores no more than
its credit.  All randomness and time come from the world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.simulation.programs.host import HostShare
from nvshare.coordinator.simulation.programs.side import Move, Side

if TYPE_CHECKING:
    from nvshare.coordinator.simulation.programs.client import Process


class Memory:
    """Memory of one process, on all its GPUs."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self.host = HostShare(lambda number, total: process.tell(messages.ReserveHost(number, total)))

    # --- connection and lease ---------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Asks for the host memory in use."""
        if self._process.mode is MemoryMode.SWAP and self._world.plan.memory_bytes:
            self.host.ask(self._evictable())

    def lost(self, side: Side) -> None:
        """The connection is lost: open requests and orders get no answer."""
        memory = side.memory
        memory.move = None
        memory.growing = memory.pinning = 0
        if memory.restoring:
            memory.restoring = False
            self._world.after(0, lambda: self._process.work(side) if side.open and not side.closing else None)

    def granted(self, side: Side) -> bool:
        """The process holds a lease.  Whether all its memory is resident, so that it can work."""
        memory = side.memory
        if memory.move is not None:  # the rest of the order stays undone
            self._finish_move(side, memory.move, 0)
        memory.growing = 0
        memory.restoring = self._process.mode is MemoryMode.SWAP and _missing(side) > 0
        if memory.restoring:
            self._ask_for_room(side, memory.resident + _missing(side))
        return not memory.restoring

    def report(self, side: Side) -> None:
        """Sends `MemoryReport`."""
        if self._process.connection is None or not self._world.plan.memory_bytes:
            return
        allocated, resident = side.memory.allocated, side.memory.resident
        self._process.tell(
            messages.MemoryReport(side.ordinal, allocated, resident, self.pinned(side), allocated - resident)
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
        """The possible part of an allocation: an old hook does not know `room_bytes`, only the GPU's size."""
        wanted = min(wanted, self._world.plan.capacity_bytes)
        room = side.settings.room_bytes if side.settings and not self._process.old else 0
        return min(wanted, room) if room else wanted

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
        self._process.tell(messages.ReserveMemory(side.ordinal, side.memory.requests, total))

    def reserved(self, side: Side, answer: messages.MemoryReserved) -> None:
        """Handles the answer to a request for room.  Growth after the lease's end has only addresses."""
        memory = side.memory
        if answer.sequence != memory.requests or not memory.growing:
            return
        wanted, memory.growing = memory.growing, 0
        if memory.restoring:
            self._restore(side, wanted, has_room=answer.bytes >= wanted)
            return
        if answer.bytes < wanted:
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
            self._process.tell(messages.ReservePins(side.ordinal, 0, total))

    def pins_reserved(self, side: Side, allowed: int) -> None:
        """Handles the answer to a request for pins.  The gate stays open until then, so the memory is resident."""
        total, side.memory.pinning = side.memory.pinning, 0
        self._world.checks.pins_refused += allowed < total
        if total <= allowed:
            self._pin(side, total)

    def _pin(self, side: Side, total: int) -> None:
        if side.open:
            side.memory.pinned = max(side.memory.pinned, min(total, side.memory.resident))
            self.report(side)

    # --- memory orders ----------------------------------------------------------------------------------------------

    def ordered(self, side: Side, order: messages.Evict | messages.Restore) -> None:
        """Begins an order.  An eviction ends a restoration that waits for credit."""
        assert not side.open, f"an order under a lease: {order}"
        evict, earlier = isinstance(order, messages.Evict), side.memory.move
        if earlier is not None:
            replaces = evict and not earlier.evict
            assert replaces, f"a second order: {order}"
            self._finish_move(side, earlier, 0)
        credit = order.credit_bytes if isinstance(order, messages.Restore) else order.bytes
        side.memory.move = Move(evict, order.order_id, order.bytes, credit)
        self._schedule_step(side, side.memory.move)

    def credited(self, side: Side, message: messages.MoveCredit) -> None:
        """Raises the credit of a `Restore`."""
        move = side.memory.move
        if move is None or move.order_id != message.order_id:
            return  # the order has ended: the two messages crossed
        assert message.credit_bytes > move.credit, f"credit only grows: {message}, had {move.credit}"
        move.credit = message.credit_bytes
        if move.waiting:
            move.waiting = False
            self._schedule_step(side, move)

    def _schedule_step(self, side: Side, move: Move) -> None:
        chance, plan = self._world.chance, self._world.plan
        delay_ns = chance.randint(1, 8) * MILLISECOND_NS
        if plan.stop_chance and not self._world.calm and chance.random() < plan.stop_chance:
            delay_ns = chance.randint(1, 30) * SECOND_NS
        self._world.after(delay_ns, lambda: self._step(side, move))

    def _step(self, side: Side, move: Move) -> None:
        """The next piece of an order."""
        memory, chance, plan = side.memory, self._world.chance, self._world.plan
        if not self._process.alive or self._process.connection is None or memory.move is not move:
            return
        left = memory.resident - memory.pinned if move.evict else memory.allocated - memory.resident
        size = min(max(1, move.size // 4), move.credit - move.moved, left)
        if move.evict:
            memory.resident -= size
        else:
            size = self._world.bring_in(side, size)
        move.moved += size
        failing = chance.random() < plan.short_move_chance
        if failing or move.moved >= move.size or (size == 0 and move.moved < move.credit):
            self._finish_move(side, move, 2 if failing else 0)
        elif move.moved < move.credit:
            self._tell_progress(side, move)
            self._schedule_step(side, move)
        else:
            move.waiting = True
            self._tell_progress(side, move)

    def _tell_progress(self, side: Side, move: Move, *, finished: bool = False, error: int = 0) -> None:
        self._process.tell(messages.MoveProgress(side.ordinal, move.order_id, move.moved, 1000, finished, error))

    def _finish_move(self, side: Side, move: Move, error: int) -> None:
        side.memory.move = None
        early = self._world.chance.random() < 0.5
        if early:
            self.report(side)
        self._tell_progress(side, move, finished=True, error=error)
        if not early:
            self.report(side)


def _missing(side: Side) -> int:
    """Evicted bytes that work under a lease needs."""
    return max(0, side.memory.allocated - side.memory.resident)
