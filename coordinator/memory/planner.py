"""Plans evictions and restorations for the next client, at a switch and ahead of one.  Pure functions.

Belady's rule: clients whose next turn is farthest away make room.  Under round robin that is the client that just ran
(L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966).

Rules:
- At a switch nothing computes, so everything is ordered at once.  The restoration begins with the free room and gets
  credit as evictions free more, so both directions of the link are busy.
- Ahead of a switch, moves are hidden behind computation and go in pieces.  The holder cannot give room and is the
  farthest of all, so moving ahead costs up to twice the bytes.  It is done only where all of it ends before the switch.
- Never more bytes are evicted than the next client lacks room for.  Nothing is ordered when everything fits.
- Credit is at most what is free, so the sum of resident bytes stays within capacity if clients do as told.

Non-goals: when orders are sent, and their end (memory/switching.py, memory/prefetch.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A client that may give room: `movable_bytes` is the resident part that can be evicted now."""

    client: int
    movable_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """`free_bytes` that no client has or was promised, below zero when too much was promised; `leaving_bytes` that
    evictions under way will add.
    """

    free_bytes: int
    leaving_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Eviction:
    """`client` moves `bytes` off the GPU."""

    client: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Evictions and the restoration go on at the same time; `credit_bytes` of the latter have room now."""

    evictions: tuple[Eviction, ...] = ()
    restore_bytes: int = 0
    credit_bytes: int = 0


def evictions(excess_bytes: int, farthest_first: Iterable[Candidate]) -> tuple[Eviction, ...]:
    """Makes room for `excess_bytes`, as far as possible, from clients whose turn is farthest away."""
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
    """The moves before the next client runs, which lacks `missing_bytes`.

    A client larger than its room is brought in as far as there is room.
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
    """The next pieces to move for the next client while another one computes.

    `farthest_first` names neither of the two.  `affordable_bytes` is what the link moves each way until the switch;
    None: unlimited.  One piece goes out at a time, and one comes in as soon as there is room for it.
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
