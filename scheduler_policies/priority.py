"""Strict classes with ageing: a higher priority goes first and preempts, and still nobody starves.

A client's class is its priority number.  Within a class turns go round (owner_turns.py).  Once in `age_quanta` quanta
at most, a client that has waited that long is *favoured*: whoever has waited longest has one turn, whatever its class,
and is not preempted in it.  So the highest class keeps at least age_quanta / (age_quanta + 1) of the time however many
wait below it.

Invariants: a holder is preempted by a higher class only, so two clients never preempt each other in turn; a client
waits at most `wait_bound_ns`.

Why the bound holds: after age_quanta quanta a client can be favoured.  Before it come at most the n - 1 others that
have waited longer, each once, since whoever comes back has waited less.  Favours follow each other within age_quanta
quanta and the turn that is under way when one falls due: in all age_quanta + n (age_quanta + 1) quanta.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase
from nvshare.scheduler_policies.owner_turns import OwnerTurns


def _waiting_since(view: ClientView) -> int:
    assert view.waiting_since_ns is not None
    return view.waiting_since_ns


class Priority(PolicyBase):
    """Remembers whom it favoured last, and when; and when each owner had its last turn."""

    name = "priority"

    def __init__(self, age_quanta: int = 20) -> None:
        assert age_quanta >= 1
        self._age_quanta = age_quanta
        self._turns = OwnerTurns()
        self._favoured: int | None = None
        self._favoured_at_ns: int | None = None
        self._before: tuple[int | None, int | None] = (None, None)
        """When it was last asked, and the favour before that."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """The longest waiting one if a favour is due, else the next one of the highest class."""
        asked_at_ns, favoured_before_ns = self._before
        if asked_at_ns == now_ns:  # whom it chose a moment ago waits on, so that is no favour
            self._favoured_at_ns = favoured_before_ns
        self._before = (now_ns, self._favoured_at_ns)
        favoured = self._due(waiting, gpu, now_ns)
        if favoured is not None:
            self._favoured, self._favoured_at_ns = favoured.client, now_ns
            return Choice(favoured.client)
        self._favoured = None
        highest = max(view.priority for view in waiting)
        return Choice(self._turns.first([view for view in waiting if view.priority == highest]).client)

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """A higher class waits, and the holder is not in its favoured turn."""
        return holder.client != self._favoured and any(view.priority > holder.priority for view in waiting)

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Only lower classes wait, and no favour is due."""
        if any(view.priority >= holder.priority for view in waiting):
            return False
        return self._due(waiting, gpu, now_ns) is None

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """By class, then by turns; whom a favour will bring forward is not foreseen."""
        classes: dict[int, list[ClientView]] = {}
        for view in waiting:
            classes.setdefault(view.priority, []).append(view)
        return [client for priority in sorted(classes, reverse=True) for client in self._turns.order(classes[priority])]

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """See the top of this file."""
        return (self._age_quanta + clients * (self._age_quanta + 1)) * gpu.quantum_ns

    def released(self, client: ClientView, now_ns: int) -> None:
        """Its owner has had a turn."""
        self._turns.released(client, now_ns)

    def gone(self, client: int) -> None:
        """Its favour ends with it."""
        self._turns.gone(client)
        if self._favoured == client:
            self._favoured = None

    def _due(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> ClientView | None:
        age_ns = self._age_quanta * gpu.quantum_ns
        if self._favoured_at_ns is not None and now_ns - self._favoured_at_ns < age_ns:
            return None
        longest = min(waiting, key=_waiting_since)
        return longest if now_ns - _waiting_since(longest) >= age_ns else None
