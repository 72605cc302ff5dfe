"""GPU time in proportion to weights, by virtual time.

Each client, or group of clients, has a *tag*: the time that it has had the lease, divided by its weight.  Whoever has
the least runs next, so that tags stay together and times follow the weights.  This is start-time fair queueing (Goyal,
Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996) with turns as packets whose length is known afterwards; weights
as in stride scheduling (Waldspurger, Weihl: "Stride Scheduling", MIT 1995).

Invariants:
- Nobody claims the past: virtual time is the least tag of those who wait, and never goes back; a newcomer begins one
  turn behind it, whoever comes back has at least it.  While a client is alone, virtual time is its own.
- Nobody pays for ever: more than `DEBT` turns ahead of virtual time a tag is not; a client whose drain took long,
  or that had the GPU when the quantum was longer, is behind by that at most.
- Clients of one group have one tag: starting more processes gives nobody more.
- Half a turn of difference counts as none: among those so close the one whose last turn is longest ago goes first,
  and the holder does not go on.  So a drain that takes a little longer does not change the order.

Why the bound holds: who waits has a tag of at most DEBT + 1/2 turns of its own ahead of virtual time, and one more for
each turn that others of its group have before it, m in all.  Until virtual time is there, each of the others has at
most as much service as that much virtual time gives it, r times as many turns if its weight is r times as large,
and one turn that was under way.  So it waits at most (n - 1) (1 + r (DEBT + 1/2 + m)) turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase

DEBT: Final = 4
_SCALE: Final = 1 << 20
"""Tags are integers: nanoseconds times this, divided by the weight."""


@dataclass(slots=True)
class _Account:
    """Of a client, or of a group."""

    tag: int
    clients: set[int]


class FairShare(PolicyBase):
    """Remembers an account for each client or group, and what of each client's time it has charged."""

    name = "fair_share"

    def __init__(self) -> None:
        self._virtual = 0
        self._asked_at_ns: int | None = None
        self._accounts: dict[int | str, _Account] = {}
        self._charged: dict[int, int] = {}
        self._homes: dict[int, int | str] = {}
        self._weights: dict[int, int] = {}
        self._company: set[int] = set()
        """Who waited when the policy was last asked."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """The first in turn order of those who have had the least for their weight."""
        tags = self._tags(waiting, gpu.quantum_ns)
        if now_ns != self._asked_at_ns:  # else who was chosen a moment ago may wait still, and have the least
            self._virtual = max(self._virtual, min(tags))
        self._asked_at_ns = now_ns
        return Choice(waiting[_first(waiting, tags, gpu.quantum_ns)].client)

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Never.  But who was alone until now has not taken from anybody, so its time is where virtual time begins."""
        tag = self._charge(holder, gpu.quantum_ns)
        alone = holder.holding_since_ns is not None and not any(view.client in self._company for view in waiting)
        if alone:
            self._virtual = max(self._virtual, tag)
        self._tags(waiting, gpu.quantum_ns)
        return False

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Half a turn more would not bring it beyond any of the others."""
        tag = self._charge(holder, gpu.quantum_ns)
        least = min(self._tags(waiting, gpu.quantum_ns))
        self._virtual = max(self._virtual, min(tag, least))
        return tag + _turn(holder, gpu.quantum_ns) // 2 <= least

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """Who would be chosen now, then by tags.  Virtual time stands still: the holder may have less than they."""
        tags = self._tags(waiting, gpu.quantum_ns)
        first = _first(waiting, tags, gpu.quantum_ns)
        places = sorted(range(len(waiting)), key=lambda place: (place != first, tags[place], place))
        return [waiting[place].client for place in places]

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """See the top of this file; with the weights that are there now."""
        weights = self._weights.values()
        ratio = -(-max(weights, default=1) // min(weights, default=1))
        members = max((len(account.clients) for account in self._accounts.values()), default=1)
        return max(0, clients - 1) * (2 + ratio * (2 * DEBT + 1 + 2 * members)) * gpu.quantum_ns // 2

    def released(self, client: ClientView, now_ns: int) -> None:
        """Its time is charged."""
        self._charge(client, None)

    def gone(self, client: int) -> None:
        """A group's account stays while it is in debt, or processes that come and go would never pay."""
        self._company.discard(client)
        self._charged.pop(client, None)
        self._weights.pop(client, None)
        home = self._homes.pop(client, None)
        if home is None:
            return
        self._accounts[home].clients.discard(client)
        for name, account in list(self._accounts.items()):
            if not account.clients and (name == client or account.tag <= self._virtual):
                del self._accounts[name]

    def _tags(self, waiting: Sequence[ClientView], quantum_ns: int) -> list[int]:
        """Of those who wait; nobody before virtual time, nobody too far behind."""
        virtual, homes, charged = self._virtual, self._homes, self._charged
        self._company = {view.client for view in waiting}
        tags: list[int] = []
        for view in waiting:
            client = view.client
            if charged.get(client) != view.used_ns or self._weights[client] != view.weight:
                self._charge(view, quantum_ns)
            account = self._accounts[homes[client]]
            latest = virtual + DEBT * _turn(view, quantum_ns)
            if not virtual <= account.tag <= latest:
                account.tag = min(max(account.tag, virtual), latest)
            tags.append(account.tag)
        return tags

    def _charge(self, view: ClientView, quantum_ns: int | None) -> int:
        """The tag of its account, with all that it has used."""
        client = view.client
        before = self._charged.get(client)
        if before is None:
            home = self._homes[client] = view.group or client
            account = self._accounts.get(home)
            if account is None:
                debit = 0 if quantum_ns is None else _turn(view, quantum_ns)
                account = self._accounts[home] = _Account(self._virtual + debit, set())
            account.clients.add(client)
        else:
            account = self._accounts[self._homes[client]]
            account.tag += (view.used_ns - before) * _SCALE // view.weight
        self._charged[client] = view.used_ns
        self._weights[client] = view.weight
        return account.tag


def _first(waiting: Sequence[ClientView], tags: Sequence[int], quantum_ns: int) -> int:
    """The place of the first in turn order whose tag is as good as the least."""
    least = min(tags)
    close = least + _turn(waiting[tags.index(least)], quantum_ns) // 2
    return next(place for place, tag in enumerate(tags) if tag <= close)


def _turn(view: ClientView, quantum_ns: int) -> int:
    """What a quantum costs it."""
    return quantum_ns * _SCALE // view.weight
