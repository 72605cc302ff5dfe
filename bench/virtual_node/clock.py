"""Virtual time: a queue of actions, which run in the order of their times.  Invariant: no other clock is read."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from nvshare.coordinator.model.settings import SECOND_NS


class Clock:
    """The time and the queue."""

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Schedules an action.  Actions of the same time run in the order of their scheduling."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_ns + delay_ns, self._sequence, action))

    def step(self, end_ns: int) -> bool:
        """Runs the next action, if there is one until this time."""
        if not self._queue or self._queue[0][0] > end_ns:
            return False
        at_ns, _, action = heapq.heappop(self._queue)
        self.pass_time(at_ns - self.now_ns)
        self.now_ns = at_ns
        action()
        return True

    def run_until(self, end_ns: int) -> None:
        """Lets time pass."""
        while self.step(end_ns):
            pass
        self.now_ns = end_ns

    def pass_time(self, elapsed_ns: int) -> None:
        """Accounts for the time up to the next action."""
