"""The plan of a switch: enough, never more, and from those farthest away."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from coordinator.memory_plan import Eviction, Figures, Plan, evictions, plan_switch


def client(number: int, allocated: int, resident: int, pinned: int = 0) -> Figures:
    """Figures of a client that may be evicted but for its pinned part."""
    return Figures(number, allocated, resident, max(0, resident - pinned))


def test_nothing_moves_when_everything_fits() -> None:
    """Broken: switches would cost where they need not."""
    plan = plan_switch(client(1, 40, 40), [client(2, 50, 50)], resident_bytes=90, capacity_bytes=100)
    assert plan == Plan((), 0)


def test_only_the_overflow_moves() -> None:
    """Broken: a switch would cost the working set instead of what does not fit."""
    plan = plan_switch(client(1, 60, 40), [client(2, 60, 60)], resident_bytes=100, capacity_bytes=100)
    assert plan == Plan((Eviction(2, 20),), 20)


def test_the_farthest_gives_first() -> None:
    """Broken: Belady's rule, memory would go out that is needed next."""
    far, near = client(3, 30, 30), client(2, 30, 30)
    plan = plan_switch(client(1, 60, 40), [far, near], resident_bytes=100, capacity_bytes=100)
    assert plan.evictions == (Eviction(3, 20),)


def test_pinned_memory_is_left_alone() -> None:
    """Broken: orders that cannot be obeyed."""
    plan = plan_switch(client(1, 60, 0), [client(2, 60, 60, pinned=50)], resident_bytes=60, capacity_bytes=100)
    assert plan == Plan((Eviction(2, 10),), 50)


def test_a_client_larger_than_the_card_is_brought_in_as_far_as_there_is_room() -> None:
    """Broken: it would never run, or everything would be thrown out and still not fit."""
    plan = plan_switch(client(1, 500, 0), [client(2, 30, 30)], resident_bytes=30, capacity_bytes=100)
    assert plan == Plan((Eviction(2, 30),), 100)


FIGURES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), max_size=5)


@given(st.integers(0, 120), st.integers(0, 120), FIGURES, st.integers(0, 120))
def test_a_plan_obeyed_fits_and_moves_no_more_than_needed(
    allocated: int, resident: int, others: list[tuple[int, int, int]], capacity: int
) -> None:
    """Broken: invariant 4, or bytes would move for nothing."""
    following = client(0, allocated, min(allocated, resident))
    far = [client(n, a, min(a, r), p) for n, (a, r, p) in enumerate(others, start=1)]
    total = following.resident_bytes + sum(f.resident_bytes for f in far)
    plan = plan_switch(following, far, resident_bytes=total, capacity_bytes=capacity)
    moved_out = {order.client: order.bytes for order in plan.evictions}
    out = sum(moved_out.values())
    missing = following.allocated_bytes - following.resident_bytes
    lacking = max(0, missing - (capacity - total))
    movable = sum(f.movable_bytes for f in far)
    assert out == min(lacking, movable)
    assert all(0 < size <= far[number - 1].movable_bytes for number, size in moved_out.items())
    assert 0 <= plan.restore_bytes <= missing
    assert plan.restore_bytes == 0 or total - out + plan.restore_bytes <= capacity
    # The farthest first: whoever gives nothing or a part stands after all who give everything they can.
    shares = [moved_out.get(f.client, 0) == f.movable_bytes for f in far]
    giving = [moved_out.get(f.client, 0) > 0 for f in far]
    for index in range(len(far) - 1):
        assert shares[index] or not any(giving[index + 1 :])


def test_no_smaller_set_of_orders_makes_the_room() -> None:
    """Broken: more would be evicted than the least that brings the next client in, by trying all ways."""
    sizes = (0, 1, 2, 3)
    for a, b, missing, free in product(sizes, sizes, sizes, (0, 1)):
        far = [client(1, a, a), client(2, b, b)]
        capacity = a + b + free
        plan = plan_switch(client(0, missing, 0), far, resident_bytes=a + b, capacity_bytes=capacity)
        ways = [x + y for x, y in product(range(a + 1), range(b + 1)) if free + x + y >= missing]
        best = min(ways, default=a + b)
        assert sum(order.bytes for order in plan.evictions) == best


def test_no_excess_no_orders() -> None:
    """Broken: an order for nothing."""
    assert evictions(0, [client(1, 5, 5)]) == evictions(-3, [client(1, 5, 5)]) == ()
