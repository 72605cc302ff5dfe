"""GPU time in proportion to weights, by virtual time: between owners first, then between the programs of each.

Two levels work alike.  Each owner has a *tag*: the time that its programs have had the lease, divided by its weight;
and each program has one among the programs of its owner.  The owner with the least tag is next, with its program with
the least tag, so that tags stay together and times follow the weights.  This is hierarchical start-time fair queueing
(Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996) with turns as packets whose length is known afterwards;
weights as in stride scheduling (Waldspurger, Weihl: "Stride Scheduling", MIT 1995).

A user weighs 1, a slot what its annotation says; a program without an owner or group is an owner of its own, with its
own weight.

Invariants, on each level:
- Nobody claims the past: virtual time is the least tag of those who wait, and never goes back; a newcomer begins one
  turn behind it, whoever comes back has at least it.  While one is alone, virtual time is its own.
- Nobody pays for ever: more than `DEBT` turns ahead of virtual time a tag is not; a client whose drain took long,
  or that had the GPU when the quantum was longer, is behind by that at most.
- Half a turn of difference counts as none: among those so close the one whose last turn is longest ago goes first,
  and the holder does not go on.  So a drain that takes a little longer does not change the order.

Why the bound holds: who waits has a tag of at most DEBT + 1/2 turns of its own ahead of virtual time, and one more for
each turn that it needs.  Until virtual time is there, each of the others has at most as much service as that much
virtual time gives it, r times as many turns if its weight is r times as large, and one turn that was under way.  Among
the p programs of one owner a program needs one turn, so it waits at most w = (p - 1) (1 + r (DEBT + 3/2)) turns of its
owner.  Among u owners, R their ratio, this one needs w + 1 turns: w + (u - 1) (1 + R (DEBT + 3/2 + w)) turns in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase

DEBT: Final = 4
_SCALE: Final = 1 << 20
"""Tags are integers: nanoseconds times this, divided by the weight."""

Home = int | str
"""An owner: its name, or the client that has none."""


@dataclass(slots=True)
class _Level:
    """Tags that share one virtual time."""

    virtual: int = 0
    tags: dict[Home, int] = field(default_factory=dict)

    def bound(self, key: Home, turn: int) -> int:
        """The tag of one that waits: not before virtual time, and not too far behind."""
        tag = self.tags[key] = min(max(self.tags[key], self.virtual), self.virtual + DEBT * turn)
        return tag

    def rise(self, tag: int) -> None:
        """Virtual time is at least this."""
        self.virtual = max(self.virtual, tag)


@dataclass(slots=True)
class _Owner:
    """The programs of one owner; their tags outlive none of them."""

    weight: int
    clients: set[int] = field(default_factory=set)
    level: _Level = field(default_factory=_Level)


@dataclass(slots=True)
class _Line:
    """One owner's programs that wait, in turn order."""

    home: Home
    tag: int
    turn: int
    views: list[ClientView] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def first(self) -> int:
        return _first(self.tags, self.turns)


class FairShare(PolicyBase):
    """Remembers the tags, and what of each client's time it has charged."""

    name = "fair_share"

    def __init__(self) -> None:
        self._top = _Level()
        self._owners: dict[Home, _Owner] = {}
        self._asked_at_ns: int | None = None
        self._charged: dict[int, int] = {}
        self._homes: dict[int, Home] = {}
        self._weights: dict[int, int] = {}
        self._chosen: int | None = None
        """The client that was chosen last, until it is charged for the turn."""
        self._company: set[int] = set()
        """Who waited when the policy was last asked."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """The first in turn order of those who have had the least for their weight."""
        lines = self._lines(waiting, gpu.quantum_ns)
        if now_ns != self._asked_at_ns:  # else who was chosen a moment ago may wait still, and have the least
            self._top.rise(min(line.tag for line in lines))
            for line in lines:
                self._owners[line.home].level.rise(min(line.tags))
        self._asked_at_ns = now_ns
        line = lines[_first_line(lines)]
        self._chosen = line.views[line.first()].client
        return Choice(self._chosen)

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Never.  But who was alone until now has not taken from anybody, so its time is where virtual time begins."""
        home = self._charge(holder, gpu.quantum_ns)
        if holder.holding_since_ns is not None:
            level = self._owners[home].level
            mates = [self._homes.get(view.client) == home for view in waiting if view.client in self._company]
            if all(mates):
                self._top.rise(self._top.tags[home])
            if not any(mates):
                level.rise(level.tags[holder.client])
        self._lines(waiting, gpu.quantum_ns)
        return False

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Half a turn more would not bring it beyond any of the others."""
        home = self._charge(holder, gpu.quantum_ns)
        lines = self._lines(waiting, gpu.quantum_ns)
        owner, quantum_ns = self._owners[home], gpu.quantum_ns
        others = (line.tag for line in lines if line.home != home)
        mates = (tag for line in lines if line.home == home for tag in line.tags)
        above = _goes_on(self._top, home, others, _cost(quantum_ns, owner.weight))
        return _goes_on(owner.level, holder.client, mates, _cost(quantum_ns, holder.weight)) and above

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """Who would be chosen now, then by tags, each later program of an owner one of its turns later.  Virtual time
        stands still: the holder may have less than they."""
        lines = self._lines(waiting, gpu.quantum_ns)
        running = None if self._chosen is None or self._chosen in self._company else self._homes.get(self._chosen)
        for line in lines:
            line.tag += line.turn if line.home == running else 0
        first = _first_line(lines)
        places: list[tuple[bool, int, int, int]] = []
        for number, line in enumerate(lines):
            head = line.first()
            by_tag = sorted(
                range(len(line.views)),
                key=lambda place, line=line, head=head: (  # type: ignore[misc]
                    place != head,
                    line.tags[place],
                    place,
                ),
            )
            for nth, place in enumerate(by_tag):
                later = number != first or nth > 0
                places.append((later, line.tag + nth * line.turn, number, line.views[place].client))
        return [client for _, _, _, client in sorted(places)]

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """See the top of this file; with the weights that are there now.  Who is not known yet is an owner."""
        known = [owner for owner in self._owners.values() if owner.clients]
        programs = max((len(owner.clients) for owner in known), default=1)
        owners = len(known) + max(0, clients - len(self._homes))
        debt = 2 * DEBT + 3  # halves
        within = (programs - 1) * (2 + _ratio(self._weights.values()) * debt)
        ratio = _ratio(owner.weight for owner in known)
        return (within + max(0, owners - 1) * (2 + ratio * (debt + within))) * gpu.quantum_ns // 2

    def released(self, client: ClientView, now_ns: int) -> None:
        """Its time is charged."""
        self._charge(client, None)
        self._chosen = None

    def gone(self, client: int) -> None:
        """An owner's tag stays while it is in debt, or processes that come and go would never pay."""
        self._company.discard(client)
        self._charged.pop(client, None)
        self._weights.pop(client, None)
        home = self._homes.pop(client, None)
        if home is None:
            return
        self._owners[home].clients.discard(client)
        self._owners[home].level.tags.pop(client)
        for name, owner in list(self._owners.items()):
            if not owner.clients and (name == client or self._top.tags[name] <= self._top.virtual):
                del self._owners[name], self._top.tags[name]

    def _lines(self, waiting: Sequence[ClientView], quantum_ns: int) -> list[_Line]:
        """Those who wait, by owner; in turn order."""
        self._company = {view.client for view in waiting}
        lines: dict[Home, _Line] = {}
        for view in waiting:
            client = view.client
            if self._charged.get(client) != view.used_ns or self._weights[client] != view.weight:
                self._charge(view, quantum_ns)
            home = self._homes[client]
            owner = self._owners[home]
            line = lines.get(home)
            if line is None:
                turn = _cost(quantum_ns, owner.weight)
                line = lines[home] = _Line(home, self._top.bound(home, turn), turn)
            turn = _cost(quantum_ns, view.weight)
            line.views.append(view)
            line.tags.append(owner.level.bound(client, turn))
            line.turns.append(turn)
        return list(lines.values())

    def _charge(self, view: ClientView, quantum_ns: int | None) -> Home:
        """Its owner, with all that it has used in the tags."""
        client = view.client
        home = self._homes.get(client)
        weight = view.weight if view.group or not view.owner else 1
        if home is None:
            home = self._homes[client] = view.owner or view.group or client
            owner = self._owners.get(home)
            if owner is None:
                owner = self._owners[home] = _Owner(weight)
                self._top.tags[home] = self._top.virtual + _cost(quantum_ns or 0, weight)
            owner.clients.add(client)
            owner.level.tags[client] = owner.level.virtual + _cost(quantum_ns or 0, view.weight)
        else:
            used_ns = view.used_ns - self._charged[client]
            owner = self._owners[home]
            owner.weight = weight
            self._top.tags[home] += _cost(used_ns, weight)
            owner.level.tags[client] += _cost(used_ns, view.weight)
        self._charged[client] = view.used_ns
        self._weights[client] = view.weight
        return home


def _goes_on(level: _Level, key: Home, others: Iterable[int], turn: int) -> bool:
    """Whether it would be chosen again; virtual time follows."""
    tag, least = level.tags[key], min(others, default=None)
    level.rise(tag if least is None else min(tag, least))
    return least is None or tag + turn // 2 <= least


def _first(tags: Sequence[int], turns: Sequence[int]) -> int:
    """The place of the first in turn order whose tag is as good as the least."""
    least = min(tags)
    close = least + turns[tags.index(least)] // 2
    return next(place for place, tag in enumerate(tags) if tag <= close)


def _first_line(lines: Sequence[_Line]) -> int:
    return _first([line.tag for line in lines], [line.turn for line in lines])


def _cost(time_ns: int, weight: int) -> int:
    """What this much of GPU time adds to a tag."""
    return time_ns * _SCALE // weight


def _ratio(weights: Iterable[int]) -> int:
    """The largest by the smallest, rounded up."""
    known = list(weights) or [1]
    return -(-max(known) // min(known))
