"""Parses and formats durations, sizes and shares: `100ms`, `auto`, `4GiB`, `5%`.

Results are integer nanoseconds and bytes.  A faulty text raises ValueError with the accepted forms.
"""

from __future__ import annotations

import re
from typing import Final

_NANOSECONDS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "min": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_BYTES: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,18})(?:\.([0-9]{1,9}))?\s*([a-zµA-Z]{0,4})\s*\Z")
_MAX_NS: Final = 365 * 24 * 3_600_000_000_000
_MAX_BYTES: Final = 1 << 60
_LEAST_PLAIN_BYTES: Final = 10**6
"""A smaller number without a unit lacks its unit."""
QUANTUM_BOUNDS_NS: Final = (1_000_000, 3_600_000_000_000)
SHARE_BOUNDS: Final = (0.001, 0.5)


def _scaled(text: str, factors: dict[str, int]) -> int | None:
    match = _QUANTITY.match(text)
    if match is None:
        return None
    whole, fraction, unit = match.groups()
    factor = factors.get(unit) or factors.get(unit.lower())
    if factor is None:
        return None
    value = int(whole) * factor
    if fraction:
        value += int(fraction) * factor // 10 ** len(fraction)
    return value


def parse_duration(text: str) -> int:
    """Nanoseconds of `250ms`, `2s`, `1.5m`.  Raises ValueError, also for zero or a missing unit."""
    value = _scaled(text, _NANOSECONDS)
    if value is None:
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, such as 100ms, 2s or 1m")
    if not 0 < value <= _MAX_NS:
        raise ValueError(f"{text!r} is out of range: a duration is longer than 0 and at most a year")
    return value


def parse_duration_or_never(text: str) -> int:
    """As parse_duration, and `0` gives 0, which means never."""
    return 0 if text.strip() == "0" else parse_duration(text)


def parse_quantum(text: str) -> int | None:
    """As parse_duration, and `auto` gives None.  A quantum is 1ms to 1h."""
    if text.strip().lower() == "auto":
        return None
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None
    if not QUANTUM_BOUNDS_NS[0] <= value <= QUANTUM_BOUNDS_NS[1]:
        raise ValueError(f"{text!r} is out of range: a quantum is 1ms to 1h, or auto")
    return value


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB`, `1.5GB` or a plain number.  Raises ValueError."""
    value = _scaled(text, _BYTES)
    if value is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number and a unit, such as 4GiB or 512MiB")
    if value > _MAX_BYTES:
        raise ValueError(f"{text!r} is out of range: at most 1 EiB")
    if 0 < value < _LEAST_PLAIN_BYTES and text.strip()[-1].isdigit():
        raise ValueError(f"{text!r} is no size without a unit: write {text.strip()}GiB or {text.strip()}MiB")
    return value


def parse_share(text: str) -> float:
    """A fraction from `5%` or `0.5%`: 0.1% to 50%.  Raises ValueError."""
    number, percent, rest = text.strip().partition("%")
    match = _QUANTITY.match(number)
    if not percent or rest or match is None or match.group(3):
        raise ValueError(f"{text!r} is not a share: write a percentage, such as 5% or 0.5%")
    share = float(number) / 100
    if not SHARE_BOUNDS[0] <= share <= SHARE_BOUNDS[1]:
        raise ValueError(f"{text!r} is out of range: a share is 0.1% to 50%")
    return share


def parse_part(text: str, least: float = 0.0) -> float:
    """A fraction from `0.3` or `30%`: `least` to 1.  Raises ValueError."""
    number, percent, rest = text.strip().partition("%")
    match = _QUANTITY.match(number)
    if rest or match is None or match.group(3):
        raise ValueError(f"{text!r} is not a share: write a fraction or a percentage, such as 0.3 or 30%")
    part = float(number) / 100 if percent else float(number)
    if not least <= part <= 1.0:
        raise ValueError(f"{text!r} is out of range: a share is from {least:g} to 1")
    return part


def format_share(share: float) -> str:
    """`5%`."""
    return f"{share * 100:.4g}%"


def format_duration(value_ns: int) -> str:
    """Short, for people: `100ms`, `1.5s`, `250us`."""
    for unit, factor in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)):
        if value_ns >= factor:
            return f"{value_ns / factor:.4g}{unit}"
    return f"{value_ns}ns"


def format_size(value_bytes: int) -> str:
    """Short, for people: `4GiB`, `1.5MiB`, `512B`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value_bytes >= factor:
            return f"{value_bytes / factor:.4g}{unit}"
    return f"{value_bytes}B"


def count(number: int, thing: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
