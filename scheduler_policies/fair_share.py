"""GPU time in proportion to weights, by virtual time: between owners first, then between the programs of each.

Each owner has a *tag*: the lease time of its programs divided by its weight.  Each program has a tag among the programs
of its owner.  The owner with the least tag is next, with its program with the least tag.  This is hierarchical
start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996), with turns as packets whose
length is known afterwards.  Weights are as in stride scheduling (Waldspurger, Weihl: "Stride Scheduling", MIT 1995).

A user has weight 1, a slot the weight of its annotation.  A program without owner and group is its own owner.

Invariants, on each level:
- Idle time earns no credit: virtual time is the least tag of the waiting and never decreases.  A newcomer begins one
  turn after it, a returning client at it or later.  While one client is alone, virtual time is its tag.
- Debt is bounded: a tag is at most `DEBT` turns ahead of virtual time, after long drains or longer quanta too.
- Tags within half a turn count as equal: among them the oldest last turn goes first, and the holder does not renew.
  So a slightly longer drain does not change the order.

Proof of the bound: a waiting client's tag is at most DEBT + 1/2 of its turns ahead of virtual time, and one more for
each turn that it needs.  Until virtual time reaches that, each other client gets the same virtual time of service
(r times as many turns with r times the weight), and one turn already begun.  Among the p programs of one owner, a
program needs one turn, so it waits at most w = (p - 1) (1 + r (DEBT + 3/2)) turns of its owner.  Among u owners with
ratio R, its owner needs w + 1 turns: w + (u - 1) (1 + R (DEBT + 3/2 + w)) turns in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase

DEBT: Final = 4
_SCALE: Final = 1 << 20
"""Tags are integers: nanoseconds times this, divided by the weight."""

OwnerKey = int | str
"""An owner's name; for a client without owner, the client."""


@dataclass(slots=True)
class _Level:
    """Tags with a common virtual time."""

    virtual: int = 0
    tags: dict[OwnerKey, int] = field(default_factory=dict)

    def bound(self, key: OwnerKey, turn: int) -> int:
        """Bounds and returns the tag of a waiting one: from virtual time to `DEBT` turns ahead of it."""
        tag = self.tags[key] = min(max(self.tags[key], self.virtual), self.virtual + DEBT * turn)
        return tag

    def rise(self, tag: int) -> None:
        """Raises virtual time to at least `tag`."""
        self.virtual = max(self.virtual, tag)


@dataclass(slots=True)
class _Owner:
    """One owner, with its present programs and their tags."""

    weight: int
    clients: set[int] = field(default_factory=set)
    level: _Level = field(default_factory=_Level)


@dataclass(slots=True)
class _Queue:
    """The waiting programs of one owner, in turn order."""

    owner: OwnerKey
    tag: int
    turn: int
    views: list[ClientView] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def first(self) -> int:
        return _first(self.tags, self.turns)


class FairShare(PolicyBase):
    """Keeps the tags, and the charged time of each client."""

    name = "fair_share"

    def __init__(self) -> None:
        self._top = _Level()
        self._owners: dict[OwnerKey, _Owner] = {}
        self._asked_at_ns: int | None = None
        self._charged: dict[int, int] = {}
        self._owner_of: dict[int, OwnerKey] = {}
        self._weights: dict[int, int] = {}
        self._chosen: int | None = None
        """The client chosen last, until its turn is charged."""
        self._waiting: set[int] = set()
        """The clients that waited at the last call."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """Chooses the client with the least tag; among close tags the first in turn order."""
        queues = self._queues(waiting, gpu.quantum_ns)
        if now_ns != self._asked_at_ns:  # a second call excludes the client just chosen, which has the least tag
            self._top.rise(min(queue.tag for queue in queues))
            for queue in queues:
                self._owners[queue.owner].level.rise(min(queue.tags))
        self._asked_at_ns = now_ns
        queue = queues[_first_queue(queues)]
        self._chosen = queue.views[queue.first()].client
        return Choice(self._chosen)

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Never preempts.  Time spent alone incurs no debt: virtual time rises to the tag of a holder alone so far."""
        key = self._charge(holder, gpu.quantum_ns)
        if holder.holding_since_ns is not None:
            level = self._owners[key].level
            same_owner = [self._owner_of.get(view.client) == key for view in waiting if view.client in self._waiting]
            if all(same_owner):
                self._top.rise(self._top.tags[key])
            if not any(same_owner):
                level.rise(level.tags[holder.client])
        self._queues(waiting, gpu.quantum_ns)
        return False

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Renews while the holder's tag stays the least even after half a turn more, on both levels."""
        key = self._charge(holder, gpu.quantum_ns)
        queues = self._queues(waiting, gpu.quantum_ns)
        owner, quantum_ns = self._owners[key], gpu.quantum_ns
        owners = (queue.tag for queue in queues if queue.owner != key)
        programs = (tag for queue in queues if queue.owner == key for tag in queue.tags)
        above = _renews(self._top, key, owners, _cost(quantum_ns, owner.weight))
        return _renews(owner.level, holder.client, programs, _cost(quantum_ns, holder.weight)) and above

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """The client that would be chosen now, then by tags; each further program of an owner comes a turn later.

        Virtual time stays, since the holder's tag may be less.
        """
        queues = self._queues(waiting, gpu.quantum_ns)
        running = None if self._chosen is None or self._chosen in self._waiting else self._owner_of.get(self._chosen)
        for queue in queues:
            queue.tag += queue.turn if queue.owner == running else 0
        first = _first_queue(queues)
        places: list[tuple[bool, int, int, int]] = []
        for number, queue in enumerate(queues):
            head = queue.first()
            by_tag = sorted(
                range(len(queue.views)),
                key=lambda place, queue=queue, head=head: (  # type: ignore[misc]
                    place != head,
                    queue.tags[place],
                    place,
                ),
            )
            for nth, place in enumerate(by_tag):
                later = number != first or nth > 0
                places.append((later, queue.tag + nth * queue.turn, number, queue.views[place].client))
        return [client for _, _, _, client in sorted(places)]

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of the module's docstring, for the present weights.  An unknown client counts as an owner."""
        known = [owner for owner in self._owners.values() if owner.clients]
        programs = max((len(owner.clients) for owner in known), default=1)
        owners = len(known) + max(0, clients - len(self._owner_of))
        debt = 2 * DEBT + 3  # halves
        within = (programs - 1) * (2 + _ratio(self._weights.values()) * debt)
        ratio = _ratio(owner.weight for owner in known)
        return (within + max(0, owners - 1) * (2 + ratio * (debt + within))) * gpu.quantum_ns // 2

    def released(self, client: ClientView, now_ns: int) -> None:
        """Charges the turn."""
        self._charge(client, None)
        self._chosen = None

    def gone(self, client: int) -> None:
        """Forgets the client.  An owner's tag stays while in debt, or short-lived processes would never pay."""
        self._waiting.discard(client)
        self._charged.pop(client, None)
        self._weights.pop(client, None)
        key = self._owner_of.pop(client, None)
        if key is None:
            return
        self._owners[key].clients.discard(client)
        self._owners[key].level.tags.pop(client)
        for name, owner in list(self._owners.items()):
            if not owner.clients and (name == client or self._top.tags[name] <= self._top.virtual):
                del self._owners[name], self._top.tags[name]

    def _queues(self, waiting: Sequence[ClientView], quantum_ns: int) -> list[_Queue]:
        """The waiting clients by owner, in turn order."""
        self._waiting = {view.client for view in waiting}
        queues: dict[OwnerKey, _Queue] = {}
        for view in waiting:
            client = view.client
            if self._charged.get(client) != view.used_ns or self._weights[client] != view.weight:
                self._charge(view, quantum_ns)
            key = self._owner_of[client]
            owner = self._owners[key]
            queue = queues.get(key)
            if queue is None:
                turn = _cost(quantum_ns, owner.weight)
                queue = queues[key] = _Queue(key, self._top.bound(key, turn), turn)
            turn = _cost(quantum_ns, view.weight)
            queue.views.append(view)
            queue.tags.append(owner.level.bound(client, turn))
            queue.turns.append(turn)
        return list(queues.values())

    def _charge(self, view: ClientView, quantum_ns: int | None) -> OwnerKey:
        """Adds the client's uncharged time to its tag and its owner's; returns the owner."""
        client = view.client
        key = self._owner_of.get(client)
        weight = view.weight if view.group or not view.owner else 1
        if key is None:
            key = self._owner_of[client] = view.owner or view.group or client
            owner = self._owners.get(key)
            if owner is None:
                owner = self._owners[key] = _Owner(weight)
                self._top.tags[key] = self._top.virtual + _cost(quantum_ns or 0, weight)
            owner.clients.add(client)
            owner.level.tags[client] = owner.level.virtual + _cost(quantum_ns or 0, view.weight)
        else:
            used_ns = view.used_ns - self._charged[client]
            owner = self._owners[key]
            owner.weight = weight
            self._top.tags[key] += _cost(used_ns, weight)
            owner.level.tags[client] += _cost(used_ns, view.weight)
        self._charged[client] = view.used_ns
        self._weights[client] = view.weight
        return key


def _renews(level: _Level, key: OwnerKey, others: Iterable[int], turn: int) -> bool:
    """Whether `key` would be chosen again.  Raises virtual time."""
    tag, least = level.tags[key], min(others, default=None)
    level.rise(tag if least is None else min(tag, least))
    return least is None or tag + turn // 2 <= least


def _first(tags: Sequence[int], turns: Sequence[int]) -> int:
    """Index of the first tag, in turn order, within half a turn of the least."""
    least = min(tags)
    close = least + turns[tags.index(least)] // 2
    return next(place for place, tag in enumerate(tags) if tag <= close)


def _first_queue(queues: Sequence[_Queue]) -> int:
    return _first([queue.tag for queue in queues], [queue.turn for queue in queues])


def _cost(time_ns: int, weight: int) -> int:
    """The increase of a tag for this GPU time."""
    return time_ns * _SCALE // weight


def _ratio(weights: Iterable[int]) -> int:
    """Largest weight divided by the smallest, rounded up."""
    known = list(weights) or [1]
    return -(-max(known) // min(known))
