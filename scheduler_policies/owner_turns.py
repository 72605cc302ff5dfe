"""Turns go round between owners first, then between the programs of each: for the policies that give turns.

An owner's place is the time of its last turn on this GPU, whichever of its programs had that, or when the program that
would be next attached, if that was later: a newcomer cannot claim the past.  A view without an owner belongs to "", one
owner for all: then turns go round between programs.

Invariant: while a program waits, each other owner has at most one turn for each turn of its own owner, and each other
program of its owner at most one turn.  So with p programs of one owner and u owners it waits at most p u - 1 turns.

Non-goals: priorities, weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from nvshare.scheduler_policies.api import ClientView

REMEMBERED: Final = 1024
"""Owners; beyond that the one whose last turn is longest ago is forgotten."""


class OwnerTurns:
    """Of one GPU."""

    def __init__(self) -> None:
        self._last_ns: dict[str, int] = {}  # in the order of time
        self._owners: dict[int, str] = {}  # of the clients that have had a turn
        self._waiting: Sequence[ClientView] = ()  # when asked last
        self._chosen: ClientView | None = None
        self._most_programs = self._most_owners = 1

    def first(self, waiting: Sequence[ClientView]) -> ClientView:
        """Which of those in turn order is next.  O(n)."""
        self._waiting = waiting
        heads = self._heads(waiting)
        self._chosen = heads[min(heads, key=lambda owner: self._place(heads[owner]))]
        return self._chosen

    def order(self, waiting: Sequence[ClientView]) -> list[int]:
        """All of them as they will run: owner by owner, round by round.  The one that runs has had its turn by then."""
        heads = self._heads(waiting)
        if len(heads) == 1:
            return [view.client for view in waiting]
        chosen = self._chosen
        runs = chosen is not None and all(view.client != chosen.client for view in waiting)
        running = chosen.owner if chosen is not None and runs else None
        ordered = sorted(heads, key=lambda owner: (owner == running, self._place(heads[owner])))
        ranks = {owner: rank for rank, owner in enumerate(ordered)}
        rounds = dict.fromkeys(ranks, 0)
        places: list[tuple[int, int, int]] = []
        for view in waiting:
            places.append((rounds[view.owner], ranks[view.owner], view.client))
            rounds[view.owner] += 1
        return [client for _, _, client in sorted(places)]

    def longest_wait(self, clients: int) -> int:
        """In turns, with so many clients; those that are not known yet count as one owner's.  Programs come and go
        while another one waits, so the largest numbers so far count.  For tests: O(n)."""
        owners = self._owners | {view.client: view.owner for view in self._waiting}
        known = Counter(owners.values())
        programs = max(known.values(), default=0) + max(0, clients - len(owners))
        self._most_programs = max(self._most_programs, programs)
        self._most_owners = max(self._most_owners, len(known))
        return self._most_programs * self._most_owners - 1

    def released(self, view: ClientView, now_ns: int) -> None:
        """Its owner has had a turn, unless its gang was called while other programs of the owner wait.  A gang can be
        called after each turn here, and then they would wait for ever."""
        self._chosen = None
        self._owners[view.client] = view.owner
        if view.called and any(o.owner == view.owner and o.client != view.client for o in self._waiting):
            return
        self._last_ns.pop(view.owner, None)
        self._last_ns[view.owner] = now_ns
        if len(self._last_ns) > REMEMBERED:
            del self._last_ns[next(iter(self._last_ns))]

    def gone(self, client: int) -> None:
        """Its owner keeps its place, or programs that come and go would have all turns."""
        self._owners.pop(client, None)
        self._waiting = [view for view in self._waiting if view.client != client]

    def _heads(self, waiting: Sequence[ClientView]) -> dict[str, ClientView]:
        """The first program of each owner, in turn order."""
        heads: dict[str, ClientView] = {}
        for view in waiting:
            if view.owner not in heads:
                heads[view.owner] = view
        return heads

    def _place(self, head: ClientView) -> int:
        return max(self._last_ns.get(head.owner, 0), head.attached_at_ns)
