"""Speed of programs side by side on one card that slices its time, as the driver does by default.

Model: a program alone keeps the card busy for the part `busy` of the time.  Programs that hold the card together divide
its time max-min fairly among what each wants, which is `busy`, or less under a rate.  If several get less than they
want, switches of context take `SWITCHING` of the time.  The speed of a program is the time that it gets over `busy`: 1
is as fast as alone.

Non-goals: spatial sharing (MPS), the memory's bandwidth, programs that slow each other although the card has time left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SWITCHING: Final = 0.05
"""Measured: two saturating programs have 95 % of one alone (bench/results/h200.md)."""


def shares(wanted: Sequence[float]) -> list[float]:
    """The part of the card's time that each program gets."""
    got = _divided(wanted, 1.0)
    short = sum(part < want - 1e-9 for part, want in zip(got, wanted, strict=True))
    return got if short < 2 else _divided(wanted, 1.0 - SWITCHING)


def _divided(wanted: Sequence[float], left: float) -> list[float]:
    got = [0.0] * len(wanted)
    ascending = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, number in enumerate(ascending):
        got[number] = min(wanted[number], left / (len(ascending) - place))
        left -= got[number]
    return got
