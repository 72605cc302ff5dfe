"""A card's link to the host: memory moves as the core orders, each way at the speed of the link, in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model import events
from nvshare.coordinator.protocol import messages

if TYPE_CHECKING:
    from nvshare.bench.simulate.records import Program
    from nvshare.bench.simulate.world import World

BYTES_PER_NS: Final = 50.0
"""About PCIe 5.0 x16."""
PIECE_BYTES: Final = 8 << 30


@dataclass(slots=True, eq=False)
class Move:
    """An order that a program carries out."""

    order_id: int
    evict: bool
    bytes: int
    credit_bytes: int
    begun_ns: int
    moved_bytes: int = 0
    under_way: bool = False


class Link:
    """Both directions of one card's link."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free_ns = {True: 0, False: 0}
        self.moved_bytes = 0

    def order(self, program: Program, message: messages.Message) -> None:
        """An order of the core, which ends the one before, or more credit for one."""
        now_ns, replaced = self._world.now_ns, program.move
        if replaced is not None and isinstance(message, messages.Evict | messages.Restore):
            self._world.after(0, lambda: self._tell(program, replaced, finished=True))
        if isinstance(message, messages.Evict):
            size = min(message.bytes, program.resident_bytes)
            program.move = Move(message.order_id, True, size, size, now_ns)
        elif isinstance(message, messages.Restore):
            size = min(message.bytes, program.task.job.memory_bytes - program.resident_bytes)
            program.move = Move(message.order_id, False, size, min(size, message.credit_bytes), now_ns)
        elif isinstance(message, messages.MoveCredit) and program.move is not None:
            program.move.credit_bytes = min(program.move.bytes, message.credit_bytes)
        if program.move is not None and not program.move.under_way:
            self._next_piece(program, program.move)

    def end(self, program: Program) -> None:
        """Ends an order with what has moved: the lease came first."""
        if program.move is not None:
            self._tell(program, program.move, finished=True)

    def _next_piece(self, program: Program, move: Move) -> None:
        piece = min(PIECE_BYTES, move.credit_bytes - move.moved_bytes)
        if piece <= 0 < move.bytes:
            return  # it waits for credit
        now_ns = self._world.now_ns
        self._free_ns[move.evict] = max(now_ns, self._free_ns[move.evict]) + int(piece / BYTES_PER_NS)
        move.under_way = True
        self._world.after(self._free_ns[move.evict] - now_ns, lambda: self._moved(program, move, piece))

    def _moved(self, program: Program, move: Move, piece: int) -> None:
        if program.move is not move:
            return
        move.under_way = False
        move.moved_bytes += piece
        self.moved_bytes += piece
        program.resident_bytes += -piece if move.evict else piece
        program.card.check_room()
        self._tell(program, move, finished=move.moved_bytes >= move.bytes)
        if program.move is move and not move.under_way:
            self._next_piece(program, move)

    def _tell(self, program: Program, move: Move, *, finished: bool) -> None:
        if finished and program.move is move:
            program.move = None
        elapsed_ns = self._world.now_ns - move.begun_ns
        self._world.give(
            events.Received(
                program.client, messages.MoveProgress(0, move.order_id, move.moved_bytes, elapsed_ns, finished, 0)
            )
        )
