"""The seats that wait for a GPU and may be granted, in turn order.

Each of them is there once.  Non-goals: which seats belong here (model/seat.py), which is chosen (the policy).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nvshare.scheduler_policies.api import JobView

if TYPE_CHECKING:
    from nvshare.coordinator.model.seat import Seat


class WaitQueue:
    """Joining and leaving cost O(log n) comparisons.  The policies' view is made once per change."""

    __slots__ = ("_demoted", "_seats", "_shown", "_turns", "_views")

    def __init__(self) -> None:
        self._turns: list[int] = []
        self._shown: list[JobView] = []  # in the order of turns
        self._seats: dict[int, Seat] = {}  # by turn
        self._views: tuple[JobView, ...] | None = None
        self._demoted = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, seat: Seat) -> bool:
        return self._seats.get(seat.place.turn) is seat

    def join(self, seat: Seat) -> None:
        """Inserts the seat at its place in turn order."""
        turn = seat.place.turn
        assert turn not in self._seats
        index = bisect_left(self._turns, turn)
        self._turns.insert(index, turn)
        self._shown.insert(index, seat.view())
        self._seats[turn] = seat
        self._demoted += seat.place.demoted
        self._views = None

    def leave(self, seat: Seat) -> None:
        """Removes the seat: it was chosen, paused or is gone."""
        turn = seat.place.turn
        index = bisect_left(self._turns, turn)
        del self._seats[turn], self._turns[index], self._shown[index]
        self._demoted -= seat.place.demoted
        self._views = None

    def changed(self, seat: Seat) -> None:
        """Something that a policy sees of the seat has changed.  The seat need not be in the queue."""
        seat.place.view = None
        if seat in self:
            self._shown[bisect_left(self._turns, seat.place.turn)] = seat.view()
            self._views = None

    def views_without(self, seats: Iterable[Seat]) -> tuple[JobView, ...]:
        """`views` without some of the seats in the queue, in less than linear comparisons."""
        if self.hides:
            clients = {seat.client.client_id for seat in seats}
            return tuple(view for view in self.views() if view.client not in clients)
        shown = list(self._shown)
        for index in sorted((bisect_left(self._turns, seat.place.turn) for seat in seats), reverse=True):
            del shown[index]
        return tuple(shown)

    @property
    def hides(self) -> bool:
        """Demoted clients wait, which a policy does not see as long as others do."""
        return self._demoted > 0

    def hides_seat(self, seat: Seat) -> bool:
        """A policy does not see this seat, because others wait that are not demoted."""
        return seat.place.demoted and self._demoted < len(self._shown)

    def seats(self) -> list[Seat]:
        """Waiting seats in turn order."""
        return [self._seats[turn] for turn in self._turns]

    def views(self) -> tuple[JobView, ...]:
        """The candidates of a policy: the queue without demoted seats, unless there are no others."""
        if self._views is None:
            shown = self._shown
            if 0 < self._demoted < len(shown):
                shown = [seat.view() for seat in self.seats() if not seat.place.demoted]
            self._views = tuple(shown)
        return self._views
