"""The plan of a switch and of what moves ahead of one: enough, never more, and from those farthest away."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.memory.planner import Candidate, Eviction, Plan, Room, evictions, plan_ahead, plan_switch

Sizes = tuple[int, ...]
Cost = tuple[int, int]
"""Bytes that moved while nobody computed, and bytes that moved in all."""


@pytest.mark.parametrize(
    ("missing", "far", "room", "plan"),
    [
        (0, [Candidate(2, 50)], Room(10), Plan()),  # everything fits
        (20, [Candidate(2, 60)], Room(0), Plan((Eviction(2, 20),), 20, 0)),  # the overflow, not the working set
        (50, [Candidate(2, 60)], Room(30), Plan((Eviction(2, 20),), 50, 30)),  # what is free is filled at once
        (50, [Candidate(2, 60)], Room(10, 25), Plan((Eviction(2, 15),), 50, 10)),  # some of it leaves already
        (20, [Candidate(3, 30), Candidate(2, 30)], Room(0), Plan((Eviction(3, 20),), 20, 0)),  # Belady's rule
        (500, [Candidate(2, 30)], Room(70), Plan((Eviction(2, 30),), 100, 70)),  # larger than the card
    ],
)
def test_plans_by_hand(missing: int, far: list[Candidate], room: Room, plan: Plan) -> None:
    """Broken: a switch moves more than what does not fit, uses one direction of the link after the other, takes memory
    that is needed next, or never begins."""
    assert plan_switch(missing, far, room) == plan


@given(st.integers(0, 120), st.lists(st.integers(0, 50), max_size=5), st.integers(-20, 120), st.integers(0, 50))
def test_a_plan_obeyed_fits_and_moves_no_more_than_needed(
    missing: int, others: list[int], free: int, leaving: int
) -> None:
    """Broken: invariant 4, or bytes would move for nothing."""
    far = [Candidate(number, movable) for number, movable in enumerate(others)]
    plan = plan_switch(missing, far, Room(free, leaving))
    moved_out = {order.client: order.bytes for order in plan.evictions}
    out = sum(moved_out.values())
    assert out == min(max(0, missing - free - leaving), sum(others))
    assert all(0 < size <= others[client] for client, size in moved_out.items())
    assert plan.credit_bytes <= plan.restore_bytes <= missing
    assert plan.credit_bytes <= max(0, free), "never more at once than there is room for"
    assert plan.restore_bytes <= max(0, free + leaving + out), "nor at the end"
    # The farthest first: whoever gives nothing or a part stands after all who give everything they can.
    whole = [moved_out.get(f.client, 0) == f.movable_bytes for f in far]
    giving = [moved_out.get(f.client, 0) > 0 for f in far]
    assert all(whole[index] or not any(giving[index + 1 :]) for index in range(len(far)))


@given(
    st.integers(0, 120),
    st.lists(st.integers(0, 50), max_size=4),
    st.integers(-20, 120),
    st.integers(0, 50),
    st.integers(1, 60),
    st.integers(0, 120),
)
def test_pieces_ahead_fit_and_stop(
    missing: int, others: list[int], free: int, leaving: int, piece: int, affordable: int
) -> None:
    """Broken: what moves beside the holder overfills the card, goes on for ever, or takes more than the next lacks."""
    have, total_out = list(others), 0
    lacking = max(0, missing - free - leaving)
    steps = 0
    while True:
        far = [Candidate(number, movable) for number, movable in enumerate(have)]
        room = Room(free, leaving)
        plan = plan_ahead(missing, far, room, piece_bytes=piece, affordable_bytes=affordable)
        out = sum(order.bytes for order in plan.evictions)
        assert plan.credit_bytes == plan.restore_bytes <= max(0, min(piece, missing, free))
        assert out <= piece
        assert out == 0 or missing <= affordable, "there is no time for all of it"
        if plan == Plan() and leaving == 0:
            break
        for order in plan.evictions:
            have[order.client] -= order.bytes
        total_out += out
        free, leaving = free + leaving + out - plan.restore_bytes, 0
        missing -= plan.restore_bytes
        steps += 1
        assert steps < 500, "pieces without end"
    assert total_out <= lacking


def _turns(sizes: Sizes, capacity: int, start: Sizes, turns: int, *, ahead: bool) -> Cost:
    """Cost of the plans under round robin: byte by byte ahead of each switch, and the rest at it."""
    count, resident = len(sizes), list(start)
    exposed = moved = 0
    for turn in range(turns):
        holder, following = turn % count, (turn + 1) % count
        while ahead:
            far = [Candidate((holder + k) % count, resident[(holder + k) % count]) for k in range(count - 1, 1, -1)]
            room = Room(capacity - sum(resident))
            plan = plan_ahead(sizes[following] - resident[following], far, room, piece_bytes=1)
            if plan == Plan():
                break
            moved += _obey(resident, following, plan)
        far = [Candidate((holder + k) % count, resident[(holder + k) % count]) for k in range(count, 1, -1)]
        plan = plan_switch(sizes[following] - resident[following], far, Room(capacity - sum(resident)))
        bytes_now = _obey(resident, following, plan)
        exposed, moved = exposed + bytes_now, moved + bytes_now
        assert resident[following] == sizes[following]
        assert sum(resident) <= capacity
    return exposed, moved


def _obey(resident: list[int], following: int, plan: Plan) -> int:
    for order in plan.evictions:
        resident[order.client] -= order.bytes
    resident[following] += plan.restore_bytes
    return plan.restore_bytes + sum(order.bytes for order in plan.evictions)


def _optimum(sizes: Sizes, capacity: int, start: Sizes, turns: int, *, ahead: bool) -> Cost:
    """The least exposed bytes, and with these the least bytes in all, of every way there is."""
    count = len(sizes)
    states = [state for state in product(*(range(size + 1) for size in sizes)) if sum(state) <= capacity]
    best: dict[Sizes, Cost] = {start: (0, 0)}
    for turn in range(turns):
        holder, following = turn % count, (turn + 1) % count
        before = dict(best)
        if ahead:
            for state, (exposed, moved) in best.items():
                for other in states:
                    if other[holder] == state[holder]:  # nothing moves under running work
                        cost = (exposed, moved + _distance(state, other))
                        before[other] = min(before.get(other, cost), cost)
        best = {}
        for state, (exposed, moved) in before.items():
            for other in states:
                if other[following] == sizes[following]:
                    size = _distance(state, other)
                    cost = (exposed + size, moved + size)
                    best[other] = min(best.get(other, cost), cost)
    return min(best.values())


def _distance(state: Sizes, other: Sizes) -> int:
    return sum(abs(a - b) for a, b in zip(state, other, strict=True))


def _filled(sizes: Sizes, capacity: int) -> Sizes:
    found: list[int] = []
    for size in sizes:
        found.append(min(size, capacity - sum(found)))
    return tuple(found)


CASES = [
    (sizes, capacity)
    for count in (2, 3, 4)
    for sizes in product((1, 2, 3) if count < 4 else (1, 2), repeat=count)
    for capacity in range(max(sizes), min(sum(sizes), 6))
]


@pytest.mark.parametrize("ahead", [True, False])
def test_no_way_is_better(ahead: bool) -> None:
    """Broken: over two rounds, more moves than the best of all ways needs: while nobody computes, or in all."""
    assert len(CASES) > 100
    for sizes, capacity in CASES:
        start = _filled(sizes, capacity)
        ours = _turns(sizes, capacity, start, 2 * len(sizes), ahead=ahead)
        best = _optimum(sizes, capacity, start, 2 * len(sizes), ahead=ahead)
        assert ours == best, f"{sizes} on {capacity}"


def test_no_excess_no_orders() -> None:
    """Broken: an order for nothing."""
    assert evictions(0, [Candidate(1, 5)]) == evictions(-3, [Candidate(1, 5)]) == ()
