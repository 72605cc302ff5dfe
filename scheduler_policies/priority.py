"""Strict priorities with ageing: a higher priority runs first and preempts, without starvation.

Turns rotate within a priority (owner_turns.py).  At most once in `age_quanta` quanta, a client that has waited that
long is *favoured*: the longest waiting client gets one turn without preemption.  So the highest priority keeps at
least age_quanta / (age_quanta + 1) of the time.

Invariants: only a higher priority preempts, so two clients never preempt each other in turn.  A client waits at most
`wait_bound_ns`.

Proof of the bound: after age_quanta quanta a client can be favoured.  At most the n - 1 clients that have waited longer
come before it, each once, because a returning client has waited less.  Favours follow each other within age_quanta
quanta and one turn in progress: in all age_quanta + n (age_quanta + 1) quanta.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.scheduler_policies.api import Choice, ClientView, GpuView, PolicyBase
from nvshare.scheduler_policies.owner_turns import OwnerTurns


def _waiting_since(view: ClientView) -> int:
    assert view.waiting_since_ns is not None
    return view.waiting_since_ns


class Priority(PolicyBase):
    """Keeps the last favour, and the last turn of each owner."""

    name = "priority"

    def __init__(self, age_quanta: int = 20) -> None:
        assert age_quanta >= 1
        self._age_quanta = age_quanta
        self._turns = OwnerTurns()
        self._favoured: int | None = None
        self._favoured_at_ns: int | None = None
        self._before: tuple[int | None, int | None] = (None, None)
        """Time of the last `choose`, and the time of the favour before it."""

    def choose(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> Choice:
        """Chooses the longest waiting client if a favour is pending, else the next one of the highest priority."""
        asked_at_ns, favoured_before_ns = self._before
        if asked_at_ns == now_ns:  # the client chosen just before still waits: its favour does not count
            self._favoured_at_ns = favoured_before_ns
        self._before = (now_ns, self._favoured_at_ns)
        favoured = self._pending_favour(waiting, gpu, now_ns)
        if favoured is not None:
            self._favoured, self._favoured_at_ns = favoured.client, now_ns
            return Choice(favoured.client)
        self._favoured = None
        highest = max(view.priority for view in waiting)
        return Choice(self._turns.first([view for view in waiting if view.priority == highest]).client)

    def preempt(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Preempts for a higher priority, except in a favoured turn."""
        return holder.client != self._favoured and any(view.priority > holder.priority for view in waiting)

    def renew(self, holder: ClientView, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> bool:
        """Renews while only lower priorities wait and no favour is pending."""
        if any(view.priority >= holder.priority for view in waiting):
            return False
        return self._pending_favour(waiting, gpu, now_ns) is None

    def order(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> list[int]:
        """By priority, then by turns; does not predict favours."""
        classes: dict[int, list[ClientView]] = {}
        for view in waiting:
            classes.setdefault(view.priority, []).append(view)
        return [client for priority in sorted(classes, reverse=True) for client in self._turns.order(classes[priority])]

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of the module's docstring."""
        return (self._age_quanta + clients * (self._age_quanta + 1)) * gpu.quantum_ns

    def released(self, client: ClientView, now_ns: int) -> None:
        """Notes a turn of the client's owner."""
        self._turns.released(client, now_ns)

    def gone(self, client: int) -> None:
        """Forgets the client and its favour."""
        self._turns.gone(client)
        if self._favoured == client:
            self._favoured = None

    def _pending_favour(self, waiting: Sequence[ClientView], gpu: GpuView, now_ns: int) -> ClientView | None:
        age_ns = self._age_quanta * gpu.quantum_ns
        if self._favoured_at_ns is not None and now_ns - self._favoured_at_ns < age_ns:
            return None
        longest = min(waiting, key=_waiting_since)
        return longest if now_ns - _waiting_since(longest) >= age_ns else None
