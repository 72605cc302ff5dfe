"""Turn order for policies: turns rotate between owners first, then between the programs of each.

An owner's rank is the time of its last turn on this GPU, or of the attachment of its next program, if later: a newcomer
gets no credit for the past.  Clients without an owner belong to the owner "", so turns then rotate between programs.

Invariant: while a program waits, each other owner has at most one turn for each turn of the program's owner.  Each
other program of its owner has at most one turn.  So with p programs of each of u owners it waits at most p u - 1 turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import ClientView

REMEMBERED: Final = 1024
"""Number of remembered owners; beyond it the owner with the oldest turn is forgotten."""


class OwnerTurns:
    """Turns on one GPU."""

    def __init__(self) -> None:
        self._last_ns: dict[str, int] = {}  # in order of time
        self._owners: dict[int, str] = {}  # for clients that have had a turn
        self._waiting: Sequence[ClientView] = ()  # at the last call
        self._chosen: ClientView | None = None
        self._most_programs = self._most_owners = 1

    def first(self, waiting: Sequence[ClientView]) -> ClientView:
        """The next client of those in turn order.  O(n)."""
        self._waiting = waiting
        heads = self._heads(waiting)
        self._chosen = heads[min(heads, key=lambda owner: self._rank(heads[owner]))]
        return self._chosen

    def order(self, waiting: Sequence[ClientView]) -> list[int]:
        """The clients in the expected order: round by round, owner by owner, after the present holder's turn."""
        heads = self._heads(waiting)
        if len(heads) == 1:
            return [view.client for view in waiting]
        chosen = self._chosen
        runs = chosen is not None and all(view.client != chosen.client for view in waiting)
        running = chosen.owner if chosen is not None and runs else None
        ordered = sorted(heads, key=lambda owner: (owner == running, self._rank(heads[owner])))
        ranks = {owner: rank for rank, owner in enumerate(ordered)}
        rounds = dict.fromkeys(ranks, 0)
        places: list[tuple[int, int, int]] = []
        for view in waiting:
            places.append((rounds[view.owner], ranks[view.owner], view.client))
            rounds[view.owner] += 1
        return [client for _, _, client in sorted(places)]

    def longest_wait(self, clients: int) -> int:
        """Longest wait in turns with this number of clients; unknown ones count for one owner.  For tests: O(n).

        Programs may start and end during a wait, so the largest numbers so far count.
        """
        owners = self._owners | {view.client: view.owner for view in self._waiting}
        known = Counter(owners.values())
        programs = max(known.values(), default=0) + max(0, clients - len(owners))
        self._most_programs = max(self._most_programs, programs)
        self._most_owners = max(self._most_owners, len(known))
        return self._most_programs * self._most_owners - 1

    def released(self, view: ClientView, now_ns: int) -> None:
        """Notes a turn of the client's owner, except a co-scheduled turn while other programs of the owner wait.

        A gang may be co-scheduled after each turn, and the other programs would then wait forever.
        """
        self._chosen = None
        self._owners[view.client] = view.owner
        if view.called and any(o.owner == view.owner and o.client != view.client for o in self._waiting):
            return
        self._last_ns.pop(view.owner, None)
        self._last_ns[view.owner] = now_ns
        if len(self._last_ns) > REMEMBERED:
            del self._last_ns[next(iter(self._last_ns))]

    def gone(self, client: int) -> None:
        """Forgets the client.  Its owner keeps its rank, or short-lived programs would get all turns."""
        self._owners.pop(client, None)
        self._waiting = [view for view in self._waiting if view.client != client]

    def _heads(self, waiting: Sequence[ClientView]) -> dict[str, ClientView]:
        """The first program of each owner, in turn order."""
        heads: dict[str, ClientView] = {}
        for view in waiting:
            if view.owner not in heads:
                heads[view.owner] = view
        return heads

    def _rank(self, head: ClientView) -> int:
        return max(self._last_ns.get(head.owner, 0), head.attached_at_ns)
