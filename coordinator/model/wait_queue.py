"""The line in front of a GPU.

Invariant: each seat in it is there once, at its place in turn order.

May not go here: who belongs in it (model/state.py), who is chosen (the policy).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from nvshare.scheduler_policies.api import ClientView

if TYPE_CHECKING:
    from nvshare.coordinator.model.state import Seat


class Line:
    """The seats that wait and may be granted, in turn order.

    Joining and leaving cost O(log n) comparisons; the policies' view of the line is made once per change.
    """

    __slots__ = ("_demoted", "_seats", "_shown", "_turns", "_views")

    def __init__(self) -> None:
        self._turns: list[int] = []
        self._shown: list[ClientView] = []  # in the order of turns
        self._seats: dict[int, Seat] = {}  # by turn
        self._views: tuple[ClientView, ...] | None = None
        self._demoted = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, seat: Seat) -> bool:
        return self._seats.get(seat.turn) is seat

    def join(self, seat: Seat) -> None:
        """At its place in turn order."""
        assert seat.turn not in self._seats
        place = bisect_left(self._turns, seat.turn)
        self._turns.insert(place, seat.turn)
        self._shown.insert(place, seat.look(0))
        self._seats[seat.turn] = seat
        self._demoted += seat.demoted
        self._views = None

    def leave(self, seat: Seat) -> None:
        """It has been chosen, paused or is gone."""
        place = bisect_left(self._turns, seat.turn)
        del self._seats[seat.turn], self._turns[place], self._shown[place]
        self._demoted -= seat.demoted
        self._views = None

    def changed(self, seat: Seat) -> None:
        """Something that a policy sees of it is different now.  It need not be in the line."""
        seat.view = None
        if seat in self:
            self._shown[bisect_left(self._turns, seat.turn)] = seat.look(0)
            self._views = None

    def seats(self) -> list[Seat]:
        """In turn order."""
        return [self._seats[turn] for turn in self._turns]

    def views(self) -> tuple[ClientView, ...]:
        """What a policy chooses from: the line without the demoted, unless there is nobody else."""
        if self._views is None:
            shown = self._shown
            if 0 < self._demoted < len(shown):
                shown = [seat.look(0) for seat in self.seats() if not seat.demoted]
            self._views = tuple(shown)
        return self._views
