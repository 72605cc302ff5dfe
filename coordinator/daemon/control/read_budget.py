"""Bounds the coordinator's time for requests of users without operators' rights.

Each such user has a part of the time, and all of them together have another.  Invariant: no clock of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nvshare.coordinator.daemon.control.api import ControlError

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.control.rights import Rights

USER_PART: Final = 50
"""One user may take 1/50 of the time."""
ALL_PART: Final = 10
MOST_NS: Final = 100_000_000
"""Unspent time is kept up to this amount."""
CHANGE_NS: Final = 2_000_000
"""Added for a change, because it is logged: a user makes ten a second at most."""
_MANY_USERS: Final = 256


class _Bucket:
    """Time that may be spent.  It may fall below zero: the cost of an answer is known afterwards."""

    def __init__(self, part: int, now_ns: int) -> None:
        self._part = part
        self.left_ns = MOST_NS
        self._at_ns = now_ns

    def refill(self, now_ns: int) -> None:
        self.left_ns = min(MOST_NS, self.left_ns + (now_ns - self._at_ns) // self._part)
        self._at_ns = now_ns


class ReadBudget:
    """The time that is left for each user and for all of them."""

    def __init__(self, rights: Rights) -> None:
        self._rights = rights
        self._users: dict[int, _Bucket] = {}
        self._all = _Bucket(ALL_PART, 0)

    def refusal(self, user_id: int, now_ns: int) -> ControlError | None:
        """The error to send instead of an answer; None when there is time for one."""
        if self._rights.is_operator(user_id):
            return None
        if len(self._users) >= _MANY_USERS:
            self._forget_idle(now_ns)
        own = self._users.setdefault(user_id, _Bucket(USER_PART, now_ns))
        own.refill(now_ns)
        self._all.refill(now_ns)
        if own.left_ns > 0 and self._all.left_ns > 0:
            return None
        whose = f"user {user_id}" if own.left_ns <= 0 else "all users"
        return ControlError("busy", f"the requests of {whose} take too much of the coordinator's time; ask less often")

    def charge(self, user_id: int, spent_ns: int) -> None:
        """Counts the time of an answer."""
        if (own := self._users.get(user_id)) is not None:
            own.left_ns -= spent_ns
            self._all.left_ns -= spent_ns

    def _forget_idle(self, now_ns: int) -> None:
        for bucket in self._users.values():
            bucket.refill(now_ns)
        self._users = {user: bucket for user, bucket in self._users.items() if bucket.left_ns < MOST_NS}
