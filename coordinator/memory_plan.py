"""Who is evicted and what is restored when the lease goes to another client.  Pure.

Belady's rule: room for the next client is made by those whose next turn is farthest away; under round robin that is
the one that just ran, the opposite of least recently used (L. A. Belady, A study of replacement algorithms for a
virtual-storage computer, 1966).

Invariants:
- never more bytes are evicted than the next client lacks room for;
- what is restored fits: after the plan the sum of resident bytes is at most capacity, if the clients do as told;
- nothing is ordered when everything fits.

May not go here: when orders are sent and what became of them (moves.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figures:
    """One client's memory on the GPU.  `movable_bytes` is the resident part that can be evicted now."""

    client: int
    allocated_bytes: int
    resident_bytes: int
    movable_bytes: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """`client` moves `bytes` off the GPU."""

    client: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """First the evictions, then the restoration of the next client."""

    evictions: tuple[Eviction, ...]
    restore_bytes: int


def evictions(excess_bytes: int, farthest_first: Iterable[Figures]) -> tuple[Eviction, ...]:
    """Make room for `excess_bytes`, as far as that is possible, from those whose turn is farthest away."""
    orders = []
    for figures in farthest_first:
        if excess_bytes <= 0:
            break
        take = min(excess_bytes, figures.movable_bytes)
        if take > 0:
            orders.append(Eviction(figures.client, take))
            excess_bytes -= take
    return tuple(orders)


def plan_switch(
    following: Figures, farthest_first: Sequence[Figures], *, resident_bytes: int, capacity_bytes: int
) -> Plan:
    """What must move before `following` runs.

    `resident_bytes` is that of all clients, those who cannot move included.  A client larger than what it can have is
    brought in as far as there is room; the rest stays where it is.
    """
    missing = max(0, following.allocated_bytes - following.resident_bytes)
    room = capacity_bytes - resident_bytes
    orders = evictions(missing - room, farthest_first)
    made = sum(order.bytes for order in orders)
    return Plan(orders, max(0, min(missing, room + made)))
