"""Durations and sizes as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.units import (
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_duration_or_never,
    parse_quantum,
    parse_share,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100ms", 10**8), ("2s", 2 * 10**9), ("1.5m", 90 * 10**9), (" 250 us ", 250_000), ("1h", 3_600 * 10**9)],
)
def test_durations(text: str, expected: int) -> None:
    """Broken if a documented way to write a duration meant something else."""
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("4GiB", 4 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("1000000", 10**6)),
        *(("512B", 512), ("2g", 2 << 30), ("0", 0)),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    """Broken if a documented way to write a size meant something else."""
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "ms", "10", "-1s", "1e3s", "0s", "1 fortnight", "1s2s", "99999999h", "1.s", "٣s"])
def test_what_is_no_duration(text: str) -> None:
    """Broken if nonsense became a duration."""
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_what_may_be_switched_off() -> None:
    """Broken if `0` were refused where it is documented, or another way to write nothing were taken."""
    assert [parse_duration_or_never(text) for text in ("0", " 0 ", "2ms")] == [0, 0, 2_000_000]
    for text in ("0s", "00", "never", ""):
        with pytest.raises(ValueError, match="duration"):
            parse_duration_or_never(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 GiBs", "0x10", "20", "4096", "9999999999TiB", "1.5.5"])
def test_what_is_no_size(text: str) -> None:
    """Broken if nonsense became a size."""
    with pytest.raises(ValueError, match=r"size|range"):
        parse_size(text)


def test_the_quantum_is_bounded_and_may_be_automatic() -> None:
    """Broken if a quantum that the core cannot keep was accepted."""
    assert parse_quantum("auto") is None
    assert parse_quantum("1ms") == 1_000_000
    for text in ("999us", "61m", "never"):
        with pytest.raises(ValueError, match="auto"):
            parse_quantum(text)


@given(st.text("0123456789.,-+% ٣esmhukgKMGTiBauto\n\0", max_size=12))
def test_no_text_is_a_crash(text: str) -> None:
    """Broken if some text raised anything but ValueError."""
    for parse in (parse_duration, parse_duration_or_never, parse_quantum, parse_size):
        with contextlib.suppress(ValueError):
            value = parse(text)
            assert value is None or value >= 0


@given(st.integers(min_value=1, max_value=9_999))
def test_what_is_shown_can_be_typed(number: int) -> None:
    """Broken if a tool printed a value in a form that it does not read."""
    assert parse_duration(format_duration(number * 1_000_000)) == number * 1_000_000
    assert parse_size(format_size(number)) == number or number >= 1 << 10


@pytest.mark.parametrize(("text", "expected"), [("5%", 0.05), ("0.5%", 0.005), (" 2 % ", 0.02), ("50%", 0.5)])
def test_shares(text: str, expected: float) -> None:
    """Broken if a documented way to write a share meant something else."""
    assert parse_share(text) == pytest.approx(expected)
    assert parse_share(format_share(expected)) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "%", "0%", "51%", "-1%", "5%%", "5s%", "5% of it", "nan%"])
def test_what_is_no_share(text: str) -> None:
    """Broken if nonsense became a share."""
    with pytest.raises(ValueError, match="share"):
        parse_share(text)
