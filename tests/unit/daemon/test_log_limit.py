"""A log that programs cannot fill."""

from __future__ import annotations

import logging

from nvshare.coordinator.daemon.log_limit import AT_ONCE, PER_S, LogLimit


def _record(at_s: float, level: int = logging.WARNING) -> logging.LogRecord:
    record = logging.LogRecord("nvshare", level, "", 0, "%s needs room", ("program",), None)
    record.created = at_s
    return record


def test_a_flood_of_lines_is_bounded_and_told() -> None:
    """Broken: a program that connects again and again fills the disk, hides an error, or nobody learns of the gap."""
    limit = LogLimit()
    passed = sum(limit.filter(_record(1000 + number / 1000)) for number in range(10_000))
    assert AT_ONCE <= passed <= AT_ONCE + 10 * PER_S + 1
    assert limit.filter(_record(1010.0, logging.ERROR))
    assert not limit.filter(_record(1010.0))
    later = _record(1100.0)
    assert limit.filter(later)
    assert later.getMessage() == "program needs room (1 lines before this one were left out)"
    again = _record(1100.0)
    assert limit.filter(again)
    assert again.getMessage() == "program needs room"
