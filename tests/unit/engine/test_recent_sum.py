"""Growth of a sum during the last minute."""

from __future__ import annotations

import pytest

from nvshare.coordinator.model.statistics import RecentSum

SECOND = 1_000_000_000


def burst(recent: RecentSum, begin_s: int, total: int, each: int, seconds: int) -> int:
    """One report a second, marked before and after it, as moves do."""
    for second in range(begin_s, begin_s + seconds):
        recent.mark(second * SECOND, total)
        total += each
        recent.mark(second * SECOND, total)
    return total


def test_what_is_older_than_a_minute_is_not_recent() -> None:
    """Broken: `explain` tells the cost of a quarrel that ended long ago, or hides the present one."""
    recent = RecentSum()
    assert recent.growth(SECOND, 0) == 0
    total = burst(recent, 100, 0, 10, 8)
    assert recent.growth(108 * SECOND, total) == total == 80
    assert recent.growth(150 * SECOND, total) == 80
    assert recent.growth(600 * SECOND, total) == 0  # no growth is spread over the idle time
    total = burst(recent, 605, total, 1, 2)
    assert recent.growth(607 * SECOND, total) == 2
    total = burst(recent, 607, total, 1, 300)
    assert recent.growth(907 * SECOND, total) == pytest.approx(60, abs=6)
    assert len(recent.marks) <= 30


def test_a_later_start_bounds_the_time() -> None:
    """Broken: a program that has just begun has the share of a minute that it did not live."""
    recent = RecentSum()
    recent.mark(10 * SECOND, 0)
    assert recent.share(20 * SECOND, 5 * SECOND, 10 * SECOND) == 0.5
    assert recent.share(10 * SECOND, 0, 10 * SECOND) == 0.0
    assert recent.share(20 * SECOND, 99 * SECOND, 10 * SECOND) == 1.0
