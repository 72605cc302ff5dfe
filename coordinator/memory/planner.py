"""Who is evicted and what is restored for the client that runs next: at a switch, and ahead of one.  Pure.

Belady's rule: room is made by those whose next turn is farthest away; under round robin that is the one that just ran,
the opposite of least recently used (L. A. Belady, A study of replacement algorithms for a virtual-storage computer,
1966).

At a switch nobody computes, so what moves is exposed: everything is ordered at once, and the restoration begins with
the room that there is and gets credit as the evictions free more, so that both directions of the link are busy.

Ahead of a switch somebody computes, and what moves is hidden.  It goes in pieces, so that a change of mind costs
little.  Whoever computes cannot give room, and it is the farthest of all; so moving ahead costs more bytes than moving
at the switch would, up to twice as many, and none of the time in which nobody computes.  It is done only where all of
it can be done before the switch: half of it would cost both the bytes and the time.

Invariants:
- never more bytes are evicted than the next client lacks room for;
- what is restored fits: credit is at most what is free, so that the sum of resident bytes stays within capacity at
  every moment, if the clients do as told;
- nothing is ordered when everything fits.

May not go here: when orders are sent and what became of them (memory/switching.py, memory/prefetch.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One client that may give room: `movable_bytes` is the resident part that can be evicted now."""

    client: int
    movable_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """`free_bytes` that nobody has or was promised, below zero when too much was; `leaving_bytes` that evictions under
    way will add."""

    free_bytes: int
    leaving_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Eviction:
    """`client` moves `bytes` off the GPU."""

    client: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The evictions and the restoration go on at the same time; of the latter, `credit_bytes` have room now."""

    evictions: tuple[Eviction, ...] = ()
    restore_bytes: int = 0
    credit_bytes: int = 0


def evictions(excess_bytes: int, farthest_first: Iterable[Candidate]) -> tuple[Eviction, ...]:
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


def plan_switch(missing_bytes: int, farthest_first: Iterable[Candidate], room: Room) -> Plan:
    """What must move before the next client runs, which lacks `missing_bytes`.

    A client larger than what it can have is brought in as far as there is room; the rest stays where it is.
    """
    orders = evictions(missing_bytes - room.free_bytes - room.leaving_bytes, farthest_first)
    coming = room.free_bytes + room.leaving_bytes + sum(order.bytes for order in orders)
    return Plan(orders, max(0, min(missing_bytes, coming)), max(0, min(missing_bytes, room.free_bytes)))


def plan_ahead(
    missing_bytes: int,
    farthest_first: Iterable[Candidate],
    room: Room,
    *,
    piece_bytes: int,
    affordable_bytes: int | None = None,
) -> Plan:
    """The next pieces to move for the client whose turn is next, while another computes.

    `farthest_first` must name neither of the two.  `affordable_bytes` is what the link moves each way until the switch;
    None: as much as need be.  One piece goes out at a time, and one comes in as soon as there is room for it.
    """
    free, leaving = room.free_bytes, room.leaving_bytes
    if missing_bytes <= 0 or free < 0:
        return Plan()
    orders: tuple[Eviction, ...] = ()
    lacking = missing_bytes - free - leaving
    in_time = affordable_bytes is None or missing_bytes <= affordable_bytes
    if lacking > 0 and leaving == 0 and in_time:
        orders = evictions(min(lacking, piece_bytes), farthest_first)
    piece = min(missing_bytes, piece_bytes)
    settled = leaving == 0 and not orders
    come = min(piece, free) if free >= piece or settled else 0
    return Plan(orders, come, come)
