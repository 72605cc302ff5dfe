"""A card's link to the host: memory moves to the engine's targets, in pieces.

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
class Mover:
    """How far a program is with its newest target."""

    number: int = 0
    goal: int = 0
    at_rest: bool = True
    out: bool = False
    piece: int = 0
    """Bytes under way."""
    pieces: int = 0
    out_bytes: int = 0
    in_bytes: int = 0


class Link:
    """Both directions of one card's link."""

    def __init__(self, node: VirtualNode, piece_bytes: int = PIECE_BYTES) -> None:
        self._node = node
        self._piece_bytes = piece_bytes
        self._free_ns = {True: 0, False: 0}
        self.moved_bytes = 0

    def rate(self, program: Program, mover: Mover, *, opposite: bool) -> float:
        """Bytes a nanosecond of the next piece."""
        return BOTH_WAYS / 2 if opposite else ONE_WAY

    def aim(self, program: Program, target: messages.Target) -> None:
        """A newer target; a piece that is under way gets there."""
        mover, rested = program.mover, program.mover.at_rest
        mover.number, mover.goal, mover.at_rest = target.number, target.bytes, False
        if rested:
            self._node.after(0, lambda: self._begin(program, mover))

    def end(self, program: Program) -> None:
        """The lease came first: what has moved has moved."""
        if not program.mover.at_rest:
            self._stop(program)
            program.mover.at_rest = True
            self._tell(program)

    def forget(self, program: Program) -> None:
        """The program or the coordinator has died."""
        self._stop(program)
        program.mover = Mover()

    def _stop(self, program: Program) -> None:
        if not program.mover.out:
            program.resident_bytes -= program.mover.piece
        program.mover.piece = 0

    def _begin(self, program: Program, mover: Mover) -> None:
        if program.mover is mover and not mover.at_rest and not mover.piece:
            self._next_piece(program)
            if mover.at_rest:
                self._tell(program)

    def _next_piece(self, program: Program) -> None:
        mover, now_ns = program.mover, self._node.now_ns
        left = min(mover.goal, program.task.job.memory_bytes) - program.resident_bytes
        mover.at_rest, mover.out = left == 0, left < 0
        if left:
            piece = mover.piece = min(self._piece_bytes, abs(left))
            mover.pieces += 1
            rate, number = self.rate(program, mover, opposite=self._free_ns[not mover.out] > now_ns), mover.pieces
            self._free_ns[mover.out] = max(now_ns, self._free_ns[mover.out]) + int(piece / rate)
            if not mover.out:
                program.resident_bytes += piece
                program.card.check_room()
            self._node.after(self._free_ns[mover.out] - now_ns, lambda: self._moved(program, mover, number))

    def _moved(self, program: Program, mover: Mover, number: int) -> None:
        if program.mover is not mover or mover.pieces != number or not mover.piece:
            return
        piece, mover.piece = mover.piece, 0
        self.moved_bytes += piece
        if mover.out:
            program.resident_bytes -= piece
            mover.out_bytes += piece
        else:
            mover.in_bytes += piece
        self._next_piece(program)
        self._tell(program)

    def _tell(self, program: Program) -> None:
        mover, resident = program.mover, program.resident_bytes
        program.state(
            target=mover.number,
            resident_bytes=resident,
            host_bytes=program.task.job.memory_bytes - resident,
            moved_out_bytes=mover.out_bytes,
            moved_in_bytes=mover.in_bytes,
            at_rest=mover.at_rest,
        )
