"""A card's link to the host: memory moves as the engine orders, in pieces.

The pieces of one direction follow one another.  The directions slow each other down where both are at work.  Memory is
mapped before it is copied in, so a restored piece is resident from its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.coordinator.protocol import messages

if TYPE_CHECKING:
    from nvshare.bench.virtual_node.node import Program, VirtualNode

ONE_WAY: Final = 50 * (1 << 30) / SECOND_NS
"""Bytes a nanosecond, measured on PCIe 5.0 x16."""
BOTH_WAYS: Final = 85 * (1 << 30) / SECOND_NS
PIECE_BYTES: Final = 8 << 30


@dataclass(slots=True, eq=False)
class Move:
    """A memory order that a program carries out."""

    evict: bool
    order_id: int
    size: int
    credit: int
    moved: int = 0
    waiting: bool = False
    """For credit."""
    begun_ns: int = 0
    piece: int = 0
    """Bytes under way."""


class Link:
    """Both directions of one card's link."""

    def __init__(self, node: VirtualNode, piece_bytes: int = PIECE_BYTES) -> None:
        self._node = node
        self._piece_bytes = piece_bytes
        self._free_ns = {True: 0, False: 0}
        self.moved_bytes = 0

    def rate(self, program: Program, move: Move, *, opposite: bool) -> float:
        """Bytes a nanosecond of the next piece."""
        return BOTH_WAYS / 2 if opposite else ONE_WAY

    def order(self, program: Program, message: messages.Message) -> None:
        """An order of the engine, which ends the one before, or more credit for one."""
        if isinstance(message, messages.MoveCredit):
            if program.move is not None:
                program.move.credit = min(program.move.size, message.credit_bytes)
        elif isinstance(message, messages.Evict | messages.Restore):
            replaced = program.move
            if replaced is not None:
                self._stop(program, replaced)
                self._node.after(0, lambda: self._tell(program, replaced, finished=True))
            evict = isinstance(message, messages.Evict)
            size = min(message.bytes, program.resident_bytes if evict else program.missing_bytes)
            credit = size if isinstance(message, messages.Evict) else min(size, message.credit_bytes)
            program.move = Move(evict, message.order_id, size, credit, begun_ns=self._node.now_ns)
        if program.move is not None and not program.move.piece:
            self._next_piece(program, program.move)

    def end(self, program: Program) -> None:
        """Ends an order with what has moved: the lease came first."""
        if program.move is not None:
            self._stop(program, program.move)
            self._tell(program, program.move, finished=True)

    def forget(self, program: Program) -> None:
        """Drops an order without a report: the program or the coordinator has died."""
        if program.move is not None:
            self._stop(program, program.move)
            program.move = None

    def _stop(self, program: Program, move: Move) -> None:
        if not move.evict:
            program.resident_bytes -= move.piece
        move.piece = 0

    def _next_piece(self, program: Program, move: Move) -> None:
        piece = min(self._piece_bytes, move.credit - move.moved)
        if piece <= 0 < move.size:
            return  # it waits for credit
        move.piece, now_ns = piece, self._node.now_ns
        rate = self.rate(program, move, opposite=self._free_ns[not move.evict] > now_ns)
        self._free_ns[move.evict] = max(now_ns, self._free_ns[move.evict]) + int(piece / rate)
        if not move.evict:
            program.resident_bytes += piece
            program.card.check_room()
        self._node.after(self._free_ns[move.evict] - now_ns, lambda: self._moved(program, move, piece))

    def _moved(self, program: Program, move: Move, piece: int) -> None:
        if program.move is not move:
            return
        move.piece = 0
        move.moved += piece
        self.moved_bytes += piece
        if move.evict:
            program.resident_bytes -= piece
        self._tell(program, move, finished=move.moved >= move.size)
        if program.move is move and not move.piece:
            self._next_piece(program, move)

    def _tell(self, program: Program, move: Move, *, finished: bool) -> None:
        if finished and program.move is move:
            program.move = None
        program.moved(move.order_id, move.moved, finished=finished, elapsed_ns=self._node.now_ns - move.begun_ns)
